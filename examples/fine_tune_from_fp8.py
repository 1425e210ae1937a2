"""Fine-tune a model of transformers from its FP8 weights (or its BF16 ones), and leave FP8 weights again.

    python examples/fine_tune_from_fp8.py FOLDER --text notes.txt --out runs/tuned

FOLDER is any Hugging Face folder whose FP8 weights lie in blocks of 128×128 (DeepSeek, Qwen3-…-FP8, what
`octile convert` writes). The FP32 masters are the dequantised weights, so the first forward pass quantises them to the
very same 8-bit numbers; from then on the masters move in steps that FP8 could not hold. For octile's own DeepSeek model
there is a command: `octile train --init-from FOLDER`.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import octile
from octile.checkpoint import convert_checkpoint


def load_in_float32(folder: Path, room: Path) -> nn.Module:
    """A folder's model with FP32 parameters, whatever its weights are stored in; FP8 ones become FP32 in `room`.

    transformers can dequantise by itself (`FineGrainedFP8Config(dequantize=True)`), but spreads the scales evenly over
    a side that is no multiple of 128, leaves what is not FP8 in BF16, and saves such a model as FP8 by its own rules.
    """
    if getattr(AutoConfig.from_pretrained(folder), "quantization_config", None) is not None:
        convert_checkpoint(folder, room, to="float32")
        folder = room
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="a file to learn")
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=1e-5)
    asked = parser.parse_args(arguments)

    model = octile.convert(load_in_float32(asked.folder, asked.out / "start"))  # says what it converted
    tokenizer = AutoTokenizer.from_pretrained(asked.folder)
    tokens = tokenizer(asked.text.read_text(encoding="utf-8"))["input_ids"]
    starts = range(0, len(tokens) - asked.length + 1, asked.length)
    pieces = [tokens[start : start + asked.length] for start in starts]

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(asked.out),
            max_steps=asked.steps,
            per_device_train_batch_size=4,
            learning_rate=asked.lr,
            lr_scheduler_type="cosine",
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            logging_steps=max(asked.steps // 10, 1),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(asked.out / "float32"))
    convert_checkpoint(asked.out / "float32", asked.out / "fp8", to="fp8")
    print(f"{asked.out / 'fp8'} is FP8 again; {asked.out / 'float32'} holds the masters")
    return trainer


if __name__ == "__main__":
    main()
