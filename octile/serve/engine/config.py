"""The limits of an engine, and the ranks of a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from octile.validation import Range, check_fields

EXPERT_WINDOW = 4096  # steps, if experts are placed anew
REBALANCE_SECONDS = 600.0
IndexFormat = Literal["e4m3", "float32"]
InFlight = Literal["finish", "recompute", "continue"]  # see `octile.serve.engine.engine.Engine.update_weights`
MAX_DRAFTS = 7  # more would not be verified in CUDA graphs (`octile.serve.runner.step`)


@dataclass(frozen=True)
class EngineConfig:
    """How much an engine does at once.

    Attributes:
        max_batch: requests that run at once; others wait.
        max_step_tokens: tokens of one forward pass. Requests that decode come first; the rest of the budget
            prefills prompts, in chunks.
        n_drafts: draft tokens per request and step at most, by the model's multi-token prediction layer. Each request
            gets the number that is fastest by its own acceptance rate. 0 does not draft.
        batch_invariant: compute each request's logits bit for bit as if it were alone, so that its text never depends
            on what else is in the batch; slower.
        exact: compute as with batch_invariant, and log-probabilities as training does, bit for bit; a folder whose
            weights are of another recipe than `exact` is refused.
        index_format: format of the indexer's queries and keys in a model with sparse attention. e4m3: after a Hadamard
            rotation, as DeepSeek published; float32: without it, as transformers, to compare texts. It is slower, and
            steps on a GPU have no CUDA graphs.
        expert_window: count the tokens of each expert over so many steps, for `Stats.expert_tokens` and /metrics; a
            multiple of 8, 0 does not count. If not given, 4096 with parallel.redundant_experts or parallel.rebalance,
            else 0.

    Raises:
        TypeError, ValueError: a field has another type or is outside its range, a step has fewer tokens than a batch
            needs to decode, or batch_invariant is wanted with an indexer in FP32.
    """

    max_batch: Annotated[int, Range(at_least=1, at_most=4096)] = 64
    max_step_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 2048
    n_drafts: Annotated[int, Range(at_least=0, at_most=MAX_DRAFTS)] = 0
    batch_invariant: bool = False
    exact: bool = False
    index_format: IndexFormat = "e4m3"
    expert_window: Annotated[int, Range(at_least=0, at_most=2**24)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "engine.")
        if self.exact:
            object.__setattr__(self, "batch_invariant", True)  # it is frozen
        check_expert_window(self.expert_window or 0, "engine.expert_window")
        if self.batch_invariant and self.index_format != "e4m3":
            raise ValueError(f"engine.index_format must be e4m3, not {self.index_format}, with engine.batch_invariant")
        needed = self.max_batch * (1 + self.n_drafts)
        if self.max_step_tokens < needed:
            raise ValueError(
                "engine.max_step_tokens must be at least engine.max_batch × (1 + engine.n_drafts) = "
                f"{needed}, not {self.max_step_tokens}"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """The ranks of a server, which torchrun starts: each one, or each group, has its own requests, cache and attention.

    Attributes:
        ep: ranks over which the experts of each layer are spread, all that torchrun starts; 1: one process.
        tp: ranks of a group that shares its requests, and divides the heads of attention and the rows of a step; 1:
            each rank has its own.
        shared_experts: replicated: each rank computes the shared experts for its own tokens; routed: in decode steps
            that are launched ahead each token chooses them like other experts, of which they have copies, too.
        redundant_experts: further copies of experts in each layer, which share the tokens of those that have the most.
        active_experts: copies of a rank that compute tokens in a step, chosen by the tokens of that step (dynamic
            redundancy); if not given, all copies of an expert take turns.
        rebalance: seconds after which the copies are placed anew, by the tokens that were counted in the last steps;
            600 if not given.
        micro_batches: parts into which a step with prompts is divided on GPUs. With 2 the rows of one part travel while
            the other one is computed, which is slower between two GPUs with NVLink.
        timeout: seconds after which a rank that waits for another one, or a server that waits for a prefill or decode
            process, ends the server.

    Raises:
        TypeError, ValueError: a field has another type or value, or one has no effect without ranks; tp does not divide
            ep; micro-batches are wanted of ranks that share their rows or with dynamic redundancy, or that of routed
            shared experts.
    """

    ep: Annotated[int, Range(at_least=1, at_most=4096)] = 1
    tp: Annotated[int, Range(at_least=1, at_most=4096)] = 1
    shared_experts: Literal["replicated", "routed"] = "replicated"
    redundant_experts: Annotated[int, Range(at_least=0, at_most=65536)] = 0
    active_experts: Annotated[int, Range(at_least=1, at_most=65536)] | None = None
    rebalance: Annotated[float, Range(at_least=0, at_most=2**31)] | None = None
    micro_batches: Annotated[int, Range(at_least=1, at_most=2)] = 1
    timeout: Annotated[float, Range(above=0, at_most=2**31)] = 600.0

    def __post_init__(self) -> None:
        check_fields(self, "parallel.")
        names = "tp", "shared_experts", "redundant_experts", "active_experts", "rebalance", "micro_batches"
        name = next((name for name in names if getattr(self, name) != getattr(type(self), name)), None)
        if self.ep == 1 and name is not None:
            raise ValueError(f"parallel.{name} has no effect in one process: parallel.ep must be at least 2")
        if self.ep % self.tp:
            raise ValueError(f"parallel.tp must divide parallel.ep, but {self.tp} does not divide {self.ep} ranks")
        if self.tp > 1 and self.micro_batches > 1:
            raise ValueError(f"parallel.micro_batches must be 1, not {self.micro_batches}, if parallel.tp is {self.tp}")
        if self.active_experts is not None and self.micro_batches > 1:
            raise ValueError(
                f"parallel.micro_batches must be 1, not {self.micro_batches}, with parallel.active_experts"
            )
        if self.routes_shared and self.active_experts is not None:
            raise ValueError("parallel.shared_experts must be replicated, not routed, with parallel.active_experts")

    @property
    def routes_shared(self) -> bool:
        """Whether shared experts are routed in decode steps."""
        return self.shared_experts == "routed"


def check_expert_window(steps: int, name: str = "expert_window") -> None:
    """Check over how many steps the tokens of each expert are counted.

    Raises:
        ValueError: it is negative or no multiple of 8.
    """
    if steps < 0 or steps % 8:
        raise ValueError(f"{name} must be a multiple of 8, not {steps}")


def check_micro_batches(engine: EngineConfig, parallel: ParallelConfig, device_type: str) -> None:
    """Check that steps with prompts are divided into micro-batches if they are to be.

    Raises:
        ValueError: they are not, on a CPU or in batch-invariant mode.
    """
    if parallel.micro_batches == 1:
        return
    if device_type != "cuda":
        raise ValueError(f"parallel.micro_batches must be 1, not {parallel.micro_batches}, on a {device_type.upper()}")
    if engine.batch_invariant:
        raise ValueError(f"parallel.micro_batches must be 1, not {parallel.micro_batches}, with engine.batch_invariant")


def window_of(engine: EngineConfig, parallel: ParallelConfig) -> int:
    """Return over how many steps the tokens of each expert are counted, 0: they are not.

    Raises:
        ValueError: they are not to be counted, but copies of experts are to be placed anew by them.
    """
    needs = {"rebalance": parallel.rebalance is not None, "redundant_experts": parallel.redundant_experts > 0}
    name = next((name for name, is_needed in needs.items() if is_needed), None)
    if engine.expert_window is None:
        return EXPERT_WINDOW if name is not None else 0
    if not engine.expert_window and name is not None:
        raise ValueError(
            f"engine.expert_window must be at least 8, not 0, with parallel.{name}: the copies of experts are placed "
            "by the tokens that it counts"
        )
    return engine.expert_window


@dataclass(frozen=True)
class CacheConfig:
    """The paged latent cache of a served model.

    Attributes:
        format: float32, bf16 or fp8 (656 instead of BF16's 1152 bytes a token and layer); BF16 on a GPU and FP32 on a
            CPU if not given.
        gib: GiB of memory for the cache. If not given, 80% of what the weights and the logits of CUDA graphs leave free
            on a GPU, 1 GiB on a CPU, and never more than a full batch of the longest texts needs.

    Raises:
        TypeError, ValueError: a field has another type or value.
    """

    format: Literal["float32", "bf16", "fp8"] | None = None
    gib: Annotated[float, Range(above=0, at_most=2**20)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "cache.")


@dataclass(frozen=True)
class ProcessesConfig:
    """Prefill and decoding in processes of their own (`octile.serve.disaggregated`).

    Attributes:
        prefill: processes that prefill prompts; 0 for one process that does both.
        decode: processes that generate. On GPUs each process takes the next one, those of prefill first.

    Raises:
        TypeError, ValueError: a field is no whole number or outside its range, or only one of them is 0.
    """

    prefill: Annotated[int, Range(at_least=0, at_most=64)] = 0
    decode: Annotated[int, Range(at_least=0, at_most=64)] = 0

    def __post_init__(self) -> None:
        check_fields(self, "processes.")
        if bool(self.prefill) != bool(self.decode):
            raise ValueError(
                f"processes.prefill and processes.decode must both be 0 or both be at least 1, not {self.prefill} and "
                f"{self.decode}"
            )
