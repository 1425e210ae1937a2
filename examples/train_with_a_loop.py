"""Train a transformers model in FP8 with your own training loop.

    python examples/train_with_a_loop.py --model llama --steps 200

The loop is the same as without octile, except for two lines: `octile.convert`, and an AdamW whose moments are BF16
(8 bytes per parameter for weight and moments instead of 12). torch's AdamW works as well.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import octile
from octile.cli import run_script

# recipes that do not set the optimizer's formats or a loss scale, which only `octile train` applies
ALL = {name: octile.Recipe.named(name) for name in octile.Recipe.names()}
RECIPES = [name for name, r in ALL.items() if r.optimizer == ALL["bf16"].optimizer and r.loss_scale is None]


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
    }
    config = {"llama": LlamaConfig, "qwen": Qwen3Config}[kind](**shape)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("llama", "qwen"), default="llama")
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="the training text")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes per sequence")
    parser.add_argument("--recipe", choices=RECIPES, default="deepseek_v3")
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
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = build(args.model, args.hidden, args.layers).to(device)
    model = octile.convert(model, octile.Recipe.named(args.recipe))  # prints what it converted
    optimizer = octile.optim.AdamW(octile.optim.param_groups(model, weight_decay=0.1), lr=1e-3)

    data = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    losses = []
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        loss_sum = 0.0
        for _ in range(2):  # micro-batches; the weights are quantized once for both
            starts = torch.randint(len(data) - args.length, (4,)).tolist()
            tokens = torch.stack([data[start : start + args.length] for start in starts]).long().to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            loss_sum += loss.item()
        octile.optim.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        octile.nn.end_step(model)  # updates delayed scales; other recipes have none
        losses.append(loss_sum)
        if step % max(args.steps // 10, 1) == 0:
            print(f"step {step}/{args.steps}: loss {loss_sum:.3f} nats per byte")
    return losses


if __name__ == "__main__":
    run_script(main)  # bad input ends in one line
