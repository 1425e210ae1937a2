"""`python -m octile.lab.probe`: compare the tensor cores of this machine's GPU with the model."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from octile.atomic_files import write_text
from octile.checkpoint.files import check_output_file
from octile.lab.probe import golden, kernels
from octile.lab.probe.compare import ChainResult, cases, compare


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print each case with its mismatches by hypothesis. Return 1 if the table is wrong."""
    parser = argparse.ArgumentParser(prog="python -m octile.lab.probe", description=__doc__)
    parser.add_argument(
        "--outputs", type=float, default=1e9, help="how many outputs to compare in total (default: %(default)g)"
    )
    parser.add_argument("--golden", type=Path, metavar="FILE", help="write some 30,000 results to a .safetensors file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.json:
        check_output_file("json", chosen.json)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        has = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        print(f"the probe needs a Hopper GPU (sm_90), this machine has {has}", file=sys.stderr)
        return 2

    device = torch.device("cuda", torch.cuda.current_device())
    todo = list(cases())
    report: dict[str, ChainResult] = {}
    for case in todo:
        start = time.perf_counter()
        found = report[str(case)] = compare(case, int(chosen.outputs / len(todo)), kernels.run, device, chosen.seed)
        print(f"{case}: {found.outputs:,} outputs, {time.perf_counter() - start:.1f} s")
        for name, count in found.mismatches.items():
            print(f"    {count:12,} of {found.tried[name]:,} differ: {name}")
        print(*(f"    {line}" for line in found.examples), sep="\n", end="\n" if found.examples else "")
    wrong = sum(found.mismatches["as in the table"] for found in report.values())
    print(f"{sum(found.outputs for found in report.values()):,} outputs compared, {wrong:,} differ from the model")

    about = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "cuda": str(torch.version.cuda)}
    if chosen.golden:
        recorded = golden.record(chosen.golden, todo, kernels.run, device, about, chosen.seed)
        print(f"{recorded:,} results written to {chosen.golden}")
    if chosen.json:
        text = json.dumps({**about, "cases": {name: asdict(found) for name, found in report.items()}}, indent=1)
        write_text(chosen.json, text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
