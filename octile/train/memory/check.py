"""Memory of a training run: whether a model can fit, and what to reduce when memory runs out.

    fixed      weights, gradients, optimizer state, and what is cached between steps     the same for any batch
    sequence   what one sequence takes in its forward and backward pass                  × sequences of a micro-batch

Before a run begins, `check_memory` refuses a model whose weights, gradients, moments and update exceed the device's
memory, and on a CPU a run whose estimate (`cpu_memory`) exceeds what is available.

When memory runs out, `explain_out_of_memory` measures `sequence`: it frees the tensors of the failed step and passes
one sequence through the model, a shorter one if necessary. On a GPU it reads the allocator's peak. On a CPU it counts
the tensors that autograd saves for backward, which is less than the peak.
"""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from octile.models.counts import HIDDEN_MATRICES, count_parameters
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.memory.cpu import count_update, estimate_need
from octile.train.memory.device import available_memory, device_memory
from octile.train.strategy.pipeline_layout import held_share, make_pipeline_schedule
from octile.train.trainer import Trainer

BYTES_PER_PARAMETER = 12  # FP32 weight and gradient, two BF16 moments
MOMENTS_BYTES = 4  # the moments among them, which the ranks share
FP8_LM_BYTES_PER_PARAMETER = 6  # FP16 weight, FP8 gradient, FP8 and FP16 moments

OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
MIN_MEASURED_TOKENS = 16  # the shortest sequence that is measured
USABLE_SHARE = 0.9  # of the memory; fragmentation takes the rest


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a run needs, in bytes.

    Attributes:
        fixed: what every step needs, whatever its batch.
        sequence: what one sequence of the run's length takes in addition.
        available: what this process can allocate on the device.
        half_sequence: what one sequence of half the length takes; None: half as much.
        update: what the optimizer's step takes in addition to `fixed`, when no sequence is in memory.
    """

    fixed: int
    sequence: int
    available: int
    half_sequence: int | None = None
    update: int = 0

    def share_within(self, budget: float) -> float:
        """The share of a sequence's length with which it takes at most `budget` bytes.

        Some of its bytes grow with the length, and attention's scores with its square.
        """
        if budget <= 0:
            return 0.0
        half = self.sequence / 2 if self.half_sequence is None else self.half_sequence
        square = min(max(2 * self.sequence - 4 * half, 0.0), self.sequence)
        linear = self.sequence - square
        return 2 * budget / (linear + math.sqrt(linear**2 + 4 * square * budget))


def check_memory(config: TrainConfig, device: torch.device, is_train: bool = True) -> None:
    """Refuse a run that cannot fit: whose weights, gradients and moments alone exceed the device's memory.

    On a CPU the activations count too, because nothing can be explained when the memory is exceeded there.

    Args:
        config: the configuration of the run.
        device: where it is going to run.
        is_train: whether its command is `octile train`, which has more options than `octile compare`.

    Raises:
        ValueError: it cannot.
    """
    needed, total = min_memory(config), device_memory(device)
    if needed > total:
        raise ValueError(
            f"the model needs at least {needed / 1e9:,.0f} GB for weights, gradients and optimizer, but "
            f"the {device.type} has {total / 1e9:,.0f} GB: choose a smaller model"
        )
    if device.type == "cpu":
        ranks = _ranks_here()  # which share the memory
        need, available = estimate_need(config, ranks), available_memory(device)
        if need.total > available:
            if is_train and need.data > available / 2:
                change = f"the token ids of a step take {_gb(need.data)}: use a smaller --batch-size"
            elif need.update and need.fixed + need.update > available:
                change = f"{_update_takes(need.update, need.fixed)}: choose a smaller model"
            elif need.step <= available:
                change = (
                    f"its ranks make {_gb(need.made)} of weights before they take their stages, a resumed run needs "
                    f"{_gb(need.read)} to read its checkpoint, and rank 0 collects {_gb(need.collected)} at the end: "
                    "choose a smaller model"
                )
            else:
                half = replace(config, sequence_length=max(config.sequence_length // 2, config.advisable_length))
                half_sequence = estimate_need(half, ranks).sequence
                measured = MemoryNeed(need.fixed, need.sequence, available, half_sequence)
                change = advice(config, measured, has_begun=False, is_train=is_train)
            who = "the run needs" if len(ranks) == 1 else f"the {len(ranks)} ranks here need"
            raise ValueError(f"{who} about {_gb(need.total)}, but {_gb(available)} are available: {change}")


def _ranks_here() -> range:
    """The ranks that torchrun has started on this machine."""
    n_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    first = int(os.environ.get("RANK") or 0) - int(os.environ.get("LOCAL_RANK") or 0)
    return range(first, first + n_ranks)


def min_memory(config: TrainConfig) -> int:
    """Bytes of weights, gradients, moments and Muon's update of a rank; of a pipeline, of the mean stages."""
    counts, parallel = count_parameters(config.model), config.parallel
    parameters = counts.total + sum(counts.mtp.values())
    if config.recipe == "fp8_lm":
        return parameters * FP8_LM_BYTES_PER_PARAMETER
    experts = sum(count.get("routed experts", 0) for count in (counts.main, counts.mtp))
    held = parameters - experts + experts // parallel.ep
    moments = MOMENTS_BYTES * parameters
    if config.optim.name == "muon":  # one moment of matrices
        moments -= (
            MOMENTS_BYTES // 2 * sum(c.get(kind, 0) for c in (counts.main, counts.mtp) for kind in HIDDEN_MATRICES)
        )
    all_bytes = held * (BYTES_PER_PARAMETER - MOMENTS_BYTES) + moments // parallel.dp
    schedule = make_pipeline_schedule(config)
    if schedule is not None:
        all_bytes = all_bytes * len(schedule.stages(0)) // schedule.n_stages
    return all_bytes + (count_update(config) if config.optim.name == "muon" else 0)


@contextmanager
def explain_out_of_memory(config: TrainConfig, device: torch.device, trainer: Trainer | None = None) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into a MemoryError that says what to change.

    Args:
        config: the configuration of the run.
        device: where it runs.
        trainer: the run; None while the trainer is being built inside the context.

    Raises:
        MemoryError: memory ran out. It names the option to change, its value now and the one that should fit.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # the frames hold the tensors of the failed step
        if trainer is None:
            raise MemoryError(
                f"out of memory while the model was built on the {device.type}: it needs {_gb(min_memory(config))} for "
                f"weights, gradients and optimizer, and {_gb(available_memory(device))} are available: choose a "
                "smaller model"
            ) from error
        for moe in trainer.strategy.moes.values():
            moe.pop_balance_loss()  # a failed forward pass leaves a loss behind, whose graph holds tensors too
        trainer.release_captured()
        step = trainer.steps_done + 1
        if config.parallel.ep > 1 or config.parallel.pp > 1:  # a forward pass would need the other ranks
            raise MemoryError(
                f"out of memory at step {step} on the {device.type}: use more --micro-batches (now "
                f"{config.micro_batches}), a smaller model, or more ranks"
            ) from error
        for reader in trainer.model.index_readers():
            reader.pop_alignment_loss()
        need = _measure(trainer)
        raise MemoryError(f"out of memory at step {step} on the {device.type}: {advice(config, need)}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that a device has no more memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in OUT_OF_MEMORY)


def advice(config: TrainConfig, need: MemoryNeed | None, has_begun: bool = True, is_train: bool = True) -> str:
    """What to change in a run that runs out of memory.

    Args:
        config: the configuration of the run.
        need: what the run needs; None if even the shortest measured sequence did not fit.
        has_begun: whether there is a run to continue.
        is_train: as in `check_memory`.
    """
    if need is None:
        return _too_large_model(config, is_train)
    free = USABLE_SHARE * need.available - need.fixed
    if need.update and need.update > free:
        return f"{_update_takes(need.update, need.fixed)}: choose a smaller model"
    at_once = config.micro_batch_size
    explanation = (
        f"a sequence of {config.sequence_length} tokens takes {_gb(need.sequence)} in addition to {_gb(need.fixed)} "
        "for weights, gradients, optimizer, token ids and what else stays"
    )
    if has_begun:  # otherwise the refusal says it
        explanation += f", of {_gb(need.available)}"
    finer = list(_finer(config)) if is_train else []
    fitting = [division for division in finer if division.taken * need.sequence <= free]
    if fitting:
        micro_batches, n, _ = fitting[0]
        change = (
            f"{explanation}: use --micro-batches {micro_batches} (now {config.micro_batches}), {n} at a time "
            f"instead of {at_once}"
        )
        if not has_begun:
            return change
        return f"{change}; to continue: {config.resume_command} --micro-batches {micro_batches}"
    divisions = [_Division(config.micro_batches, at_once, at_once), *finer]
    least = min(divisions, key=lambda division: division.taken)
    share = need.share_within(free / least.taken)
    length = min(int(config.sequence_length * share), config.sequence_length // 2)
    if length < config.advisable_length:
        return _too_large_model(config, is_train)
    finest = f" and --micro-batches {least.micro_batches}" if least.at_once < at_once else ""
    where = " in a new run" if has_begun else ""
    return f"{explanation}: use --sequence-length {length} (now {config.sequence_length}){finest}{where}"


def _update_takes(update: int, fixed: int) -> str:
    return (
        f"an update by the optimizer takes {_gb(update)} in addition to {_gb(fixed)} for weights, gradients, "
        "optimizer, token ids and what else stays"
    )


class _Division(NamedTuple):
    """A division of a rank's sequences into micro-batches.

    Attributes:
        micro_batches: how many there are.
        at_once: the sequences of each.
        taken: what their passes take, in units of what one sequence of each micro-batch takes now.
    """

    micro_batches: int
    at_once: int
    taken: float


def _finer(config: TrainConfig) -> Iterator[_Division]:
    """The divisions into more micro-batches that a run, and the schedule of its pipeline, can have, the coarsest first.

    A pipeline may have more of them in flight: GPipe all.
    """
    sequences, held = config.batch_size // config.parallel.dp, held_share(config)
    for at_once in range(config.micro_batch_size - 1, 0, -1):
        if sequences % at_once == 0:
            with suppress(ValueError):  # the schedule does not fit so many
                finer = replace(config, micro_batches=sequences // at_once)
                taken = at_once * held_share(finer) / held
                yield _Division(finer.micro_batches, at_once, taken)


def _too_large_model(config: TrainConfig, is_train: bool) -> str:
    choices = "a smaller model or a device with more memory"
    if is_train and config.load_recipe().optimizer != Recipe.fp8_lm().optimizer:  # a recipe file may have it, too
        choices = (
            "a smaller model, a device with more memory, or --recipe fp8_lm, which needs half the bytes per parameter"
        )
    return (
        "weights, gradients and optimizer leave too little memory for a sequence of "
        f"{MIN_MEASURED_TOKENS} tokens: choose {choices}"
    )


def _measure(trainer: Trainer) -> MemoryNeed | None:
    """What the run needs; None if even a sequence of MIN_MEASURED_TOKENS is too much."""
    length = trainer.config.sequence_length
    tokens_BS = trainer.batches.batch(trainer.steps_done)[:1]
    while length >= MIN_MEASURED_TOKENS:
        try:
            fixed, sequence = _measure_sequence(trainer, tokens_BS[:, :length])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            length //= 2
        else:
            whole = sequence * trainer.config.sequence_length // length
            fixed += _missing_moments(trainer)
            update = count_update(trainer.config)
            return MemoryNeed(fixed, whole, available_memory(trainer.device), update=update)
    return None


def _measure_sequence(trainer: Trainer, tokens_BS: Tensor) -> tuple[int, int]:
    """Bytes that stay allocated after a forward and backward pass, and bytes that the pass takes in addition."""
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.model.train()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
        trainer.passes.backward(tokens_BS, parts=1)  # allocates the gradients, which stay
        fixed = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.passes.backward(tokens_BS, parts=1)
        return fixed, torch.cuda.max_memory_allocated() - fixed
    saved: dict[int, int] = {}  # bytes of each storage, by its address

    def count(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        trainer.passes.backward(tokens_BS, parts=1)
    state = (t for moments in trainer.optimizer.state.values() for t in moments.values() if isinstance(t, Tensor))
    fixed = sum(2 * p.nbytes for p in trainer.model.parameters()) + sum(t.nbytes for t in state)
    return fixed, sum(size for address, size in saved.items() if address not in weights)


def _missing_moments(trainer: Trainer) -> int:
    """Bytes of optimizer state that the first step is going to allocate; 0 after it."""
    return 0 if trainer.optimizer.state else trainer.optimizer.state_bytes()


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f} GB" if abs(n) >= 1e8 else f"{n / 1e6:,.1f} MB"
