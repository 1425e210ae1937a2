"""The trainer: model, optimizer and data of a run, a training step, validation, and the state for a checkpoint.

A step depends only on the state and the step's number, so that a run that is saved, killed and loaded continues with
the same bits.

Launching a step and reading its result are separate, so that a GPU never waits for the host:

    launch      the host launches a step's kernels; the device decides whether its update is skipped
    read        the host waits for launched steps, and returns their metrics in order
    advance     launch, and read the READ_EVERY oldest steps when twice as many are launched
    step        launch and read one step

The device skips an update if the gradient is not finite. If the loss is not finite, or too many steps in a row were
skipped, it also skips every later update (`_halted`). So when the host reads that, the weights are still those before
the step.

On symmetric memory the rows of a rank's experts have a limited place. If they are more in a step, it and later steps
change nothing either; the host then doubles the place, and launches them again.

On several ranks each takes its sequences of every step's batch, and everything that is decided or reported is a sum
over all ranks, so that all ranks launch, skip and stop the same steps (`octile.parallel`). Gradients are summed during
the last micro-batch's backward pass. If steps are read late, the updated weights are gathered during the next forward
pass: while a step is unread, a rank may have old values of the weights that others update.

A rank of a pipeline has the layers of its stages (`octile.train.strategy.pipelined_model`). Losses and loads are those
of all ranks even so, and every number that is decided by is a sum that counts what several ranks have once.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from itertools import cycle, islice
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octile.checkpoint.fp8_layout import scale_rule
from octile.checkpoint.hugging_face import load_weights
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.flops import bf16_peak, train_flops_per_token
from octile.models.meta import meta_model
from octile.models.stages import with_stages
from octile.nn.conversion import apply_recipe
from octile.nn.delayed_scaling import amax_histories, end_step
from octile.nn.moe import share_of_experts
from octile.nn.weight_cache import frozen_weights
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.optim import EMA, AdamW, BatchRamp, DynamicLossScale, WarmupConstantCosine, clip_factor, param_groups
from octile.optim.gradient import gradient_norm
from octile.parallel.expert_sharding import ExpertShare
from octile.parallel.ranks import Ranks
from octile.parallel.schedules import Schedule
from octile.parallel.state import ShardedState
from octile.parallel.symmetric_memory import PeerDispatcher
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.data.batches import Batches, PreparedBatches, validation_windows
from octile.train.data.token_store import TokenStore
from octile.train.evaluation.diagnostics import Histogram, add_histograms, first_non_finite, record_tile_scales
from octile.train.memory.device import available_memory
from octile.train.memory.saved_activations import can_keep, keep_activations
from octile.train.run.metrics import Metrics
from octile.train.run.state import TrainerState
from octile.train.step.captured import CapturedStep, why_eager
from octile.train.step.clock import StepClock
from octile.train.step.results import StepResults
from octile.train.strategy.expert_parallel import check_exchange, spread_experts
from octile.train.strategy.pipelined_model import PARTS, PipelinedModel, held_share, make_pipeline_schedule
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.state_layout import ModelNames, StateLayout

T = TypeVar("T")

READ_EVERY = 10  # steps that are read at a time; as many more are in flight meanwhile
AHEAD = 4  # batches that a thread prepares for a GPU; a CPU has no core to spare, and no memory


class Computed(NamedTuple):
    """The result of a step's forward and backward pass.

    Attributes:
        values: float32: the loss, its main, MTP and balance parts, with indexers also theirs, the norm of the gradient
            before clipping, the index of the last parameter whose gradient is not finite, or -1, how many ranks want to
            stop, and on how many the experts had too many rows.
        load: int64 [E] for each MoE layer, the tokens of each expert.
        skip: bool [], whether the update must change nothing.
        overflowed: whether the gradients were not finite, and a smaller loss scale may help.
    """

    values: Tensor
    load: dict[str, Tensor]
    skip: Tensor
    overflowed: bool


class Launched(NamedTuple):
    """What the host knows of a step that it has launched and not read.

    Attributes:
        number: the step's, counted from 1.
        learning_rate: of the step.
        tokens: of its batch.
        tokens_so_far: of all steps up to this one.
        scheduled: the values that the configuration changes during the run.
        overflowed: the loss scale under which the gradients overflowed, or None.
    """

    number: int
    learning_rate: float
    tokens: int
    tokens_so_far: int
    scheduled: Metrics
    overflowed: float | None


class Trainer:
    """A model, its optimizer and its data.

    Args:
        config: of the run; its seed determines the order of the data and, without `init_from`, the initial weights.
        store: the tokens.
        device: the device of the model.
        recipe: a recipe without a name; the one that config names if not given.
        ranks: the ranks of the run, as many as `config.parallel.ranks`; only this one if not given. All of them must
            make the same calls.

    Raises:
        ValueError: a pipeline's schedule does not fit the ranks, the layers or the micro-batches.
    """

    def __init__(
        self,
        config: TrainConfig,
        store: TokenStore,
        device: torch.device,
        recipe: Recipe | None = None,
        ranks: Ranks | None = None,
    ):
        # the tokenizer determines the special tokens
        tokenizer = store.tokenizer
        model = replace(config.model, bos_token_id=tokenizer.begin, eos_token_id=tokenizer.end)
        self.config, self.device, self.ranks = replace(config, model=model), device, ranks or Ranks.alone()
        self.recipe = recipe or config.load_recipe()
        if scale_rule(self.config.model.extra) == "power_of_2":  # of the checkpoint that the run began with
            self.recipe = self.recipe.with_weight_scale("power_of_2")
        self._recipes = {False: self.recipe, True: keep_activations(self.recipe)}
        groups = RankMesh.of(config.parallel, self.ranks, device.type) if self.ranks.size > 1 else RankMesh()
        stages = make_pipeline_schedule(config) if groups.pipeline else None
        can = device.type == "cuda" and can_keep(self.config, available_memory(device), held_share(stages))
        self.keeps_activations = all(self.ranks.gather(can, bool))
        self.recipe = self._recipes[self.keeps_activations]
        self._too_many_rows = torch.zeros((), device=device)  # 1 if the experts of this rank had more rows than place
        if groups.hops is not None:
            check_exchange(config, groups.hops, self.ranks)
        self._make_model(groups, stages)
        self.names = ModelNames.of(self.whole)
        self._loss_parts = (*PARTS, "indexer") if self.config.model.has_indexer else PARTS
        self.expert_share = None if groups.hops is None else self._spread_experts(groups.hops)
        self.pipelined: PipelinedModel | None = None
        if stages is not None and groups.pipeline is not None:
            self.pipelined = PipelinedModel(self.model, stages, groups.pipeline, self.ranks.begin)
        self.shards: ShardedState | None = None
        if self.ranks.size > 1:
            self.shards = ShardedState(
                self.model,
                groups.experts,
                getattr(torch, config.parallel.reduce),
                None if self.pipelined else self.model.stages(),
                group=groups.data,
                uncounted=self.pipelined.copies() if self.pipelined else (),
                order=self.names.parameters,
            )
        self.updated = self.shards.parts if self.shards else self.model  # the parameters that this rank updates
        optim = config.optim
        self.optimizer = AdamW(
            param_groups(self.updated, optim.weight_decay),
            lr=optim.lr,
            betas=optim.betas,
            formats=self.recipe.optimizer,
        )
        self.layout = StateLayout(self.model, self.names, self.shards, self.ranks)
        self.schedule = schedule(config)
        self.loss_scale = DynamicLossScale() if self.recipe.loss_scale else None
        self.ema = EMA(self.updated, optim.ema_decay, self.optimizer) if optim.ema_decay else None
        self.data, self.data_folder = store.digest, store.folder
        self.batches = Batches(store.train, batch_ramp(config), config.sequence_length - 1, config.seed)
        on_gpu = device.type == "cuda"
        self._prepared = PreparedBatches(self._own_batch, AHEAD if on_gpu else 0, pin=on_gpu)
        self.held_out = validation_windows(store.val, config.sequence_length - 1, config.val_sequences)
        self.moes = self.model.moe_layers()
        self.last_load = self._no_load()
        self.steps_done = 0
        self.tokens = 0
        self.seconds = 0.0
        self.skipped = 0  # steps without an update, because a gradient was not finite
        self.skipped_in_a_row = 0  # consecutive skipped steps until now, without overflows of the loss scale
        self.captured = None
        if on_gpu and self.pipelined is None:
            gathers = self.shards is not None
            self.captured = CapturedStep(self.model, self._compute, self._update, device, gathers)
        self.flops_per_token = train_flops_per_token(self.config.model, config.sequence_length)
        self._peak = bf16_peak(torch.cuda.get_device_name(device)) if on_gpu else None
        self._unread: deque[Launched] = deque()
        timeout = self.ranks.timeout.total_seconds()
        self._results = StepResults(2 * READ_EVERY, self._n_losses + 4, device, timeout)
        self._clock = StepClock(device, timeout)  # a mark at the begin of each unread step
        self._reads_late = False  # whether steps may be launched before the last one is read
        self._is_gathered = True  # whether all ranks have the weights that the others have updated
        self._sequences = 0  # of the launched batch, on all ranks
        self._wants_stop = torch.zeros((), device=device)  # 1 if this rank wants to stop
        self._stop_is_agreed = False
        self._in_a_row = torch.zeros((), dtype=torch.int64, device=device)  # the device's own skipped_in_a_row
        self._halted = torch.zeros((), dtype=torch.bool, device=device)  # whether all updates are skipped

    def _make_model(self, groups: RankMesh, stages: Schedule | None) -> None:
        """Make this rank's model, with the weights that it has in the whole one, and the whole one.

        The whole one is on the meta device where this rank has not all layers or experts.
        """
        config, mesh = self.config, groups.experts
        torch.manual_seed(config.seed)
        with nullcontext() if mesh is None else share_of_experts(mesh.get_local_rank("expert"), config.parallel.ep):
            self.model = DeepseekV3(config.model)
        if stages is None:
            self.model.to(self.device)
        if config.init_from is not None:
            load_weights(self.model, config.init_from)
        if stages is not None:
            own = stages.stages(dist.get_rank(groups.pipeline))
            self.model = with_stages(self.model, stages.n_stages, own).to(self.device)
        self.whole = self.model
        if mesh is not None or stages is not None:
            self.whole = meta_model(config.model)
        self._apply_recipe()
        if config.indexer_stage == "warm_up":
            for model in (self.model, self.whole):
                model.warm_up_indexers(True)

    @property
    def _n_losses(self) -> int:
        return 1 + len(self._loss_parts)

    def _spread_experts(self, hops: dist.ProcessGroup | DeviceMesh) -> ExpertShare:
        """Spread the experts of this rank's layers if they have some; return the share of the first rank that has."""
        own = None
        if self.model.moe_layers():
            own = spread_experts(self.model, self.config, hops, self.recipe, self._too_many_rows)
        return next(share for share in self.ranks.gather(own, ExpertShare | None) if share is not None)

    def step(self) -> Metrics:
        """Run one optimizer step and return its metrics. The host waits for the device.

        If a gradient is not finite, the step is skipped: weights, moments, biases of gates and the moving average do
        not change. `skipped` counts these steps, and the metrics contain the reason as `skipped_for`.

        Raises:
            FloatingPointError: the loss is NaN or Inf, or a gradient is and the `skip_limit` steps before were skipped.
                The weights are those before the step.
            RuntimeError: steps were launched and not read.
        """
        self._check_read("step")
        lines: list[Metrics] = []
        while not lines:  # a step for which there was no place is launched again
            self.launch()
            lines = list(self.read())
        return lines[0]

    def advance(self) -> Iterator[Metrics]:
        """Launch a step, and return the metrics of the steps whose turn it is to be read, in order.

        Without a CUDA graph that is the step itself. With one it is none, or the READ_EVERY oldest while as many are in
        flight, so that the device has work while the host waits and writes. `steps_done` is less afterwards if the host
        has read that a step must be launched again.

        Raises:
            FloatingPointError: see `read`.
        """
        self.launch()
        if not self._reads_late:
            return self.read()
        return self.read(READ_EVERY if len(self._unread) == 2 * READ_EVERY else len(self._unread))

    def launch(self) -> None:
        """Launch one optimizer step. On a GPU the host does not wait for it if steps can be captured (`why_eager`).

        Raises:
            RuntimeError: 2 · READ_EVERY steps are not read yet.
        """
        if len(self._unread) == 2 * READ_EVERY:
            raise RuntimeError(f"{len(self._unread)} steps were launched and not read: call read()")
        if not self._unread:
            self._clock.reset()
        self._clock.mark()
        tokens_BS = self._prepared.batch(self.steps_done)
        self._sequences = self.batches.batch_sizes.size(self.steps_done)
        tokens = self._sequences * tokens_BS.shape[1]
        self.ranks.at(f"step {self.steps_done + 1}")
        learning_rate = self.schedule(self.steps_done)
        self._reads_late = self.why_eager() is None
        if not self._reads_late:
            self.gather_weights()  # unless each forward pass gathers those of the step before
        captured = self.captured if self._reads_late else None
        scale = self.loss_scale.value if self.loss_scale else None
        if captured is None:
            result = self._compute(tokens_BS)
        else:
            constants = self.mtp_loss_weight(), self.balance_speed(), self._sequences
            result = captured.compute(tokens_BS, constants)
        if self.ema:
            self.ema.wait_for_copies()
        (captured.update if captured else self._update)(learning_rate, result)
        self._is_gathered = not self._reads_late
        if self.ema:
            self.ema.update(result.skip)
        if self.loss_scale:
            self.loss_scale.update()
        self._results.append(result.values)
        self.last_load = result.load

        scheduled = self._scheduled(self._sequences)
        self.steps_done += 1
        self.tokens += tokens
        overflowed = scale if result.overflowed else None
        numbers = (self.steps_done, learning_rate, tokens, self.tokens)
        self._unread.append(Launched(*numbers, scheduled, overflowed))

    def why_eager(self) -> str | None:
        """Why the next step is not captured in CUDA graphs, or None."""
        if self.pipelined:
            return "the host launches the actions of a pipeline one by one"
        waits = any(moe.dispatcher.waits_for_device for moe in self.moes.values())
        return why_eager(self.device, self.recipe, self.config.deterministic, waits)

    def read(self, leave: int = 0) -> Iterator[Metrics]:
        """Wait for launched steps and yield their metrics, the oldest first; `leave` of the newest stay unread.

        From a step on whose rows there was no place for, all are discarded, and are to be launched again; their time
        counts as that of the next step.

        Raises:
            FloatingPointError: the loss is NaN or Inf, or a gradient is and the `skip_limit` steps before were skipped.
                Raised after the metrics of the steps before. Weights, `steps_done` and `tokens` are those before the
                step; steps that were launched after it are discarded.
        """
        launched = [self._unread.popleft() for _ in range(len(self._unread) - leave)]
        if not launched:
            return
        self.ranks.begin(f"results of step {launched[0].number}")
        values = [self._results.pop() for _ in launched]
        if not leave:
            self.gather_weights()
            self._clock.mark()
        lines: list[Metrics] = []
        failure: FloatingPointError | None = None
        for step, (*losses, grad_norm, last_broken, stopping, too_many_rows) in zip(launched, values, strict=True):
            self._stop_is_agreed |= stopping > 0
            if too_many_rows:
                self._discard_from(step)
                self._clock.rewind()
                self._make_place(f"step {step.number}")
                self.gather_weights()
                break
            try:
                skipped_for = self._check(step, losses[0], grad_norm, int(last_broken))
            except FloatingPointError as error:
                failure = error
                break
            seconds = self._clock.lap()
            self.seconds += seconds
            lines.append(
                {
                    "step": step.number,
                    "loss": losses[0],
                    **{f"{part}_loss": loss for part, loss in zip(self._loss_parts, losses[1:], strict=True)},
                    "lr": step.learning_rate,
                    "grad_norm": grad_norm,
                    "tokens": step.tokens_so_far,
                    **self._speed(step.tokens / seconds),
                    "seconds": self.seconds,
                    "skipped": self.skipped,
                    **step.scheduled,
                    **({"skipped_for": skipped_for} if skipped_for else {}),
                }
            )
        yield from lines
        if failure is not None:
            raise failure

    def _speed(self, tokens_per_s: float) -> Metrics:
        """Tokens and model FLOPs per second, and MFU if the GPU's peak is known (`octile.models.flops`)."""
        flops_per_s = self.flops_per_token * tokens_per_s
        mfu = {} if self._peak is None else {"mfu": flops_per_s / (self.ranks.size * self._peak)}
        return {"tokens_per_s": tokens_per_s, "flops_per_s": flops_per_s, **mfu}

    def must_stop(self, requested: bool) -> bool:
        """Whether to launch no further step, because it is requested; on several ranks, because all know that.

        The request travels with the steps that are launched later, and ranks read the same steps before they go on.

        Args:
            requested: on this rank.
        """
        if self.shards is None:
            return requested
        self._wants_stop.fill_(float(requested))
        return self._stop_is_agreed

    def close(self) -> None:
        """End the thread that prepares batches. A later step prepares its own."""
        self._prepared.close()

    def gather_weights(self) -> None:
        """Let every rank have the weights of all after the last launched step. All ranks must call this.

        They have them whenever every launched step is read.
        """
        if self.shards and not self._is_gathered:
            self.shards.gather_weights()
            self._is_gathered = True

    def _compute(self, tokens_BS: Tensor) -> Computed:
        """Run the forward and backward pass, and compute the norm of the gradients, which `_update` clips.

        On several ranks, tokens are those of this rank, and the results are sums over the ranks.
        """
        self.model.train()
        self._zero_gradients()
        self._too_many_rows.zero_()
        if self.shards and self._reads_late:
            self.shards.begin_gather()
        load = self._no_load()
        sums = self._pipelined_losses(tokens_BS, load) if self.pipelined else self._losses(tokens_BS, load)
        totals = torch.cat([sums, torch.stack([self._wants_stop, self._too_many_rows])])
        if self.shards:
            self.shards.finish_gather()
            self._sum_over_ranks(self.shards, totals, load)
        parameters = list(self.updated.parameters())
        overflowed = False
        if self.loss_scale:
            finite = self.loss_scale.unscale_(parameters, lambda own: all(self.ranks.gather(own, bool)))
            overflowed = not finite and self.loss_scale.value > 1.0
        norm, last_broken = self.shards.gradient_norm() if self.shards else gradient_norm(parameters)
        skip = self._decide(totals[0], norm, overflowed, totals[-1])
        values = torch.stack([*totals[: self._n_losses], norm, last_broken.float(), *totals[self._n_losses :]])
        return Computed(values, load, skip, overflowed)

    def _losses(self, tokens_BS: Tensor, load: dict[str, Tensor]) -> Tensor:
        """Run the passes of this rank's tokens: their share of the losses, float32. Add to the load."""
        sums = dict.fromkeys(("loss", *self._loss_parts), torch.zeros((), device=self.device))
        micro_batches = self._micro_batches(tokens_BS)
        for number, micro_batch_BS in enumerate(micro_batches, 1):
            parts = (self._sequences if self.shards else len(tokens_BS)) / len(micro_batch_BS)
            is_last = number == len(micro_batches)
            self.ranks.begin(f"passes of micro-batch {number - 1}")
            with self.shards.reducing() if self.shards and is_last else nullcontext():
                sums["loss"] = sums["loss"] + self.backward(micro_batch_BS, parts)
            for name, value in self.model.last_losses.items():
                sums[name] = sums[name] + value / parts
            for name, moe in self.moes.items():
                load[name] += moe.last_load_E
        return torch.stack([*sums.values()])

    def _pipelined_losses(self, tokens_BS: Tensor, load: dict[str, Tensor]) -> Tensor:
        """Do the same with this rank's stages; the losses are counted on the pipeline's first rank."""
        assert self.pipelined is not None
        micro_batches = [t.to(self.device, non_blocking=True) for t in self._micro_batches(tokens_BS)]
        scaled = self.loss_scale.scale if self.loss_scale else lambda loss: loss
        self.model.mtp_loss_weight = self.mtp_loss_weight()
        with self.precision():
            shares_M4 = self.pipelined.train(micro_batches, lambda t: self._sequences / len(t), scaled, load)
        sums = torch.zeros(self._n_losses, device=self.device)
        for share_4 in shares_M4 if self.pipelined.is_first else ():
            sums = sums + share_4  # in the order in which one process adds them up
        return sums

    def _no_load(self) -> dict[str, Tensor]:
        """Zeros for the load of all mixtures, int64 [E] each."""
        n_experts = self.config.model.n_routed_experts
        return {name: torch.zeros(n_experts, dtype=torch.int64, device=self.device) for name in self.names.mixtures}

    @torch.no_grad()
    def _sum_over_ranks(self, shards: ShardedState, totals: Tensor, load: dict[str, Tensor]) -> None:
        """Sum gradients, losses and loads over the ranks, and let all have the same histories of delayed scaling."""
        self.ranks.begin("sum of the gradients")
        shards.reduce_gradients()
        if self.pipelined:
            self.pipelined.sum_copies(dict(shards.parts.named_parameters()))
        self.ranks.begin("sum of the losses and loads")
        self.ranks.sum_(totals)
        if load:  # each counts the tokens of a replica's ranks
            total_LE = shards.sum_over_replicas(torch.stack([*load.values()]))
            if self.pipelined:
                dist.all_reduce(total_LE, group=self.pipelined.group)
            for name, total_E in zip(load, total_LE, strict=True):
                load[name] = total_E
        if self.names.histories:
            own = amax_histories(self.model)
            none = torch.zeros_like(next(iter(own.values())).amax_OH[:, 0])
            amax = [own[name].amax_OH[:, 0] if name in own else none for name in self.names.histories]
            for name, largest_O in zip(self.names.histories, self.ranks.max_(torch.stack(amax)), strict=True):
                if name in own:
                    own[name].amax_OH[:, 0] = largest_O
        self.ranks.begin("")

    def _zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.shards:  # the optimizer knows only parts of the parameters
            self.model.zero_grad(set_to_none=True)

    def _own_batch(self, step: int) -> Tensor:
        """The sequences of a step's batch that this rank computes."""
        return self.batches.batch(step, *self._place)

    @property
    def _place(self) -> tuple[int, int]:
        """The number of this rank among those that share a batch's sequences, and theirs."""
        return (self.shards.rank, self.shards.size) if self.shards else (0, 1)

    def _micro_batches(self, tokens_BS: Tensor) -> tuple[Tensor, ...]:
        """The micro-batches of this rank's sequences, as many on each rank."""
        n = self.config.micro_batches
        return tokens_BS.tensor_split(n) if self.shards else tokens_BS.chunk(n)

    @torch.no_grad()
    def _decide(self, loss: Tensor, norm: Tensor, overflowed: bool, too_many_rows: Tensor) -> Tensor:
        """Decide on the device whether to skip the update, bool [], and whether to skip all updates from now on.

        `_check` draws the same conclusions on the host, later.
        """
        broken = ~norm.isfinite()
        if not overflowed:
            self._in_a_row.copy_(torch.where(broken, self._in_a_row + 1, 0))
        self._halted |= ~loss.isfinite() | (self._in_a_row > self.config.skip_limit) | (too_many_rows > 0)
        return self._halted | broken

    def backward(self, tokens_BS: Tensor, parts: float) -> Tensor:
        """Add the gradients of a micro-batch [B, S], times the loss scale if any; return its share of the loss.

        Args:
            tokens_BS: the micro-batch.
            parts: sequences of the batch over sequences of the micro-batch.
        """
        loss = self._loss(tokens_BS) / parts
        with without_reduced_precision_reduction():
            (self.loss_scale.scale(loss) if self.loss_scale else loss).backward()
        return loss.detach()

    def expert_load(self) -> dict[str, list[int]]:
        """The number of tokens that each expert of each layer received in the last step."""
        return {name: load_E.tolist() for name, load_E in self.last_load.items()}

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """The held-out loss of the main head in nats per token, and that of the averaged weights, if any."""
        line = {"val_loss": self._held_out_loss(), "val_tokens": self.held_out.numel()}
        if self.ema:
            with self.averaged():
                line["ema_val_loss"] = self._held_out_loss()
        return line

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model's weights by their moving average inside the context, and restore them after it.

        On several ranks only each rank's parts are restored after a failure.
        """
        assert self.ema is not None
        with self.ema.applied(self.updated):
            if self.shards:
                self.shards.gather_weights()
            yield
        if self.shards:  # not after a failure, which other ranks may not have
            self.shards.gather_weights()

    def _held_out_loss(self) -> float:
        self.model.eval()
        self.ranks.at(f"validation after step {self.steps_done}")
        return self.with_place(self._own_held_out_loss)

    def with_place(self, work: Callable[[], T]) -> T:
        """Run forward passes, and once more with more place if the experts of a rank had too many rows.

        Args:
            work: changes nothing, or the same if it is repeated. All ranks must call this with the same.
        """
        while True:
            self._too_many_rows.zero_()
            result = work()
            if self.shards is None or not self.ranks.sum_(self._too_many_rows).item():
                return result
            self._make_place(self.ranks.position)

    def _make_place(self, where: str) -> None:
        """Double the place for the rows of a rank's experts; captured steps, which have the old one, are dropped."""
        if self.captured is not None:
            self.captured.release()
        dispatchers = [moe.dispatcher for moe in self.moes.values() if isinstance(moe.dispatcher, PeerDispatcher)]
        for dispatcher in dispatchers:
            dispatcher.max_rows = min(2 * dispatcher.max_rows, dispatcher.enough_rows)
        most = max(self.ranks.gather(max((dispatcher.max_rows for dispatcher in dispatchers), default=0), int))
        warnings.warn(
            f"{where}: the experts of a rank have more rows than place, which is doubled to {most:,} rows; what was "
            "computed is discarded and computed again",
            stacklevel=2,
        )

    def _own_held_out_loss(self) -> float:
        rank, size = self._place
        own_NS, at_once = self.held_out.tensor_split(size)[rank], self.config.micro_batch_size
        starts = range(0, math.ceil(len(self.held_out) / size), at_once)
        batches = [own_NS[start : start + at_once] for start in starts]
        total = torch.zeros((), device=self.device)
        with frozen_weights(self.model):
            # ranks must make the same calls, also without sequences
            losses = self._main_losses([tokens_BS if len(tokens_BS) else self.held_out[:1] for tokens_BS in batches])
            for loss, tokens_BS in zip(losses, batches, strict=True):
                total += loss * len(tokens_BS)
        if self.pipelined and not self.pipelined.is_first:
            total.zero_()  # all ranks of the pipeline have the losses
        return self.ranks.sum_(total).item() / len(self.held_out)

    def _main_losses(self, batches: Sequence[Tensor]) -> Iterable[Tensor]:
        """The main head's loss of each batch, without gradients."""
        if self.pipelined:
            with self.precision():
                yield from self.pipelined.main_losses([tokens_BS.to(self.device) for tokens_BS in batches])
            return
        for tokens_BS in batches:
            self._loss(tokens_BS)
            yield self.model.last_losses["main"]

    def tile_scales(self) -> dict[str, Any]:
        """Histograms of the scales in a forward and backward pass on held-out text, which changes no state."""
        return self.with_place(self._tile_scales)

    def _tile_scales(self) -> dict[str, Any]:
        self.model.train()
        self._zero_gradients()
        with self.preserved(), record_tile_scales() as histograms, without_reduced_precision_reduction():
            if self.pipelined is None:
                self._loss(self.held_out[:1]).backward()
                return histograms()
            windows = islice(cycle(self.held_out.to(self.device).split(1)), self.config.micro_batches)
            with self.precision():
                self.pipelined.train([*windows], lambda _: 1.0, lambda loss: loss, self._no_load())
        return add_histograms(self.ranks.gather(histograms() if self._place[0] == 0 else {}, dict[str, Histogram]))

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore what a forward and backward pass inside the context changes: amax histories and gradients."""
        amax = {name: history.amax_OH.clone() for name, history in amax_histories(self.model).items()}
        try:
            yield
        finally:
            for name, history in amax_histories(self.model).items():
                history.amax_OH.copy_(amax[name])
            self._zero_gradients()

    def autocast(self) -> torch.autocast:
        """Autocast of a forward pass: on a GPU, what is not quantized is in the recipe's `compute` dtype.

        On a CPU, and under a recipe that computes in FP32, it is in FP32.
        """
        dtype = self.recipe.compute
        return torch.autocast(self.device.type, dtype, self.device.type == "cuda" and dtype != torch.float32)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The context of a forward pass: autocast, and GEMMs that sum in FP32 under every recipe."""
        with self.autocast(), without_reduced_precision_reduction():
            yield

    def balance_speed(self) -> float:
        """γ of the next step; 0 while the indexers alone are trained."""
        optim = self.config.optim
        if self.config.indexer_stage == "warm_up":
            return 0.0
        return optim.balance_speed if self.steps_done < self._step_at(optim.balance_end) else 0.0

    def mtp_loss_weight(self) -> float:
        """The weight of the next step's multi-token prediction loss."""
        optim = self.config.optim
        changed = self.steps_done >= self._step_at(optim.mtp_change)
        return optim.late_mtp_loss_weight if changed else self.config.model.mtp_loss_weight

    def _step_at(self, share: float) -> float:
        """The number of steps before a share of the run; infinity for the whole run, which may be extended."""
        return round(self.config.steps * share) if share < 1 else math.inf

    def _scheduled(self, batch_size: int) -> Metrics:
        """The values of this step that the configuration changes during the run."""
        config = self.config
        return {
            **({"batch_size": batch_size} if config.batch_ramp else {}),
            **({"balance_speed": self.balance_speed()} if config.optim.balance_end < 1 else {}),
            **({"mtp_loss_weight": self.mtp_loss_weight()} if config.optim.mtp_change < 1 else {}),
        }

    def _loss(self, tokens_BS: Tensor) -> Tensor:
        self.model.mtp_loss_weight = self.mtp_loss_weight()
        tokens_BS = tokens_BS.to(self.device, non_blocking=True)
        with self.precision():
            return self.model(tokens_BS, tokens_BS)

    def _check(self, step: Launched, loss: float, grad_norm: float, last_broken: int) -> str | None:
        """Return the reason for which a step was skipped, or None. Later steps are discarded if the run must stop.

        Steps that overflow only because of the loss scale do not count, because the scale is reduced after them.

        Args:
            step: the oldest that is not checked.
            loss, grad_norm: of the step.
            last_broken: the index of the last parameter whose gradient is not finite, or -1.

        Raises:
            FloatingPointError: the loss is not finite, because all later losses would not be either; or too many steps
                in a row were skipped.
        """
        if not math.isfinite(loss):
            self._discard_from(step)
            where = self._first_non_finite(self._micro_batches(self._own_batch(self.steps_done)))
            raise FloatingPointError(
                f"the loss is {loss} at step {step.number}; the first non-finite value is in {where}"
            )
        if math.isfinite(grad_norm):
            self.skipped_in_a_row = 0
            return None
        self.skipped += 1
        if step.overflowed is not None:
            return f"the gradients overflowed under a loss scale of {step.overflowed:,.0f}"
        self.skipped_in_a_row += 1
        where = (
            self.names.parameters[last_broken] if last_broken >= 0 else "their norm"
        )  # backward spreads it from last to first
        if self.skipped_in_a_row > self.config.skip_limit:
            self._discard_from(step)
            before = f", after {self.config.skip_limit} in a row that were skipped" if self.config.skip_limit else ""
            raise FloatingPointError(
                f"a gradient is not finite at step {step.number}; the nearest to the loss is {where}{before}"
            )
        return f"a gradient is not finite; the nearest to the loss is {where}"

    def _first_non_finite(self, micro_batches: Sequence[Tensor]) -> str:
        """The first parameter or module of the model, on any rank, that is not finite in forward passes."""
        if self.pipelined is None:
            return first_non_finite(
                self.model,
                lambda: [self._loss(t) for t in micro_batches],
                lambda own: self.ranks.gather(own, str),
            )
        of_rank = self.pipelined
        places = [f"parameter {name}" for name in self.names.parameters] + [n for n, _ in self.whole.named_modules()]
        order = {place: index for index, place in enumerate(places)}

        def gather(own: str) -> list[str]:  # in the order of the layers, not of the ranks
            return sorted(self.ranks.gather(own, str), key=lambda place: order.get(place, len(order)))

        with self.precision():
            return first_non_finite(
                self.model, lambda: of_rank.forward([t.to(self.device) for t in micro_batches]), gather
            )

    def _discard_from(self, step: Launched) -> None:
        """Return to the state before a step that changed nothing, and after which the device has changed nothing."""
        self.steps_done, self.tokens = step.number - 1, step.tokens_so_far - step.tokens
        self._unread.clear()
        self._results.clear()
        self._set_skips()

    def _set_skips(self) -> None:
        """Let the device count skipped steps from what the host knows."""
        self._in_a_row.fill_(self.skipped_in_a_row)
        self._halted.fill_(False)

    def _check_read(self, what: str) -> None:
        if self._unread:
            raise RuntimeError(f"{what} needs every launched step read, but {len(self._unread)} are not: call read()")

    def _update(self, learning_rate: float | Tensor, result: Computed) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        factor = clip_factor(result.values[self._n_losses], self.config.optim.clip)
        self.optimizer.step(skip=result.skip, gradient_scale=factor)
        if self.shards:
            if not self._reads_late:  # otherwise during the next forward pass
                self.shards.gather_weights()
            self.shards.drop_gradients()
        end_step(self.model, result.skip)
        speed = torch.where(result.skip, 0.0, self.balance_speed())
        for name, moe in self.moes.items():
            moe.gate.balance(result.load[name], speed)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state on which later steps depend: tensors, of which a rank has its rows, and values for JSON.

        Raises:
            RuntimeError: steps were launched and not read.
        """
        self._check_read("state")
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{self.layout.number(index)}.{name}": t for name, t in moments.items()}
        tensors |= {f"history.{name}": m.amax_OH for name, m in amax_histories(self.model).items()}
        if self.ema:
            tensors |= {f"ema.{name}": t for name, t in self.ema.state_dict().items()}
        state = {  # the fields of `TrainerState`
            "steps_done": self.steps_done,
            "tokens": self.tokens,
            "data": self.data,
            "seconds": self.seconds,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
            "skipped": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "keeps_activations": self.keeps_activations,
        }
        return tensors, state

    def check_copies(self) -> None:
        """Compare the copies of parameters that two ranks of a pipeline have, before one of them is saved.

        Raises:
            RuntimeError: copies differ; on all ranks of a pipeline.
        """
        if self.pipelined and self.shards:
            self.ranks.begin("comparison of the copies")
            self.pipelined.check_copies(dict(self.shards.parts.named_parameters()))

    def whole_model(self) -> DeepseekV3:
        """The model with the experts and layers of all ranks, on rank 0; this rank's model on the others.

        All ranks must call this. If experts are spread or layers are those of stages, it is one in CPU memory, since it
        may not fit on a device; the memory of captured steps is released.
        """
        if self.shards is None or self.config.parallel.ep == self.config.parallel.pp == 1:
            return self.model
        if self.captured is not None:
            self.captured.release()
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"history.{name}": history.amax_OH for name, history in amax_histories(self.model).items()}
        tensors = {name: t.cpu() for name, t in self.layout.whole(tensors).items()}
        scales = self.ranks.gather(self.model.stored_scales, dict[str, Tensor])
        if not self.ranks.is_first:
            return self.model
        model = meta_model(self.config.model)  # which keeps the collected tensors instead of a second copy
        with torch.device("meta"):
            apply_recipe(model, self.recipe)
        of_model = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        model.load_state_dict(of_model, assign=True)
        model.stored_scales = {name: scale for of_rank in scales for name, scale in of_rank.items()}
        for name, history in amax_histories(model).items():
            history.amax_OH = tensors[f"history.{name}"]
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:  # the loads of experts, which are no part of the state
                    setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        return model

    def free_all_but_weights(self) -> None:
        """Free captured steps, gradients and moments, after the last step: no other may follow, and no checkpoint."""
        if self.captured is not None:
            self.captured.release()
        if self.shards is not None:
            self.shards.drop_gradients()
        self.model.zero_grad(set_to_none=True)
        self.optimizer.state.clear()

    def _apply_recipe(self) -> None:
        """Apply the recipe to the layers of this rank. Its exceptions need a layer in the whole model."""
        if self.model is self.whole:
            apply_recipe(self.model, self.recipe)
            return
        apply_recipe(self.whole, self.recipe)
        converted = set(ModelNames.of(self.whole).converted) & {name for name, _ in self.model.named_modules()}
        exceptions = [e for e in self.recipe.exceptions if any(fnmatchcase(name, e[0]) for name in converted)]
        apply_recipe(self.model, replace(self.recipe, exceptions=tuple(exceptions)))
        self.model.conversion_summary = self.whole.conversion_summary

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore the result of `state`, or of `layout.own_rows`. What a run adds to it, such as its best model, is not
        read.

        Raises:
            RuntimeError: steps were launched and not read.
            ValueError: it belongs to a model of another shape, was trained on other tokens, or a value of `state` is
                missing, of another type, or out of range.
        """
        self._check_read("load")
        if self.captured is not None:
            self.captured.release()  # its graphs write the moments that are replaced here
        found = TrainerState.read(state)
        if self.loss_scale and found.loss_scale is None:
            raise ValueError(f"state.loss_scale is missing, which the recipe {self.recipe.name} needs")
        if found.data not in (None, self.data):
            raise ValueError(f"the tokens in {self.data_folder} are not those that the checkpoint was trained on")
        if found.keeps_activations not in (None, self.keeps_activations):
            self.keeps_activations = found.keeps_activations
            self.recipe = self._recipes[found.keeps_activations]
            self._apply_recipe()
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "history": {}, "ema": {}, "best": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        _load_exactly(self.model, parts["model"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            index, _, key = name.partition(".")
            moments.setdefault(self.layout.own_number(int(index)), {})[key] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        for name, history in amax_histories(self.model).items():
            history.amax_OH.copy_(parts["history"][name])
        if self.ema:
            self.ema.load_state_dict(parts["ema"])
        if self.loss_scale and found.loss_scale:
            self.loss_scale.load_state_dict(asdict(found.loss_scale))
        self.steps_done, self.tokens, self.seconds = found.steps_done, found.tokens, found.seconds
        self.skipped, self.skipped_in_a_row = found.skipped, found.skipped_in_a_row
        self._set_skips()


def schedule(config: TrainConfig) -> WarmupConstantCosine:
    """The learning rate schedule of a run: warm-up, constant, cosine, and the two constant parts of the tail."""
    optim = config.optim
    shares = (optim.warmup, optim.decay, optim.tail, optim.last_tail)
    warmup, decay, tail, last_tail = (round(config.steps * share) for share in shares)
    return WarmupConstantCosine(
        peak=optim.lr,
        warmup_steps=warmup,
        constant_steps=max(config.steps - warmup - decay - tail - last_tail, 0),
        decay_steps=decay,
        floor=optim.lr * optim.final_lr,
        floor_steps=tail if optim.last_tail else None,
        last=optim.lr * optim.last_lr if optim.last_tail else 0.0,
    )


def batch_ramp(config: TrainConfig) -> BatchRamp:
    """The sequences of each step of a run."""
    initial = config.batch_size if config.initial_batch_size is None else config.initial_batch_size
    return BatchRamp(initial, config.batch_size, round(config.steps * config.batch_ramp))


def _load_exactly(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    own = model.state_dict()
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ValueError(f"the checkpoint {'lacks' if name in own else 'has in excess'} the tensor {name}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)} in the checkpoint but {tuple(own[name].shape)} here")
    model.load_state_dict(tensors)
