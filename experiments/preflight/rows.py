"""How the SNR that a preflight predicts depends on the number of rows that are drawn.

    octile train --steps 60 --out runs/rows
    python experiments/preflight/rows.py runs/rows

The SNR of every fourth GEMM of two batches is compared with that of 256 rows, for several seeds.
"""

import argparse
from pathlib import Path

import torch

from octile.atomic_files import write_json
from octile.checkpoint.hugging_face import load
from octile.lab.pages.preflight import read_tokens
from octile.lab.preflight import capture_operands, error_by_channel, quantize_as_recipe
from octile.lab.what_if import SampledGemm, sample_rows, values
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.report.machine import machine

ROWS, ALL = (1, 2, 4, 8, 16, 32, 64), 256
SEEDS, EVERY = 6, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("rows.json"))
    args = parser.parse_args()
    recipe, model = Recipe.deepseek_v3(), apply_recipe(load(args.run).train(), Recipe.float32())
    differences: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for tokens in read_tokens(args.run, "stdlib", 2 * 1024).view(2, 8, 128):
        for captured in capture_operands(model, (tokens, tokens))[::EVERY]:
            whole = quantize_as_recipe(recipe, captured)

            def snr(rows: int, seed: int, captured=captured, whole=whole) -> float | None:
                sampled = SampledGemm.draw(captured, rows, seed)
                a, b = sample_rows(whole[0], sampled.rows_a), sample_rows(whole[1], sampled.rows_b)
                return error_by_channel(values(a) @ values(b).mT, sampled.exact).snr_db

            if (of_all := snr(ALL, SEEDS)) is not None:
                for rows in ROWS:
                    found = (snr(rows, seed) for seed in range(SEEDS))
                    differences[rows] += [db - of_all for db in found if db is not None]
    table = []
    for rows, of_rows in differences.items():
        db = torch.tensor(of_rows)
        table.append({"rows": rows, "rms_db": db.square().mean().sqrt().item(), "largest_db": db.abs().max().item()})
        print(table[-1], flush=True)
    write_json(args.out, {"machine": machine(), "run": "tiny, 60 steps", "rows": table})


if __name__ == "__main__":
    main()
