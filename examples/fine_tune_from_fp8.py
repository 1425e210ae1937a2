"""Fine-tune a model of transformers from its FP8 (or BF16) weights, and save FP8 weights.

    python examples/fine_tune_from_fp8.py FOLDER --text notes.txt --out runs/tuned

FOLDER is any Hugging Face folder whose FP8 weights are in 128×128 blocks (DeepSeek, Qwen3-…-FP8, folders written by
`octile convert`). The FP32 master weights are the dequantized weights, so the first forward pass quantizes them to the
same encoded values. After that the masters change in steps that are too small for FP8. For octile's own DeepSeek model,
use the command `octile train --init-from FOLDER`.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import octile
from octile.checkpoint import convert_checkpoint
from octile.cli import run_script
from octile.validation import read_text


def load_in_float32(folder: Path, converted: Path) -> nn.Module:
    """Load a folder's model with FP32 parameters. FP8 weights are converted to FP32 in the folder `converted` first.

    transformers can dequantize, too (`FineGrainedFP8Config(dequantize=True)`), but it distributes scales evenly over a
    side that is no multiple of 128, leaves the other weights in BF16, and saves such a model as FP8 by its own rules.
    """
    if getattr(AutoConfig.from_pretrained(folder), "quantization_config", None) is not None:
        convert_checkpoint(folder, converted, to="float32")
        folder = converted
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="the training text")
    parser.add_argument("--out", type=Path, default=Path("runs/tuned"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args(arguments)
    for name in ("steps", "length"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(args, name)}")
    if not 0 < args.lr < math.inf:
        raise ValueError(f"lr must be above 0 and finite, not {args.lr}")
    if not (args.folder / "config.json").is_file():
        raise FileNotFoundError(f"folder {str(args.folder)!r} has no config.json")
    if not args.text.is_file():
        raise FileNotFoundError(f"text {str(args.text)!r} is no file")

    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    tokens = tokenizer(read_text(args.text))["input_ids"]
    starts = range(0, len(tokens) - args.length + 1, args.length)
    sequences = [tokens[start : start + args.length] for start in starts]
    if not sequences:
        raise ValueError(f"{args.text} has {len(tokens)} tokens, and a sequence has {args.length}")
    args.out.mkdir(parents=True, exist_ok=True)  # before the work: a result that cannot be stored would be lost
    if any(args.out.iterdir()):
        raise FileExistsError(f"out {str(args.out)!r} holds other files: name a folder that is empty or does not exist")
    model = octile.convert(load_in_float32(args.folder, args.out / "start"))  # prints what it converted

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            logging_steps=max(args.steps // 10, 1),
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=[{"input_ids": sequence, "labels": sequence} for sequence in sequences],
        data_collator=default_data_collator,  # without padding, for which a tokenizer may have no token
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(args.out / "float32"))
    convert_checkpoint(args.out / "float32", args.out / "fp8", to="fp8")
    print(f"{args.out / 'fp8'} holds FP8 weights; {args.out / 'float32'} holds the masters")
    return trainer


if __name__ == "__main__":
    run_script(main)  # bad input ends in one line
