"""Which rows of a trainer's tensors each rank has, and how the rows of all ranks become whole tensors and back.

A rank of a pipeline has the layers of its stages only. In the names of its tensors, moments have the numbers that they
have in the whole model's optimizer, so that a checkpoint does not depend on the stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.delayed_scaling import amax_histories
from octile.parallel.ranks import Ranks
from octile.parallel.state import Layout, ShardedState, collect
from octile.recipe import Recipe
from octile.train.config import OptimConfig
from octile.train.optimizer import make_groups

if TYPE_CHECKING:
    from octile.checkpoint.sharded import Chunk, ShardedCheckpoint

BEST_PREFIX = "best."  # prefix of the names of the best model's tensors in a checkpoint


class ModelNames(NamedTuple):
    """The names of what a model has.

    Attributes:
        parameters: in the model's order.
        updated: parameters in the order of an optimizer.
        state: the tensors of its state_dict.
        histories: modules with amax histories.
        mixtures: its mixtures of experts.
        converted: layers to which a recipe was applied.
    """

    parameters: Sequence[str]
    updated: Sequence[str]
    state: Sequence[str]
    histories: Sequence[str]
    mixtures: Sequence[str]
    converted: Sequence[str]

    @classmethod
    def of(cls, model: DeepseekV3, optim: OptimConfig) -> ModelNames:
        """The names of a model, to which a recipe was applied, with an optimizer."""
        name_of = {parameter: name for name, parameter in model.named_parameters()}
        return cls(
            tuple(name_of.values()),
            tuple(name_of[p] for group in make_groups(model, model, optim) for p in group["params"]),
            tuple(model.state_dict()),
            tuple(amax_histories(model)),
            tuple(model.moe_layers()),
            tuple(n for n, m in model.named_modules() if isinstance(getattr(m, "recipe", None), Recipe)),
        )


class StateLayout:
    """The layouts of the tensors of `Trainer.state`, and of a best model.

    Args:
        model: the model of this rank.
        names: the names of the whole model, of which this rank may have some.
        optim: the optimizer.
        shards: the parts of this rank's parameters; None: there is one rank.
        ranks: the ranks of the run.
    """

    def __init__(
        self, model: DeepseekV3, names: ModelNames, optim: OptimConfig, shards: ShardedState | None, ranks: Ranks
    ):
        self._model, self._shards, self._ranks = model, shards, ranks
        self._rank = 0 if shards is None else shards.rank
        self._own = own = ModelNames.of(model, optim)
        self._numbers = [names.updated.index(name) for name in own.updated]
        self._own_numbers = {number: index for index, number in enumerate(self._numbers)}
        whole, here = (
            {*part.parameters, *part.state, *(f"history.{name}" for name in part.histories)} for part in (names, own)
        )
        self._elsewhere = whole - here
        self._n_updated = len(names.updated)

    def number(self, index: int) -> int:
        """The number, in the whole model's optimizer, of a parameter of this rank's optimizer."""
        return self._numbers[index]

    def own_number(self, number: int) -> int:
        """The inverse of `number`.

        Raises:
            ValueError: this rank's optimizer has no such parameter.
        """
        if number not in self._own_numbers:
            raise ValueError(f"the checkpoint has in excess the tensors of optimizer.{number}")
        return self._own_numbers[number]

    def of(self, name: str) -> Layout | None:
        """The rows that each rank has of a tensor of a state, or of a best model; None: each has all of it."""
        part, _, rest = name.partition(".")
        return self._layouts.get(f"optimizer.{rest.partition('.')[0]}" if part == "optimizer" else name)

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        """The layouts of all parameters, their averages and best values by name, of moments as "optimizer.INDEX"."""
        if self._shards is None:
            return {}
        found: dict[str, Layout] = {}
        for name, _ in self._model.named_parameters():
            found[f"model.{name}"] = found[BEST_PREFIX + name] = self._shards.weight_layout(name)
            found[f"ema.{name}"] = self._shards.part_layout(name)
        for number, name in zip(self._numbers, self._own.updated, strict=True):
            found[f"optimizer.{number}"] = self._shards.part_layout(name)
        return found

    @torch.no_grad()
    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect the tensors of a state, or of a best model, of which ranks have rows, on rank 0; others get none.

        All ranks must call this. What is collected from several ranks lies in CPU memory.
        """
        if self._shards is None:
            return dict(tensors)
        sizes = {name: (self._whole_shape(name, tensor), tensor.dtype) for name, tensor in tensors.items()}
        all_sizes = self._ranks.gather(sizes, dict[str, tuple[tuple[int, ...], torch.dtype]])
        first_with = {name: rank for rank, names in reversed([*enumerate(all_sizes)]) for name in names}
        same_layers = dist.get_process_group_ranks(self._shards.group)
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for names in all_sizes for name in names):
            rank = first_with[name]  # also the first of those that have the same layers
            tensor = self._collect(name, tensors[name]) if rank in same_layers else None
            if rank > 0:
                tensor = self._send_to_first(tensor, rank, *all_sizes[rank][name])
            if self._ranks.is_first and tensor is not None:
                found[name] = tensor if tensor is tensors.get(name) else tensor.cpu()
        return found

    def _whole_shape(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        layout = self.of(name) if tensor.dim() else None
        return tuple(tensor.shape) if layout is None else (layout.total, *tensor.shape[1:])

    def _collect(self, name: str, tensor: Tensor) -> Tensor | None:
        """Collect a tensor on the first of the ranks that have the same layers; others may get None."""
        assert self._shards is not None
        layout = self.of(name) if tensor.dim() else None
        return tensor if layout is None or layout.is_whole else collect(tensor, layout, self._shards.group)

    def _send_to_first(
        self, tensor: Tensor | None, rank: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """Send a tensor from a rank to rank 0, which returns it. All ranks may call this."""
        device = next(self._model.parameters()).device  # which the backend can send from; gloo has no FP8
        if self._ranks.rank == rank:
            assert tensor is not None
            dist.send(tensor.detach().to(device).contiguous().view(-1).view(torch.uint8), 0)
        if not self._ranks.is_first:
            return None
        received = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(received.view(-1).view(torch.uint8), rank)
        return received

    def chunks(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Chunk]:
        """Say which rows of the whole tensors the tensors of a state, or of a best model, are."""
        from octile.checkpoint.sharded import Chunk  # it takes a second to import

        found: dict[str, Tensor | Chunk] = dict(tensors)
        for name, tensor in tensors.items():
            layout = self.of(name) if tensor.dim() else None
            if layout is not None and not layout.is_whole:
                found[name] = Chunk.rows(tensor, layout.starts[self._rank], layout.total)
        return found

    def own_rows(self, checkpoint: ShardedCheckpoint, best: bool = False) -> dict[str, Tensor]:
        """Read this rank's rows of the tensors of its layers of a checkpoint, which any number of ranks has written.

        Args:
            checkpoint: an open one.
            best: whether to read those of the best model, or all others. Two calls need less memory than all at once.

        Raises:
            ValueError: a file is damaged, or a tensor has another number of rows than all ranks together.
        """
        rows: dict[str, slice | None] = {}
        for name, spec in checkpoint.specs.items():
            if name.startswith(BEST_PREFIX) != best or self._is_elsewhere(name):
                continue
            layout = self.of(name) if spec.shape else None
            if layout is not None and spec.shape[0] != layout.total:
                raise ValueError(f"{name} is {spec.shape} in the checkpoint but has {layout.total} rows here")
            rows[name] = None
            if layout is not None and not layout.is_whole:
                rows[name] = layout.rows_of(self._rank)
        return checkpoint.read_parts(rows)

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a tensor is that of a layer which only other ranks have."""
        part, _, rest = name.partition(".")
        if part == "optimizer":
            number = int(rest.partition(".")[0])
            return number < self._n_updated and number not in self._own_numbers
        return (name if part == "history" else rest) in self._elsewhere
