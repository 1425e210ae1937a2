"""Train a transformers model in FP8 with a loop of your own.

    python examples/train_with_a_loop.py --model llama --steps 200

The loop is the one that you would write without octile. Two lines are its own: `octile.convert`, and an AdamW that
keeps its moments in BF16 (8 bytes a parameter for weight and moments instead of 12; torch's works as well).
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import octile

# those that need neither an optimizer's formats nor a loss scale of their own, which `octile train` would give them
RECIPES = ("deepseek_v3", "per_tensor", "delayed", "hybrid_e5m2", "int8_tiles", "smooth_swiglu", "bf16")


def build(kind: str, hidden: int, layers: int) -> torch.nn.Module:
    """A Llama or a Qwen3 that predicts bytes."""
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
    parser.add_argument("--text", type=Path, default=Path(argparse.__file__), help="a file to learn")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--recipe", choices=RECIPES, default="deepseek_v3")
    asked = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)
    model = build(asked.model, asked.hidden, asked.layers).to(device)
    model = octile.convert(model, octile.Recipe.named(asked.recipe))  # says what it converted
    optimizer = octile.optim.AdamW(octile.optim.param_groups(model, weight_decay=0.1), lr=1e-3)

    data = torch.frombuffer(bytearray(asked.text.read_bytes()), dtype=torch.uint8)
    losses = []
    for step in range(1, asked.steps + 1):
        optimizer.zero_grad()
        loss_sum = 0.0
        for _ in range(2):  # micro-batches: the weights are quantised once for both
            starts = torch.randint(len(data) - asked.length, (4,)).tolist()
            tokens = torch.stack([data[start : start + asked.length] for start in starts]).long().to(device)
            with torch.autocast(device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss / 2
            loss.backward()
            loss_sum += loss.item()
        octile.optim.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        octile.nn.end_step(model)  # for recipes with delayed scaling; others need it not
        losses.append(loss_sum)
        if step % max(asked.steps // 10, 1) == 0:
            print(f"step {step}/{asked.steps}: loss {loss_sum:.3f} nats a byte")
    return losses


if __name__ == "__main__":
    main()
