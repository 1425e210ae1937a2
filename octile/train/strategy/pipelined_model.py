"""The stages of a rank of a pipeline, and the passes of a batch's micro-batches through the stages of all ranks.

    PipelinedModel.train                        forward and backward passes: the losses of each micro-batch
    PipelinedModel.main_losses, token_losses    forward passes: held-out losses

Results of the last stage are on the rank that has computed them. Others receive them as a sum with zeros, which keeps
their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from octile.models.deepseek_v3 import DeepseekV3
from octile.models.stages import ModelStage, split_stages
from octile.nn.fused.cross_entropy import cross_entropies
from octile.ops.cross_entropy import IGNORED
from octile.parallel.pipeline import Pipeline
from octile.parallel.schedules import Schedule
from octile.train.strategy.single import LOSS_PARTS

OnOutput = Callable[[ModelStage, int, Tensor, Tensor], Tensor]  # last stage, number, activations, balance loss → loss


class PipelinedModel:
    """This rank's stages of a model, and the passes through those of all ranks.

    All ranks of the group make it, and call its methods, alike.

    Args:
        model: with the parameters of this rank's stages (`octile.models.stages.with_stages`), on its device. Its mode
            and its `mtp_loss_weight` are those of the passes.
        schedule: the schedule of the pipeline.
        layers: those of each stage.
        group: its ranks.
        on_begin: see `Pipeline`.

    Attributes:
        is_first: whether this is the pipeline's rank 0, which counts what its ranks share.
    """

    def __init__(
        self,
        model: DeepseekV3,
        schedule: Schedule,
        layers: Sequence[range],
        group: dist.ProcessGroup,
        on_begin: Callable[[str], None] = lambda operation: None,
    ):
        self.model, self.schedule, self.group = model, schedule, group
        self.is_first = dist.get_rank(group) == 0
        stages = split_stages(model, layers)
        self.stages = {number: stages[number] for number in schedule.stages(dist.get_rank(group))}
        self._last = stages[-1]
        self._pipeline = Pipeline(
            schedule, self.stages, self._loss, group=group, tied=self._last.tied, on_begin=on_begin
        )
        self._on_output: OnOutput | None = None  # of the passes that run

    def copies(self) -> set[str]:
        """The names of parameters of which a lower rank of the pipeline has a copy."""
        below = self._pipeline.copies_of_lower_ranks()
        return {name for name, parameter in self.model.named_parameters() if parameter in below}

    def check_copies(self, parts: Mapping[str, nn.Parameter]) -> None:
        """Compare this rank's parts of the parameters that two ranks have, by name.

        Raises:
            RuntimeError: on all ranks: copies differ.
        """
        self._pipeline.check_copies(self._part_of(parts))

    def train(
        self,
        micro_batches: Sequence[Tensor],
        parts: Callable[[Tensor], float],
        scaled: Callable[[Tensor], Tensor],
        load: Mapping[str, Tensor],
    ) -> Tensor:
        """Add the gradients of the micro-batches; `sum_copies` must follow.

        Args:
            micro_batches: int64 [B, S] each, as many as the schedule has, on all ranks of the pipeline.
            parts: sequences of the batch over those of a micro-batch.
            scaled: multiplies a loss by the loss scale.
            load: the tokens of each expert, int64 [E], are added to it: those of this rank's mixtures, by their names.

        Returns:
            float32 [M, 4]: the loss of each micro-batch, its main, MTP and balance part, all divided by its parts.
        """
        shares_M4 = torch.zeros(len(micro_batches), 1 + len(LOSS_PARTS), device=micro_batches[0].device)

        def add(stage: ModelStage, number: int, h_BSD: Tensor, balance: Tensor) -> Tensor:
            tokens_BS = micro_batches[number]
            share = stage.loss(h_BSD, balance, tokens_BS) / parts(tokens_BS)
            part_losses = [stage.last_losses[name] / parts(tokens_BS) for name in LOSS_PARTS]
            shares_M4[number] = torch.stack([share.detach(), *part_losses])
            add_load(stage, in_loss=True)
            return scaled(share)

        def add_load(stage: ModelStage, in_loss: bool) -> None:
            """Add the load of the stage's mixtures: of those that run in the loss, or of the others."""
            for name, moe in stage.moe_layers().items():
                if (name in mtp_mixtures) == in_loss:
                    load[name].add_(moe.last_load_E)

        c = self.model.config
        mtp_mixtures = {f"model.layers.{c.num_hidden_layers + i}.mlp" for i in range(c.num_nextn_predict_layers)}
        # the stages share the hooks of the model that they were split from
        hook = self.model.register_forward_hook(lambda stage, x, y: add_load(stage, in_loss=False))
        with hook:
            self._run(partial(self._pipeline.step, sums_copies=False), micro_batches, add)
        dist.all_reduce(shares_M4, group=self.group)
        return shares_M4

    def sum_copies(self, parts: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of parameters that two ranks have, of which each has those of its parts, by name."""
        self._pipeline.sum_copies(self._part_of(parts))

    def _part_of(self, parts: Mapping[str, nn.Parameter]) -> Callable[[nn.Parameter], nn.Parameter]:
        return {parameter: parts[name] for name, parameter in self.model.named_parameters()}.__getitem__

    def forward(self, micro_batches: Sequence[Tensor]) -> None:
        """Run the forward passes of as many micro-batches as the schedule has, without gradients."""

        def loss(stage: ModelStage, number: int, h_BSD: Tensor, balance: Tensor) -> Tensor:
            return stage.loss(h_BSD, balance, micro_batches[number])

        self._run(self._pipeline.evaluate, micro_batches, loss)

    def main_losses(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """The main head's mean loss of each micro-batch, float32 [N] for any number of them, without gradients."""
        losses_N = torch.zeros(len(micro_batches), device=micro_batches[0].device)

        def add(stage: ModelStage, number: int, h_BSD: Tensor, balance: Tensor) -> Tensor:
            loss = stage.loss(h_BSD, balance, micro_batches[number])
            losses_N[number] = stage.last_losses["main"]
            return loss

        self._evaluate(micro_batches, add)
        dist.all_reduce(losses_N, group=self.group)
        return losses_N

    def token_losses(self, micro_batches: Sequence[Tensor]) -> list[Tensor]:
        """The main head's loss of each token but the first of its sequence: float32 [B, S − 1] of each micro-batch."""
        losses = [torch.zeros(t[:, 1:].shape, device=t.device) for t in micro_batches]

        def add(stage: ModelStage, number: int, h_BSD: Tensor, balance: Tensor) -> Tensor:
            labels_BS = F.pad(micro_batches[number][:, 1:], (0, 1), value=IGNORED)
            losses[number].copy_(cross_entropies(stage.lm_head(h_BSD), labels_BS)[:, :-1])
            return balance

        self._evaluate(micro_batches, add)
        for losses_BS in losses:
            dist.all_reduce(losses_BS, group=self.group)
        return losses

    def _evaluate(self, micro_batches: Sequence[Tensor], add: OnOutput) -> None:
        """Run forward passes of any number of micro-batches; the last is repeated to fill the schedule."""
        at_once = self.schedule.n_micro_batches
        for start in range(0, len(micro_batches), at_once):
            own = micro_batches[start : start + at_once]
            filled = [*own, *repeat(own[-1], at_once - len(own))]
            self._run(self._pipeline.evaluate, filled, partial(_add_own, add, start, len(own)))

    def _run(self, run: Callable[..., Tensor], micro_batches: Sequence[Tensor], on_output: OnOutput) -> None:
        for stage in self.stages.values():
            stage.training, stage.mtp_loss_weight = self.model.training, self.model.mtp_loss_weight
        self._on_output = on_output
        run(micro_batches, range(len(micro_batches)))
        self._on_output = None

    def _loss(self, h_BSD: Tensor, balance: Tensor, number: int) -> Tensor:
        assert self._on_output is not None
        return self._on_output(self._last, number, h_BSD, balance)


def _add_own(
    add: OnOutput, start: int, n: int, stage: ModelStage, number: int, h_BSD: Tensor, balance: Tensor
) -> Tensor:
    """Add the result of a micro-batch if it is one of n from `start` on, and not one that fills the schedule."""
    return add(stage, start + number, h_BSD, balance) if number < n else balance
