"""Compare the relative error of wgrad where x has 128×1 tiles and where it has 128×128 blocks.

    python -m experiments.wgrad_blocks.error > experiments/wgrad_blocks/output.txt

dw = dyᵀ · x over 4,096 tokens with 512 channels each, in FP64 from the quantized values. dy has 128×1 tiles. x comes

    original        from the original, with FP32 scales
    requantized     from what a layer saves, 1×128 tiles with powers of two, as powers of two: octile's data flow

The columns are ‖dw − exact‖ / ‖exact‖.
"""

import torch
from torch import Tensor

from octile.bench.rows import align_columns
from octile.formats import BLOCK, COLUMN_TILE
from octile.scaled import quantize

T, N, K = 4096, 512, 512


def data(kind: str) -> tuple[Tensor, Tensor]:
    """x [T, K] and dy [T, N]: N(0, 1), where some tokens or channels of x are larger."""
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(T, K, generator=generator), torch.randn(T, N, generator=generator)
    if kind.startswith("tokens"):
        x[::100] *= float(kind.split("×")[1])
    elif kind.startswith("channels"):
        x[:, ::100] *= float(kind.split("×")[1])
    return x, dy


def relative_error(x: Tensor, dy: Tensor, block: tuple[int, int], is_requantized: bool) -> float:
    """The relative error of dw for x in these blocks."""
    if is_requantized:
        saved = quantize(x, (1, 128), scale="power_of_2").dequantize()
        q = quantize(saved, block, scale="power_of_2").dequantize()
    else:
        q = quantize(x, block).dequantize()
    exact = dy.double().mT @ x.double()
    found = quantize(dy, COLUMN_TILE).dequantize().double().mT @ q.double()
    return float((found - exact).norm() / exact.norm())


def main() -> None:
    """Print the table."""
    rows = [["x", "original, 128×1", "original, 128×128", "requantized, 128×1", "requantized, 128×128"]]
    for kind in ("normal", "tokens ×100", "tokens ×10000", "channels ×100"):
        x, dy = data(kind)
        errors = [relative_error(x, dy, block, again) for again in (False, True) for block in (COLUMN_TILE, BLOCK)]
        rows.append([kind, *(f"{error:.5f}" for error in errors)])
    print(align_columns(rows, right=set(rows[0][1:])))


if __name__ == "__main__":
    main()
