"""The limits of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from octile.validation import Range, check_fields

MAX_DRAFTS = 7  # more would not be verified in CUDA graphs (`octile.serve.step_inputs`)


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine does at once.

    Attributes:
        max_batch: requests that run at once; others wait.
        max_step_tokens: tokens of one forward pass. Requests that decode come first; the rest of the budget reads
            prompts, in chunks.
        n_drafts: draft tokens per request and step, by the model's multi-token prediction layer; 0 does not draft.
        batch_invariant: compute each request's logits bit for bit as if it were alone, so that its text never depends
            on what else is in the batch; slower.
        expert_window: count the tokens of each expert over so many steps, for `Stats.expert_tokens` and /metrics; a
            multiple of 8, 0 does not count.

    Raises:
        TypeError, ValueError: a field is not a number or outside its range, or a step has fewer tokens than a batch
            needs to decode.
    """

    max_batch: Annotated[int, Range(at_least=1, at_most=4096)] = 64
    max_step_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 2048
    n_drafts: Annotated[int, Range(at_least=0, at_most=MAX_DRAFTS)] = 0
    batch_invariant: bool = False
    expert_window: Annotated[int, Range(at_least=0, at_most=2**24)] = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_expert_window(self.expert_window)
        needed = self.max_batch * (1 + self.n_drafts)
        if self.max_step_tokens < needed:
            raise ValueError(
                f"max_step_tokens must be at least max_batch × (1 + n_drafts) = {needed}, not {self.max_step_tokens}"
            )


def check_expert_window(steps: int) -> None:
    """Check over how many steps the tokens of each expert are counted.

    Raises:
        ValueError: it is negative or no multiple of 8.
    """
    if steps < 0 or steps % 8:
        raise ValueError(f"expert_window must be a multiple of 8, not {steps}")


@dataclass(frozen=True)
class CacheConfig:
    """The paged latent cache of a served model.

    Attributes:
        format: float32, bf16 or fp8 (656 instead of BF16's 1152 bytes a token and layer); BF16 on a GPU and FP32 on a
            CPU if not given.
        gib: its memory. If not given, 80% of what the weights and the logits of CUDA graphs leave free on a GPU, 1 GiB
            on a CPU, and never more than a full batch of the longest texts needs.

    Raises:
        TypeError, ValueError: a field has another type or value.
    """

    format: Literal["float32", "bf16", "fp8"] | None = None
    gib: Annotated[float, Range(above=0, at_most=2**20)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "cache.")
