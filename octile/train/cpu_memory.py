"""Memory that a run is going to need on a CPU.

Linux ends a process that takes more memory than there is with SIGKILL, so a run must be refused before it begins.
`estimate_need` passes a batch through the model on torch's meta device, which allocates nothing, and adds up the
tensors that would live at the same time. The reference operators' own temporary tensors and the allocator's
fragmentation are not seen there; RESERVE and TRANSIENT_FACTOR stand for them. They were fitted to measured runs: from
0.8 GB on, the estimate was 1.02 to 1.39 times the measured peak (benchmarks/history/cpu-memory).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.optim import AdamW, param_groups
from octile.train.config import TrainConfig

RESERVE = 400 * 10**6  # bytes: libraries that are loaded later, data preparation, reports
TRANSIENT_FACTOR = 1.3  # memory of a pass on a CPU, over the tensors that are counted
BYTES_PER_TOKEN = 24  # of a step's batch: position, token, and a copy of the micro-batch
MAX_TOKENS = 2**20  # of the counted batch; a larger one is computed from it


@dataclass(frozen=True)
class CpuNeed:
    """The memory that a run needs on a CPU in addition to what the process has already, in bytes.

    Attributes:
        weights: parameters, the copy of those with the lowest held-out loss, and their moving average.
        gradients: the parameters' gradients, and what is cached between steps, such as weights in FP8.
        optimizer: the optimizer's state.
        data: the token ids and positions of a whole step.
        sequence: what one sequence takes in a forward and backward pass.
        at_once: the sequences of a micro-batch.
    """

    weights: int
    gradients: int
    optimizer: int
    data: int
    sequence: int
    at_once: int

    @property
    def fixed(self) -> int:
        """What every step needs, whatever its batch."""
        return RESERVE + self.weights + self.gradients + self.optimizer + self.data

    @property
    def total(self) -> int:
        """What a step needs."""
        return self.fixed + self.at_once * self.sequence


def estimate_need(config: TrainConfig) -> CpuNeed:
    """Estimate the memory of a run on a CPU, without allocating it."""
    recipe = config.load_recipe()
    with torch.device("meta"):
        model = DeepseekV3(config.model)
    apply_recipe(model, recipe)
    optimizer = AdamW(param_groups(model, 0.0), lr=0.0, formats=recipe.optimizer)
    parameters = list(model.parameters())
    weights = sum(p.nbytes for p in parameters)
    each = optimizer.bytes_per_parameter()
    moments = each["exp_avg"] + each["exp_avg_sq"] + (0 if recipe.optimizer.master == "float32" else each["master"])

    at_once = config.micro_batch_size
    counted = min(at_once, max(MAX_TOKENS // config.sequence_length, 1))
    tokens_BS = torch.empty(counted, config.sequence_length, dtype=torch.int64, device="meta")
    model.train()
    with _LiveTensors() as live:
        for _ in range(min(config.micro_batches, 2)):  # a second micro-batch begins with the gradients of the first
            model(tokens_BS, tokens_BS).backward()
    return CpuNeed(
        weights=weights * (3 if config.optim.ema_decay else 2),
        gradients=live.now,
        optimizer=int(moments * sum(p.numel() for p in parameters)),
        data=config.batch_size * config.sequence_length * BYTES_PER_TOKEN,
        sequence=int(TRANSIENT_FACTOR * (live.peak - live.now) / counted),
        at_once=at_once,
    )


class _LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators inside the context returned and that still live.

    Attributes:
        now, peak: the bytes that live now, and the most that lived at a time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key in self._storages:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.now -= nbytes

        self._storages[key] = weakref.ref(storage, forget)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
