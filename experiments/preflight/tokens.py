"""How the advice of a preflight depends on the number of tokens in a batch.

    octile train --steps 60 --out runs/tokens
    python experiments/preflight/tokens.py runs/tokens

A batch of each size is drawn several times from other text. For each, the GEMMs below 20 dB are compared with those of
three batches of 512 tokens: below in more than half of them, or not.
"""

import argparse
from itertools import islice
from pathlib import Path

import torch

from octile.atomic_files import write_json
from octile.checkpoint.hugging_face import load
from octile.lab.pages.preflight import read_tokens
from octile.lab.preflight import preflight
from octile.recipe import Recipe
from octile.report.machine import machine

SIZES = (16, 64, 128, 256, 512)
REPEATS, REFERENCE = 4, 3


def below(model: torch.nn.Module, tokens: torch.Tensor, recipe: Recipe) -> set[tuple[str, str]]:
    """Return the GEMMs below 20 dB in one batch [B, S]."""
    found = preflight(model, [(tokens, tokens)], recipe)
    return {(risk.weight, risk.gemm) for risk in found.risks if found.batches_below(risk)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--recipes", nargs="+", default=["deepseek_v3", "int8_tiles"])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("tokens.json"))
    args = parser.parse_args()
    model = load(args.run).train()
    text = read_tokens(args.run, "stdlib", (REFERENCE + REPEATS) * max(SIZES) * 4)
    rows = []
    for name in args.recipes:
        recipe, stream = Recipe.named(name), iter(text.split(max(SIZES)))
        votes = [below(model, each.view(-1, 128), recipe) for each in islice(stream, REFERENCE)]
        reference = {gemm for gemm in set().union(*votes) if 2 * sum(gemm in vote for vote in votes) > len(votes)}
        for size in SIZES:
            others = [below(model, each[:size].view(-1, min(size, 128)), recipe) for each in islice(stream, REPEATS)]
            wrong = [len(other ^ reference) for other in others]
            rows.append({"recipe": name, "tokens": size, "reference": len(reference), "advised": [*map(len, others)],
                         "wrong": wrong})  # fmt: skip
            print(rows[-1], flush=True)
            write_json(args.out, {"machine": machine(), "run": "tiny, 60 steps", "rows": rows})


if __name__ == "__main__":
    main()
