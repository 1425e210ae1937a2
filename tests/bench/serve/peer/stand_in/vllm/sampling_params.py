"""How requests are sampled."""

from dataclasses import dataclass
from enum import Enum


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1


@dataclass
class SamplingParams:
    temperature: float
    max_tokens: int
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind

    def __post_init__(self) -> None:
        assert (self.ignore_eos, self.detokenize, self.output_kind) == (True, False, RequestOutputKind.DELTA)
