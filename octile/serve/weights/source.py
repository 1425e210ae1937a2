"""Where new weights for a running engine are; a server's HTTP process, which has no torch, reads it from requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class FolderSource(NamedTuple):
    """Weights in a run folder or a Hugging Face folder, which this machine can read."""

    path: str


class BufferSource(NamedTuple):
    """Weights in the memory of another process of this machine.

    Attributes:
        config: the content of their config.json.
        layout: `octile.checkpoint.packed.PackedTensors` reads it.
        address: `octile.parallel.shared_buffer.open_buffer` opens it.
    """

    config: Mapping[str, Any]
    layout: Mapping[str, Any]
    address: Mapping[str, Any]


WeightsSource = FolderSource | BufferSource
