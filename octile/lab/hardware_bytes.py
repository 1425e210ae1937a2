"""How many bytes the products of a capture move today, and would move with other hardware.

Counted from the operands' shapes alone: each tensor once for every kernel that reads or writes it (what a product reads
again it finds in the cache), BF16 in 2 bytes, FP8 in 1 and 4 more for the scale of each 1×128 tile, whole or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octile.lab.capture import CapturedGemm

TILE, BF16_BYTES, FP8_BYTES, FP32_BYTES = 128, 2, 1, 4


@dataclass(frozen=True)
class Bytes:
    """Moved today, and then."""

    today: int
    then: int

    @property
    def saved(self) -> float:
        """As a share of today's; 0 where nothing moves."""
        return 1 - self.then / self.today if self.today else 0.0


def in_bf16(rows: int, columns: int) -> int:
    return BF16_BYTES * rows * columns


def in_fp8(rows: int, columns: int) -> int:
    """With tiles along the columns."""
    return FP8_BYTES * rows * columns + FP32_BYTES * rows * -(-columns // TILE)


def fused_cast(products: Iterable[CapturedGemm]) -> Bytes:
    """Operand a, x or dy: today read in BF16, written in FP8, read in FP8; then the product's load casts BF16."""
    return _add(Bytes(_cast_today(p), in_bf16(*p.a.shape)) for p in products)


def cast_near_memory(products: Iterable[CapturedGemm]) -> Bytes:
    """The same, but BF16 becomes FP8 as it leaves the memory."""
    return _add(Bytes(_cast_today(p), in_fp8(*p.a.shape)) for p in products)


def transposed_reads(products: Iterable[CapturedGemm]) -> Bytes:
    """wgrad's x: today the kept tiles are read, cast anew along the tokens, written and read; then read as kept."""
    wgrads = [p for p in products if p.product == "wgrad"]
    return _add(Bytes(in_fp8(*p.b.mT.shape) + 2 * in_fp8(*p.b.shape), in_fp8(*p.b.mT.shape)) for p in wgrads)


def whole_sums(products: Iterable[CapturedGemm]) -> Bytes:
    """Partial sums that leave the tensor core for FP32 registers: today every 128 products, then at the end."""
    return _add(
        Bytes(FP32_BYTES * len(p.a) * len(p.b) * -(-p.a.shape[1] // TILE), FP32_BYTES * len(p.a) * len(p.b))
        for p in products
    )


def _cast_today(p: CapturedGemm) -> int:
    return in_bf16(*p.a.shape) + 2 * in_fp8(*p.a.shape)


def _add(counts: Iterable[Bytes]) -> Bytes:
    every = list(counts)
    return Bytes(sum(c.today for c in every), sum(c.then for c in every))
