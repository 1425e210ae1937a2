"""The options of `octile lab what-if`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from octile.options import Positional
from octile.validation import Range, check_fields


@dataclass(frozen=True)
class Options:
    """Compute a captured step's GEMMs in every combination of format, block, scale rule, promotion and tensor core.

    Attributes:
        captures: files that octile lab capture wrote. The first is computed in all combinations; the others show how
            the error of its layers changes between steps.
        layers: patterns of layer names, separated by commas. Of a layer's experts, the one with most tokens is used.
        products: the GEMMs, fprop, dgrad or wgrad, separated by commas; by default all in the capture.
        formats: e4m3, e5m2, e5m6, int8, mx (with 1×32 blocks) or nvfp4 (with its own blocks and scales).
        blocks: tensor, row, 1x128, 128x128 (for weights; other operands have 1x128) or 1x32.
        scales: float32, up, nearest, down (powers of two) or ocp (the rule of MX).
        promote: intervals after which the tensor core's sum is promoted to FP32; never for no promotion.
        arch: sm_80, sm_89, sm_90, sm_90_mma, sm_100, fp32 or exact.
        sample: the number of rows of each operand to multiply.
        seed: the seed with which the rows are drawn.
        top: the number of combinations to list for each format.
        tokenizer: a tokenizer's file or folder; by default the run's own, if the capture is in its folder.
        out: the page to write.
        json: print JSON and write no page.

    Raises:
        TypeError, ValueError: an option has another type or is outside its range.
    """

    captures: Positional[tuple[Path, ...]]
    layers: str = "*"
    products: str | None = None
    formats: str = "e4m3,e5m2,e5m6,int8,mx,nvfp4"
    blocks: str = "tensor,row,1x128,128x128,1x32"
    scales: str = "float32,up,nearest,down,ocp"
    promote: str = "32,128,never"
    arch: str = "sm_90,exact"
    sample: Annotated[int, Range(at_least=1)] = 32
    seed: int = 0
    top: Annotated[int, Range(at_least=1)] = 4
    tokenizer: Path | None = None
    out: Path = Path("lab/what_if.html")
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
