"""The options of `octile lab accumulate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """Measure the error of long FP8 sums in a tensor core, by their length, their data and the promotion interval.

    Attributes:
        k: lengths of the sums, separated by commas.
        data: normal (both signs), positive (one sign), or both, separated by a comma.
        promote: promotion intervals, separated by commas; never for no promotion.
        arch: the tensor core: sm_80, sm_89, sm_90, sm_90_mma or sm_100.
        fmt: e4m3 or e5m2.
        out: the page to write.
        json: print JSON and write no page.
    """

    k: str = "256,512,1024,2048,4096,8192,16384"
    data: str = "normal,positive"
    promote: str = "32,64,128,256,never"
    arch: str = "sm_90"
    fmt: Literal["e4m3", "e5m2"] = "e4m3"
    out: Path = Path("lab/accumulate.html")
    json: bool = False
