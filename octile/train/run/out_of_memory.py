"""What a run says when memory runs out: the option to change, and the value that should fit.

`explain_out_of_memory` measures what one sequence takes in its forward and backward pass: it frees the tensors of the
failed step and passes one sequence through the model, a shorter one if necessary. On a GPU it reads the allocator's
peak. On a CPU it counts the tensors that autograd saves for backward, which is less than the peak.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octile.train.config import TrainConfig
from octile.train.memory.advice import MIN_MEASURED_TOKENS, MemoryNeed, advice, format_memory
from octile.train.memory.check import min_memory
from octile.train.memory.cpu import count_update
from octile.train.memory.device import available_memory, is_out_of_memory
from octile.train.trainer import Trainer


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
            needed, available = format_memory(min_memory(config)), format_memory(available_memory(device))
            raise MemoryError(
                f"out of memory while the model was built on the {device.type}: it needs {needed} for weights, "
                f"gradients and optimizer, and {available} are available: choose a smaller model"
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
