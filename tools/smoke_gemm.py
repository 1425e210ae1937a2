"""Run a few GEMMs, each in its own process, to see whether the kernels work: `python -m tools.smoke_gemm`."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from octile.bench.gemm import why_not
from octile.bench.shapes import Case

CASES = [
    Case("dense", 4096, 4096, 7168),
    Case("dense", 128, 2112, 7168),
    Case("dense", 1, 7168, 2048),
    Case("dense", 4096, 4096, 7168, tiles=True),
    Case("dense", 4096, 4096, 7168, tiles=True, accumulate=True),
    Case("grouped", 4096, 4096, 2048, 8),
    Case("masked", 192, 4096, 2048, 32),
    Case("wgrad", 4096, 7168, 2048, 16, tiles=True, accumulate=True),
]


def main() -> int:
    with ThreadPoolExecutor(len(CASES)) as pool:
        reasons = list(pool.map(why_not, CASES))
    for case, reason in zip(CASES, reasons, strict=True):
        print(f"{case.name:20} {case.what:14} {reason or 'right'}")
    return 1 if any(reasons) else 0


if __name__ == "__main__":
    sys.exit(main())
