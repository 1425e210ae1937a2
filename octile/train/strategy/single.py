"""The strategy of one process, and what a trainer asks of every strategy.

A strategy makes this rank's model, computes the losses and gradients of this rank's part of a batch, and sums over the
ranks what all of them need. It says which of the model's parameters this rank updates. One process has the whole model
and sums nothing.

    single.py       one process
    sharded.py      data-parallel ranks, which share a batch's sequences, the optimizer's state and, if asked, experts
    pipelined.py    ranks of a pipeline, which share the layers, too

Shapes: B sequences, S tokens of each, E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from octile.checkpoint.hugging_face import load_weights
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.nn.conversion import apply_recipe
from octile.optim import AdamW
from octile.optim.gradient import added_in_place, gradient_norm
from octile.parallel.expert_sharding import ExpertShare
from octile.parallel.ranks import Ranks
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.data.packed_tokens import count_labels, is_packed
from octile.train.memory.device import available_memory
from octile.train.memory.saved_activations import can_save, saving_activations
from octile.train.pipeline_layout import held_share
from octile.train.step.captured import why_eager
from octile.train.step.diagnostics import Histogram, first_non_finite
from octile.train.step.passes import Passes
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.state_layout import ModelNames, StateLayout

T = TypeVar("T")

LOSS_PARTS = ("main", "mtp", "balance")  # in the order of `DeepseekV3.last_losses`


class Strategy:
    """How a rank takes part in a run: alone.

    Args:
        config: the configuration of the run.
        device: the device of the model.
        recipe: the recipe of the run.
        ranks: the ranks of the run, which all make the strategy, and call its methods, alike.
        groups: the process groups of this rank.

    Attributes:
        rank, size: the number of this rank among those that share a batch's sequences, and how many they are.
        gathers_weights: whether passes overwrite weights with those of other ranks.
        counts_losses: whether this rank adds the losses that it knows to a sum over all ranks.
        recipe: the recipe of the model, which says which activations are saved.
        saves_activations: whether those are saved that could be recomputed at little cost.
        model: this rank's model, on the device.
        whole: the model of the layers and experts of all ranks; on the meta device if this rank does not have all.
        names: the names of what the whole model has.
        updated: the parameters that this rank updates.
        layout: the rows of the state's tensors that each rank has.
        moes: the mixtures of experts of this rank's model.
        expert_share: the share of the experts of the first rank that has some; None if they are not distributed.
        too_many_rows: float32 [], 1 if the experts of this rank had more rows than capacity in the last passes.
        wants_stop: float32 [], 1 if this rank wants to stop.
        is_gathered: whether this rank has the weights that the others have updated.
    """

    rank, size = 0, 1
    gathers_weights, counts_losses = False, True

    def __init__(
        self, config: TrainConfig, device: torch.device, recipe: Recipe, ranks: Ranks, groups: RankMesh | None = None
    ):
        self.config, self.device, self.ranks, self.groups = config, device, ranks, groups or RankMesh()
        self._recipes = {False: recipe, True: saving_activations(recipe)}
        can = device.type == "cuda" and can_save(config, available_memory(device), held_share(config))
        self.saves_activations = all(ranks.gather(can, bool))
        self.recipe = self._recipes[self.saves_activations]
        self.too_many_rows = torch.zeros((), device=device)
        self.wants_stop = torch.zeros((), device=device)
        self.is_gathered = True
        self.model = self._make_model()
        has_all = self.groups.experts is None and self.groups.pipeline is None
        self.whole = self.model if has_all else meta_model(config.model)
        self.use_recipe(self.recipe)
        if config.indexer_stage == "warm_up":
            for model in (self.model, self.whole):
                model.warm_up_indexers(True)
        self.names = ModelNames.of(self.whole, config.optim)
        self.loss_parts = (*LOSS_PARTS, "indexer") if config.model.has_indexer else LOSS_PARTS
        self.expert_share: ExpertShare | None = None
        self.updated: nn.Module = self.model
        self.layout = StateLayout(self.model, self.names, config.optim, None, ranks)
        self.moes = self.model.moe_layers()

    # Preparation

    def _make_model(self) -> DeepseekV3:
        """Make this rank's model, with the weights that it has in the whole one, on its device."""
        return self._initial_model(self.device)

    def _initial_model(self, device: torch.device) -> DeepseekV3:
        """Make a model of all layers, with the run's initial weights."""
        torch.manual_seed(self.config.seed)
        with self._own_experts():
            model = DeepseekV3(self.config.model)
        model.to(device)
        if self.config.init_from is not None:
            load_weights(model, self.config.init_from)
        return model

    def _own_experts(self) -> AbstractContextManager[object]:
        """The context in which a new model has the experts of this rank."""
        return nullcontext()

    def use_recipe(self, recipe: Recipe) -> None:
        """Apply a recipe to the layers of this rank. Its exceptions need a layer in the whole model."""
        self.recipe = recipe
        if self.model is self.whole:
            apply_recipe(self.model, recipe)
            return
        apply_recipe(self.whole, recipe)
        converted = set(ModelNames.of(self.whole, self.config.optim).converted) & {
            name for name, _ in self.model.named_modules()
        }
        exceptions = [e for e in recipe.exceptions if any(fnmatchcase(name, e[0]) for name in converted)]
        if converted:
            apply_recipe(self.model, replace(recipe, exceptions=tuple(exceptions)))
        else:  # the last stage of a pipeline may have only the head
            self.model.adapt_to(recipe)
        self.model.conversion_summary = self.whole.conversion_summary

    def save_activations(self, saves: bool) -> None:
        """Save the activations that could be recomputed, or recompute them, as the run did whose state is loaded."""
        if saves != self.saves_activations:
            self.saves_activations = saves
            self.use_recipe(self._recipes[saves])

    def descriptions(self) -> list[str]:
        """Sentences about how the ranks share the model, and why a GPU's steps are not captured, if they are not."""
        found = [] if self.expert_share is None else [str(self.expert_share)]
        if self.device.type == "cuda" and (reason := self.why_eager()):
            found.append(f"steps are not captured in CUDA graphs, and launch kernel by kernel: {reason}")
        return found

    # A step

    def why_eager(self) -> str | None:
        """Why the next step is not captured in CUDA graphs, or None."""
        return why_eager(self.device, self.recipe, self.config.deterministic, self._waits_for_rows())

    def _waits_for_rows(self) -> bool:
        """Whether the host waits for the numbers of rows that go to the experts of each rank."""
        return any(moe.dispatcher.waits_for_device for moe in self.moes.values())

    def must_stop(self, requested: bool) -> bool:
        """Whether to launch no further step, because it is requested; on several ranks, because all know that.

        The request travels with the steps that are launched later, and ranks collect the same steps before they go on.

        Args:
            requested: whether it is requested on this rank.
        """
        return requested

    def agree_to_stop(self) -> None:
        """Note that a collected step says that a rank wants to stop."""

    def zero_gradients(self, optimizer: AdamW) -> None:
        """Drop all gradients."""
        optimizer.zero_grad(set_to_none=True)

    def no_load(self) -> dict[str, Tensor]:
        """Zeros for the load of all mixtures, int64 [E] each."""
        n_experts = self.config.model.n_routed_experts
        return {name: torch.zeros(n_experts, dtype=torch.int64, device=self.device) for name in self.names.mixtures}

    def micro_batches(self, tokens_BS: Tensor) -> tuple[Tensor, ...]:
        """The micro-batches of this rank's sequences, as many on each rank."""
        return tokens_BS.chunk(self.config.micro_batches)

    def begin_gather(self) -> None:
        """Begin to let this rank have the weights that the others have updated; passes wait for their own."""

    def losses(self, passes: Passes, tokens_BS: Tensor, sequences: int, load: dict[str, Tensor]) -> Tensor:
        """Run the forward and backward passes of this rank's tokens.

        Args:
            passes: the passes of this rank's model.
            tokens_BS: the sequences of this rank; [B, S, 2] if they are packed.
            sequences: the sequences of the batch, on all ranks.
            load: the tokens of each expert of each mixture, to which those of the passes are added.

        Returns:
            float32, this rank's share of the loss and of its parts.
        """
        sums = dict.fromkeys(("loss", *self.loss_parts), torch.zeros((), device=self.device))
        labels_2 = None
        if is_packed(tokens_BS):  # a label has the same weight in every micro-batch and on every rank
            labels_2 = self.ranks.sum_(count_labels(tokens_BS.to(self.device))).clamp(min=1) / sequences
        micro_batches = self.micro_batches(tokens_BS)
        for number, micro_batch_BS in enumerate(micro_batches, 1):
            parts = sequences / len(micro_batch_BS)
            self.ranks.begin(f"passes of micro-batch {number - 1}")
            with self._reducing(is_last=number == len(micro_batches)), self._adding():  # not where hooks take gradients
                sums["loss"] = sums["loss"] + passes.backward(micro_batch_BS, parts, labels_2)
            for name, value in self.model.last_losses.items():
                sums[name] = sums[name] + value / parts
            for name, moe in self.moes.items():
                load[name] += moe.last_load_E
        return torch.stack([*sums.values()])

    def _adding(self) -> AbstractContextManager[object]:
        """The context of a micro-batch's passes, in which gradients are added to those of the micro-batches before."""
        return added_in_place(self.model.parameters())

    def _reducing(self, is_last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch's passes, in which the last one's sums gradients over the ranks."""
        return nullcontext()

    def sum_over_ranks(self, totals: Tensor, load: dict[str, Tensor]) -> None:
        """Sum gradients, losses and loads over the ranks, and let all have the same histories of delayed scaling.

        Args:
            totals: float32, losses and counts of this rank; the sums are written into it.
            load: the tokens of each expert; replaced by the sums.
        """

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """The norm of all ranks' gradients, and the index of the last parameter whose gradient is not finite, or −1."""
        return gradient_norm(parameters)

    def finish_update(self, gathers: bool) -> None:
        """After an update, drop the gradients that the optimizer does not know.

        Args:
            gathers: whether to let every rank have the updated weights of all, too.
        """

    def gather_weights(self) -> None:
        """Let every rank have the updated weights of all."""

    # Passes without an update

    def main_losses(
        self, passes: Passes, batches: Sequence[Tensor], labels_2: Tensor | None = None
    ) -> Iterable[Tensor]:
        """The main head's mean loss of each batch, without gradients; arguments as in `Passes.loss`."""
        for tokens_BS in batches:
            passes.loss(tokens_BS, labels_2)
            yield self.model.last_losses["main"]

    def token_losses(self, passes: Passes, batches: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
        """Write the main head's loss of each token but the first of its sequence, without gradients.

        Args:
            passes: the passes of this rank's model.
            batches: int64 [B, S] each; [B, S, 2] if they are packed, and tokens without a label then have the loss 0.
            losses: float32 [B, S − 1] each, on the CPU.
        """
        for tokens_BS, losses_BS in zip(batches, losses, strict=True):
            losses_BS.copy_(passes.token_losses(tokens_BS))

    def backward_on(self, passes: Passes, windows: Tensor) -> None:
        """Run a forward and backward pass on one of some windows, int64 [N, S], or on as many as the passes need."""
        passes.loss(windows[:1]).backward()

    def sum_histograms(self, own: dict[str, Histogram]) -> dict[str, Histogram]:
        """The histograms of all ranks' layers from those of each rank's."""
        return own

    def first_non_finite(self, passes: Passes, tokens_BS: Tensor) -> str:
        """The first parameter or module of the model, on any rank, that is not finite in forward passes."""
        micro_batches = self.micro_batches(tokens_BS)
        return first_non_finite(
            self.model,
            lambda: [passes.loss(t) for t in micro_batches],
            lambda own: self.ranks.gather(own, str),
        )

    def with_capacity(self, work: Callable[[], T], release: Callable[[], None]) -> T:
        """Run forward passes, and once more with more capacity if the experts of a rank had too many rows.

        Args:
            work: changes nothing, or the same if it is repeated. All ranks must call this with the same.
            release: frees captured steps, which have the capacity of their capture.
        """
        return work()

    def grow_capacity(self, where: str) -> None:
        """Double the capacity for the rows of a rank's experts, after captured steps were released.

        Args:
            where: the step or the measurement whose rows were too many, for a warning.
        """

    # What is saved

    def check_copies(self) -> None:
        """Compare the copies of parameters that two ranks have, before one of them is saved.

        Raises:
            RuntimeError: copies differ; on all ranks of a pipeline.
        """

    def whole_model(self) -> DeepseekV3:
        """The model with the experts and layers of all ranks, on rank 0; this rank's model on the others.

        All ranks must call this. If experts or layers are distributed, it is one in CPU memory, since it may not fit on
        a device.
        """
        return self.model
