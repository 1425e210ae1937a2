"""`octile convert`: convert a checkpoint between BF16 and FP8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octile.options import Positional


@dataclass(frozen=True)
class Options:
    """Convert a BF16 Hugging Face checkpoint to FP8 (128×128 blocks), or an FP8 one to BF16 or FP32, shard by shard.

    Attributes:
        src: a Hugging Face folder; or one with only a config.json (or that file), to predict the size.
        dst: the folder to write; not needed for a prediction.
        to: fp8, bf16, or float32, which represents FP8 weights exactly, for further training.
        keep: a pattern of layers that stay in high precision besides heads, gates and embeddings, such as
            "*.down_proj"; can be given several times.
    """

    src: Positional[Path]
    dst: Positional[Path | None] = None
    to: Literal["fp8", "bf16", "float32"] = "fp8"
    keep: tuple[str, ...] = ()


def run(options: Options) -> None:
    """Convert, or predict the size; raises what `octile.report.conversion.run_conversion` raises."""
    from octile.report.conversion import run_conversion

    run_conversion(options.src, options.dst, options.to, options.keep)
