"""When memory runs out: what to reduce, and by how much.

    needed   weights, gradients, optimizer state, and what is cached between steps     the same for any batch
             what one sequence takes in its forward and backward pass                  × sequences of a micro-batch

The second is measured when memory has run out: the tensors of the failed step are let go and one sequence is passed
through the model, a shorter one if need be. On a GPU the allocator's peak counts, on a CPU the tensors that autograd
keeps, which is less than the peak.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.memory import least_needed, memory
from octile.train.run_recipe import recipe_of
from octile.train.trainer import Trainer

SAID = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
SHORTEST = 16  # tokens of a sequence that is tried
USABLE = 0.9  # of what there is: the rest is lost between allocations


@dataclass(frozen=True)
class Need:
    """Bytes: what any step needs, what one sequence of the run's length takes besides, and what there is."""

    fixed: int
    sequence: int
    there: int


@contextmanager
def explained(config: TrainConfig, device: torch.device, trainer: Trainer | None = None) -> Iterator[None]:
    """Around what may run out of memory; `trainer` is not given while it is being made.

    Raises:
        MemoryError: memory ran out. It names the option to change, its value now and the one that should fit.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed step
        if trainer is None:
            raise MemoryError(_while_made(config, device)) from error
        for moe in trainer.moes.values():
            moe.pop_balance_loss()  # so does a loss that a broken forward pass left behind
        step, need = trainer.steps_done + 1, _measure(trainer)
        raise MemoryError(f"out of memory at step {step} on the {device.type}: {advice(config, need)}") from error


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that a device has no more memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAID)


def advice(config: TrainConfig, need: Need | None) -> str:
    """What to change in a run that needed too much; `need` is None where not even a short sequence could be passed."""
    if need is None:
        return _no_room(config)
    at_once = config.batch_size // config.micro_batches
    said = (
        f"a sequence of {config.sequence_length} tokens takes {_gb(need.sequence)} beside {_gb(need.fixed)} for "
        f"weights, gradients and optimizer, of {_gb(need.there)}"
    )
    room = USABLE * need.there - need.fixed
    fitting = [n for n in range(1, at_once) if config.batch_size % n == 0 and n * need.sequence <= room]
    if fitting:
        pieces = config.batch_size // fitting[-1]
        return (
            f"{said}: use --micro-batches {pieces} (now {config.micro_batches}), {fitting[-1]} at a time instead of "
            f"{at_once}; to continue: octile train --resume --out {config.out} --micro-batches {pieces}"
        )
    length = min(int(config.sequence_length * room / need.sequence), config.sequence_length // 2)
    if length < config.shortest_sequence:
        return _no_room(config)
    finest = f" and --micro-batches {config.batch_size}" if at_once > 1 else ""
    return f"{said}: use --sequence-length {length} (now {config.sequence_length}){finest} in a new run"


def _no_room(config: TrainConfig) -> str:
    choices = "a smaller model, a GPU with more memory, or --recipe fp8_lm, which keeps half the bytes a parameter"
    if recipe_of(config).optimizer == Recipe.fp8_lm().optimizer:  # a recipe file may have it too
        choices = "a smaller model or a GPU with more memory"
    return f"weights, gradients and optimizer leave no room for a sequence of {SHORTEST} tokens: choose {choices}"


def _while_made(config: TrainConfig, device: torch.device) -> str:
    return (
        f"out of memory while the model was made on the {device.type}: it needs {_gb(least_needed(config))} for "
        f"weights, gradients and optimizer, and {_gb(_there(device))} are there: choose a smaller model"
    )


def _measure(trainer: Trainer) -> Need | None:
    """What the run needs; None where even a sequence of SHORTEST tokens is too much."""
    length = trainer.config.sequence_length
    tokens_BS = trainer.batches.batch(trainer.steps_done)[:1]
    while length >= SHORTEST:
        try:
            fixed, sequence = _pass_through(trainer, tokens_BS[:, :length])
        except Exception as error:
            if not ran_out(error):
                raise
            traceback.clear_frames(error.__traceback__)
            length //= 2
        else:
            whole = sequence * trainer.config.sequence_length // length
            return Need(fixed + _moments_to_come(trainer), whole, _there(trainer.device))
    return None


def _pass_through(trainer: Trainer, tokens_BS: Tensor) -> tuple[int, int]:
    """Bytes that stay after a forward and backward pass, and bytes that it takes besides."""
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.model.train()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()
        trainer.backward(tokens_BS)  # the gradients stay
        fixed = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainer.backward(tokens_BS)
        return fixed, torch.cuda.max_memory_allocated() - fixed
    kept: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    weights = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        trainer.backward(tokens_BS)
    state = (t for moments in trainer.optimizer.state.values() for t in moments.values() if isinstance(t, Tensor))
    fixed = sum(2 * p.nbytes for p in trainer.model.parameters()) + sum(t.nbytes for t in state)
    return fixed, sum(size for address, size in kept.items() if address not in weights)


def _moments_to_come(trainer: Trainer) -> int:
    """Bytes of optimizer state that the first step is going to make."""
    if trainer.optimizer.state:
        return 0
    bytes_each = trainer.optimizer.bytes_per_parameter()
    per_parameter = bytes_each["exp_avg"] + bytes_each["exp_avg_sq"]
    return int(per_parameter * sum(p.numel() for p in trainer.model.parameters()))


def _there(device: torch.device) -> int:
    """Bytes that this process can have."""
    if device.type != "cuda":
        return memory(device)
    free, total = torch.cuda.mem_get_info(device)
    return min(free + torch.cuda.memory_reserved(device), int(torch.cuda.get_per_process_memory_fraction() * total))


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f} GB"
