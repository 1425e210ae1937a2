"""Which rows of a trainer's tensors each rank has, and how the rows of all ranks become whole tensors and back."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from octile.parallel.ranks import Ranks
from octile.parallel.state import Layout, ShardedState, collect

if TYPE_CHECKING:
    from octile.checkpoint.sharded import Chunk, ShardedCheckpoint


class StateLayout:
    """The layouts of the tensors of `Trainer.state`, and of a best model.

    Args:
        model: of this rank.
        optimizer: of this rank's parts.
        shards: the parts; None: there is one rank.
        ranks: of the run.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, shards: ShardedState | None, ranks: Ranks):
        self._model, self._optimizer, self._shards, self._ranks = model, optimizer, shards, ranks

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
            found[f"model.{name}"] = found[f"best.{name}"] = self._shards.weight_layout(name)
            found[f"ema.{name}"] = self._shards.part_layout(name)
        name_of = {part: name for name, part in self._shards.parts.named_parameters()}
        updated = [param for group in self._optimizer.param_groups for param in group["params"]]
        for index, param in enumerate(updated):
            found[f"optimizer.{index}"] = self._shards.part_layout(name_of[param])
        return found

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Collect the rows that the ranks have of tensors of a state, or of a best model, on rank 0; others get none.

        All ranks must call this. What is collected from several ranks lies in CPU memory.
        """
        if self._shards is None:
            return dict(tensors)
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            layout = self.of(name)
            if layout is None or layout.is_whole or not tensor.dim():
                found[name] = tensor
            elif (collected := collect(tensor, layout)) is not None:
                found[name] = collected.cpu()
        return found if self._ranks.is_first else {}

    def chunks(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Chunk]:
        """Say which rows of the whole tensors the tensors of a state, or of a best model, are."""
        from octile.checkpoint.sharded import Chunk  # it takes a second to import

        found: dict[str, Tensor | Chunk] = dict(tensors)
        for name, tensor in tensors.items():
            layout = self.of(name) if tensor.dim() else None
            if layout is not None and not layout.is_whole:
                found[name] = Chunk.rows(tensor, layout.starts[self._ranks.rank], layout.total)
        return found

    def own_rows(self, checkpoint: ShardedCheckpoint) -> dict[str, Tensor]:
        """Read this rank's rows of all tensors of a checkpoint, which any number of ranks has written.

        Raises:
            ValueError: a file is damaged, or a tensor has another number of rows than all ranks together.
        """
        found: dict[str, Tensor] = {}
        for name, spec in checkpoint.specs.items():
            layout = self.of(name) if spec.shape else None
            if layout is not None and spec.shape[0] != layout.total:
                raise ValueError(f"{name} is {spec.shape} in the checkpoint but has {layout.total} rows here")
            if layout is None or layout.is_whole:
                found[name] = checkpoint.read(name)
            else:
                rows = layout.of_rank(self._ranks.rank)
                found[name] = checkpoint.rows(name, rows.start, rows.stop)
        return found
