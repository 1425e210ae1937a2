"""The options of `octile lab hardware`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from octile.options import Positional
from octile.validation import Range, check_fields


@dataclass(frozen=True)
class Options:
    """Estimate what DeepSeek-V3's suggestions to hardware makers would bring to a captured step, in error and in bytes.

    Attributes:
        capture: a file that octile lab capture wrote.
        layers: patterns of layer names, separated by commas.
        products: the GEMMs to measure, fprop, dgrad or wgrad, separated by commas; by default all in the capture.
        sample: the number of rows of each operand to multiply.
        seed: the seed with which the rows are drawn.
        out: the page to write.
        json: print JSON and write no page.

    Raises:
        TypeError, ValueError: an option has another type or is outside its range.
    """

    capture: Positional[Path]
    layers: str = "*"
    products: str | None = None
    sample: Annotated[int, Range(at_least=1)] = 32
    seed: int = 0
    out: Path = Path("lab/hardware.html")
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
