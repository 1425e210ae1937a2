"""Compare the machine code of the catalog's kernels between two states of the tree, without a GPU.

    python tools/compare_cubins.py --save before.json
    (change the CUDA source)
    python tools/compare_cubins.py --compare before.json

For every kernel of the catalog this prints registers, spilled bytes and instructions before and after, unless the
machine code (the section .text of the cubin) is identical. The exit code is 1 where registers or spills rise, or where
the number of instructions changes by more than 1%. `--only WORD` takes the cases whose name contains the word, such as
`gemm` or `quantize`. Kernels that were renamed are matched by their machine code.
"""

import argparse
import hashlib
import json
import os
import struct
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from octile.kernels.cuda.gemm import catalog as gemm_catalog
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.quantize import catalog

INSTRUCTION_BYTES = 16
TOLERANCE = 0.01  # of the number of instructions

Rows = dict[str, dict[str, Any]]


def compiled(only: str) -> Rows:
    """Return registers, spilled bytes, instructions and a hash of the machine code of every kernel, by case."""
    requests: dict[str, tuple[str, Mapping[str, int | bool], Mapping[str, str] | None]] = {}
    seen = set()
    for case, config in gemm_catalog.configs().items():
        if config not in seen:
            seen.add(config)
            requests[f"gemm {case}"] = "gemm", config.constants(), config.headers()
    for case, launched in catalog.launches().items():
        requests[f"quantize {case}"] = launched.name, launched.constants, None

    def row(case: str) -> dict[str, Any]:
        name, constants, headers = requests[case]
        cubin = specialize.compile(name, constants, "sm_90a", headers)
        text = machine_code(cubin.image)
        return {
            "registers": cubin.registers,
            "spill_bytes": cubin.spill_bytes,
            "instructions": len(text) // INSTRUCTION_BYTES,
            "sha256": hashlib.sha256(text).hexdigest(),
        }

    cases = [case for case in requests if only in case]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(cases, pool.map(row, cases), strict=True))


def machine_code(cubin: bytes) -> bytes:
    """Return the section .text.* of a cubin of one kernel.

    Raises:
        ValueError: the file has no such section, or several.
    """
    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names_index = struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + 64 * i) for i in range(count)]
    names = cubin[headers[names_index][4] :]
    found = [header for header in headers if names[header[0] :].startswith(b".text.")]
    if len(found) != 1:
        raise ValueError(f"a cubin of one kernel must have one section .text.*, not {len(found)}")
    _, _, _, _, offset, size, *_ = found[0]
    return cubin[offset : offset + size]


def compare(before: Rows, after: Rows) -> bool:
    """Print the differences, and return whether the machine code is as good as before."""
    by_code = {row["sha256"]: case for case, row in before.items()}
    same = good = 0
    for case, new in after.items():
        old = before.get(case)
        if new["sha256"] in by_code:
            same += 1
            continue
        if old is None:
            print(f"{case}: not in the saved file; {new['registers']} registers, {new['spill_bytes']} bytes spilled")
            good += new["spill_bytes"] == 0
            continue
        worse = [name for name in ("registers", "spill_bytes") if new[name] > old[name]]
        change = new["instructions"] / old["instructions"] - 1
        is_good = not worse and abs(change) <= TOLERANCE
        good += is_good
        names = ("registers", "spill_bytes", "instructions")
        figures = ", ".join(f"{name} {old[name]} → {new[name]}" for name in names)
        print(f"{'  ' if is_good else '! '}{case}: {figures} ({change:+.1%})")
    print(f"{len(after)} kernels: {same} identical, {good} different and as good, {len(after) - same - good} worse")
    return same + good == len(after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--save", metavar="FILE", type=Path)
    action.add_argument("--compare", metavar="FILE", type=Path)
    parser.add_argument("--only", metavar="WORD", default="")
    options = parser.parse_args()
    rows = compiled(options.only)
    if options.save:
        options.save.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
        return 0
    before: Rows = json.loads(options.compare.read_text("utf-8"))
    return 0 if compare(before, rows) else 1


if __name__ == "__main__":
    sys.exit(main())
