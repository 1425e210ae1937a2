"""Train a transformers model in FP8 with transformers' own Trainer.

    python examples/train_with_trainer.py --model qwen --steps 200 --out runs/qwen

The only line of octile is `octile.convert`. It replaces the linear layers in place; parameters and their names stay the
same. Gradient accumulation, BF16 autocast, gradient checkpointing, clipping and checkpoints therefore work as usual,
and transformers loads what `save_model` writes without octile. A model with experts resumes if it is made of the
checkpoint by `from_pretrained` first (docs/compatibility.md); these two have none.

The model is built from a configuration and reads bytes, so nothing is downloaded. Recipes with delayed scaling also
need a TrainerCallback that calls `octile.nn.end_step(model)` in `on_optimizer_step`.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Trainer, TrainingArguments

import octile
from octile.cli import run_script

# recipes that do not set the optimizer's formats or a loss scale, and need no `end_step` after each step
ALL = {name: octile.Recipe.named(name) for name in octile.Recipe.names()}
RECIPES = [
    name
    for name, r in ALL.items()
    if r.optimizer == ALL["bf16"].optimizer and r.loss_scale is None and not r.has_delayed_scaling
]


def build(kind: str, hidden: int, layers: int) -> torch.nn.Module:
    """Make a Llama or a Qwen3 that predicts bytes."""
    shape = {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": max(hidden // 128, 1),
        "head_dim": 32,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = {"llama": LlamaConfig, "qwen": Qwen3Config}[kind](**shape)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def examples(path: Path, length: int) -> list[dict[str, list[int]]]:
    """Split a file's bytes into sequences of one length. The model shifts the labels itself."""
    data = list(path.read_bytes())
    sequences = [data[start : start + length] for start in range(0, len(data) - length + 1, length)]
    return [{"input_ids": sequence, "labels": sequence} for sequence in sequences]


def main(arguments: list[str] | None = None) -> Trainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("llama", "qwen"), default="llama")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="the training text")
    parser.add_argument("--out", type=Path, default=Path("runs/trainer"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes per sequence")
    parser.add_argument("--recipe", choices=RECIPES, default="deepseek_v3")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    args = parser.parse_args(arguments)
    for name in ("steps", "hidden", "layers", "length"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(args, name)}")
    if args.hidden % 32:
        raise ValueError(f"hidden must be a multiple of 32, the size of an attention head, not {args.hidden}")
    if not args.text.is_file():
        raise FileNotFoundError(f"text {str(args.text)!r} is no file")
    if args.text.stat().st_size <= args.length:
        raise ValueError(
            f"{args.text} has {args.text.stat().st_size} bytes, and a sequence of {args.length} needs more"
        )

    torch.manual_seed(0)
    model = build(args.model, args.hidden, args.layers)
    model = octile.convert(model, octile.Recipe.named(args.recipe))  # prints what it converted
    model.gradient_checkpointing_enable()

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,  # the weights are quantized once for both
            learning_rate=1e-3,
            warmup_steps=args.steps // 10,
            use_cpu=not torch.cuda.is_available(),
            bf16=True,  # autocast: parameters stay FP32, operators other than FP8 GEMMs compute in BF16
            logging_steps=max(args.steps // 10, 1),
            save_steps=max(args.steps // 2, 1),
            report_to="none",
        ),
        train_dataset=examples(args.text, args.length),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.out / "model"))
    print(f"{args.out / 'model'} loads in transformers; `octile convert` converts it to FP8")
    return trainer


if __name__ == "__main__":
    run_script(main)  # bad input ends in one line
