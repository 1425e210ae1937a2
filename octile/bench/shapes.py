"""The GEMMs that `octile bench gemm` measures: those of DeepSeek-V3, and of DeepGEMM's own tests.

Their sizes are those of the catalog, whose kernels are compiled without a GPU. On a CPU, where the reference
implementation is measured, they have the sizes of the tiny preset.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from octile.kernels.cuda.gemm import catalog

ALIGNMENT = 128  # rows or tokens; DeepGEMM takes groups of multiples of it without padding
MASKED_ROWS = 4096  # capacity of a masked group


def aligned(n: int, multiple: int = ALIGNMENT) -> int:
    """Round n up to a multiple."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Case:
    """One GEMM a · bᵀ, or one for each group.

    Attributes:
        kind: dense; grouped (rows sorted by group); masked; wgrad (groups along K).
        m, n, k: the size of a group; where the groups differ in size, the mean of the sizes that are drawn.
        groups: number of groups.
        tiles: whether b has one scale per 1×128 tile, as a has; otherwise one per 128×128 block.
        accumulate: whether the output is FP32 and added to; otherwise it is BF16 and overwritten.
        drawn: the class of a drawn case, as in `octile.bench.drawn`.
    """

    kind: Literal["dense", "grouped", "masked", "wgrad"]
    m: int
    n: int
    k: int
    groups: int = 1
    tiles: bool = False
    accumulate: bool = False
    drawn: str = ""

    @property
    def name(self) -> str:
        """The sizes, with the number of groups before them."""
        sides = f"{self.m}×{self.n}×{self.k}"
        return sides if self.kind == "dense" else f"{self.groups}×{sides}"

    @property
    def what(self) -> str:
        """The kind of GEMM, as rows have it in `what`."""
        kind = "" if self.kind == "dense" else f", {self.kind}"
        drawn = f", drawn: {self.drawn}" if self.drawn else ""
        return "FP8" + " 1D1D" * (self.tiles and self.kind == "dense") + kind + " +=" * self.accumulate + drawn

    @cached_property
    def sizes(self) -> list[int]:
        """The rows of each group (wgrad: tokens), drawn from 0.7 to 1.3 times the mean, always the same.

        Except in masked cases they are multiples of ALIGNMENT, so that no library pads and all compute the same.
        """
        draw = random.Random(f"{self.groups} groups")
        expected = self.k if self.kind == "wgrad" else self.m
        drawn = [max(1, int(expected * draw.uniform(0.7, 1.3))) for _ in range(self.groups)]
        return drawn if self.kind == "masked" else [aligned(size) for size in drawn]

    @property
    def expected_rows(self) -> int:
        """The rows of a masked group that callers announce: 1.2 times the mean, as in DeepGEMM's tests."""
        return int(1.2 * self.m)

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        if self.kind == "dense":
            return 2 * self.m * self.n * self.k
        return 2 * sum(self.sizes) * self.n * (self.m if self.kind == "wgrad" else self.k)


LARGE = [Case("dense", *shape) for shape in catalog.LARGE]
M128 = [Case("dense", 128, n, k) for n, k in catalog.SMALL]
FEWER = [Case("dense", m, n, k) for m in (1, 4, 16, 64) for n, k in catalog.SMALL]
FEW_ROWS = [*M128, *FEWER]
MIDDLE = [  # rows as a server has them, for `tools/compare_trees.py`
    Case("dense", m, n, k)
    for n, k in ((2112, 7168), (3072, 8192), (1536, 7168), (4096, 14336), (5120, 5120), (4096, 7168))
    for m in (128, 192, 256)
]
BOTH_TILES = [Case("dense", c.m, c.n, c.k, tiles=True) for c in (*LARGE, *M128)]
ACCUMULATED = [Case("dense", c.m, c.n, c.k, tiles=True, accumulate=True) for c in (*LARGE, *M128)]
GROUPED = [Case("grouped", m, n, k, groups) for groups, m in ((4, 8192), (8, 4096)) for n, k in catalog.EXPERTS]
MASKED = [
    Case("masked", m, n, k, groups)
    for groups, m in ((32, 192), (6, 1024), (32, 20), (6, 20))
    for n, k in catalog.EXPERTS
]
WGRAD = [
    Case("wgrad", m, n, k, groups, tiles=True, accumulate=True)
    for groups, k in ((4, 8192), (8, 4096), (16, 2048))
    for m, n in ((4096, 7168), (7168, 2048))
]
GPU = [*LARGE, *FEW_ROWS, *ACCUMULATED, *BOTH_TILES, *GROUPED, *MASKED, *WGRAD]
CPU = [
    Case("dense", 2048, 512, 256),
    Case("dense", 2048, 1024, 1024),
    Case("dense", 2048, 576, 2048),
    Case("grouped", 256, 512, 256, 8),
]
