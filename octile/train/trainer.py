"""The trainer: model, optimizer and data of a run, its steps, its evaluator, and the state for a checkpoint.

A step depends only on the state and the step's number, so that a run that is saved, killed and loaded continues with
the same bits.

Launching a step and collecting its result are separate, so that a GPU never waits for the host:

    launch      the host launches a step's kernels; the device decides whether its update is skipped
    collect     the host waits for launched steps, and returns their metrics in order
    advance     launch, and collect the COLLECT_EVERY oldest steps when twice as many are launched
    step        launch and collect one step

The parts of a trainer:

    strategy    this rank's model, and how the ranks share it (`octile.train.strategy`)
    passes      forward and backward passes of that model
    progress    the number of steps, and what the next one takes from the configuration
    skips       which steps are skipped, and when the run must stop
    captured    the step as CUDA graphs; None on a CPU
    evaluator   measurements on held-out text
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octile.models.flops import bf16_peak, train_flops_per_token
from octile.optim import EMA, DynamicLossScale
from octile.parallel.ranks import Ranks
from octile.recipe import Recipe
from octile.report.run.lines import Record
from octile.train.compute import StepComputation
from octile.train.config import TrainConfig
from octile.train.data.batches import Batches, PreparedBatches, validation_windows
from octile.train.data.token_store import TokenStore
from octile.train.evaluation.evaluator import Evaluator
from octile.train.model import run_recipe
from octile.train.optimizer import make_optimizer
from octile.train.state import TrainingState
from octile.train.step.captured import CapturedStep
from octile.train.step.launched import COLLECT_EVERY, Launched, LaunchedSteps
from octile.train.step.passes import Passes
from octile.train.step.progress import Progress, batch_ramp
from octile.train.step.skips import Skips
from octile.train.strategy.make import make_strategy

AHEAD = COLLECT_EVERY  # batches that a thread prepares for a GPU; a CPU has no core to spare, and no memory


class Trainer:
    """A model, its optimizer and its data.

    Args:
        config: the configuration of the run; its seed determines the order of the data and, without `init_from`, the
            initial weights.
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
        recipe = run_recipe(self.config, recipe)
        self.strategy = make_strategy(self.config, device, recipe, self.ranks)
        self.model, optim, on_gpu = self.strategy.model, config.optim, device.type == "cuda"
        self.optimizer = make_optimizer(self.model, self.strategy.updated, optim, recipe.optimizer)
        self.loss_scale = DynamicLossScale() if recipe.loss_scale else None
        self.ema = EMA(self.strategy.updated, optim.ema_decay, self.optimizer) if optim.ema_decay else None
        self.progress = Progress(self.config)
        statistics = store.manifest.text_statistics
        self.passes = Passes(self.model, device, recipe.compute, self.progress, self.loss_scale, statistics)
        self.batches = Batches(store.train, batch_ramp(config), config.sequence_length - 1, config.seed, pin=on_gpu)
        self._prepared = PreparedBatches(self._own_batch, AHEAD if on_gpu else 0)
        self.skips = Skips(config.skip_limit, self.strategy.names.parameters, device)
        self._state = TrainingState(
            self.strategy, self.optimizer, self.ema, self.loss_scale, self.progress, self.skips, store
        )
        self._computation = StepComputation(
            self.strategy, self.passes, self.progress, self.optimizer, self.skips, self.loss_scale, optim.clip
        )
        self.captured = None
        if on_gpu:
            compute, update = self._computation.compute, self._computation.update
            self.captured = CapturedStep(self.model, compute, update, device, self.strategy.gathers_weights)
        held_out = validation_windows(store.val, config.sequence_length - 1, config.val_sequences)
        self.evaluator = Evaluator(
            self.strategy, self.passes, self.progress, self.optimizer, self.ema, held_out, self.release_captured
        )
        self.last_load = self.strategy.no_load()  # the tokens of each expert of each mixture in the last step
        self._launched = LaunchedSteps(self._computation.width, device, self.ranks.timeout.total_seconds())
        length = config.sequence_length if statistics is None else store.manifest.mean_train_length
        self._flops_per_token = train_flops_per_token(self.config.model, length)
        self._peak = bf16_peak(torch.cuda.get_device_name(device)) if on_gpu else None

    @property
    def steps_done(self) -> int:
        """The steps that were launched and not discarded."""
        return self.progress.steps_done

    def step(self) -> Record:
        """Run one optimizer step and return its metrics. The host waits for the device.

        If a gradient is not finite, the step is skipped: weights, moments, biases of gates and the moving average do
        not change. `skipped` counts these steps, and the metrics contain the reason as `skipped_for`.

        Raises:
            FloatingPointError: the loss is NaN or Inf, or a gradient is and the `skip_limit` steps before were skipped.
                The weights are those before the step.
            RuntimeError: steps were launched and not collected.
        """
        self._launched.check_none("step")
        lines: list[Record] = []
        while not lines:  # a step whose rows were more than the capacity is launched again
            self.launch()
            lines = list(self.collect())
        return lines[0]

    def advance(self) -> Iterator[Record]:
        """Launch a step, and return the metrics of the steps whose turn it is to be collected, in order.

        Without a CUDA graph that is the step itself. With one it is none, or the COLLECT_EVERY oldest while as many are
        in flight, so that the device has work while the host waits and writes. `steps_done` is less afterwards if the
        host finds that a step must be launched again.

        Raises:
            FloatingPointError: see `collect`.
        """
        self.launch()
        if not self._computation.is_ahead:
            return self.collect()
        return self.collect(COLLECT_EVERY if self._launched.is_full else len(self._launched))

    def launch(self) -> None:
        """Launch one optimizer step. On a GPU the host does not wait for it if steps can be captured (`why_eager`).

        Raises:
            RuntimeError: 2 · COLLECT_EVERY steps are not collected yet.
        """
        progress, computation = self.progress, self._computation
        self._launched.begin()
        tokens_BS = self._prepared.batch(progress.steps_done)
        computation.sequences = progress.batch_size()
        tokens = computation.sequences * tokens_BS.shape[1]
        self.ranks.at(f"step {progress.steps_done + 1}")
        learning_rate = progress.learning_rate()
        computation.is_ahead = self.strategy.why_eager() is None
        if not computation.is_ahead:
            self.gather_weights()  # unless each forward pass gathers those of the step before
        captured = self.captured if computation.is_ahead else None
        scale = self.loss_scale.value if self.loss_scale else None
        if captured is None:
            result = computation.compute(tokens_BS)
        else:
            constants = progress.mtp_loss_weight(), progress.balance_speed(), computation.sequences
            result = captured.compute(tokens_BS, constants)
        if self.ema:
            self.ema.wait_for_copies()
        (captured.update if captured else computation.update)(learning_rate, result)
        self.strategy.is_gathered = not computation.is_ahead
        if self.ema:
            self.ema.update(result.skip)
        if self.loss_scale:
            self.loss_scale.update()
        self.last_load = result.load

        scheduled = progress.scheduled()
        progress.steps_done += 1
        progress.tokens += tokens
        overflowed = scale if result.overflowed else None
        numbers = (progress.steps_done, learning_rate, tokens, progress.tokens)
        self._launched.append(Launched(*numbers, scheduled, overflowed), result.values)

    def collect(self, leave: int = 0) -> Iterator[Record]:
        """Wait for launched steps and yield their metrics, the oldest first; `leave` of the newest stay launched.

        From a step on whose rows were more than the capacity, all are discarded, and are to be launched again; their
        time counts as that of the next step.

        Raises:
            FloatingPointError: the loss is NaN or Inf, or a gradient is and the `skip_limit` steps before were skipped.
                Raised after the metrics of the steps before. Weights, `steps_done` and `tokens` are those before the
                step; steps that were launched after it are discarded.
        """
        if len(self._launched) <= leave:
            return
        self.ranks.begin(f"results of step {self._launched.oldest.number}")
        self._prepared.prepare()  # while the host waits
        collected = self._launched.collect(len(self._launched) - leave)
        clock = self._launched.clock
        if not leave:
            self.gather_weights()
            clock.mark()
        lines: list[Record] = []
        failure: FloatingPointError | None = None
        for step, (*losses, grad_norm, last_broken, stopping, too_many_rows) in collected:
            if stopping > 0:
                self.strategy.agree_to_stop()
            if too_many_rows:
                self._discard_from(step)
                clock.rewind()
                self.release_captured()
                self.strategy.grow_capacity(f"step {step.number}")
                self.gather_weights()
                break
            try:
                skipped_for = self._check(step, losses[0], grad_norm, int(last_broken))
            except FloatingPointError as error:
                failure = error
                break
            lines.append(self._line(step, losses, grad_norm, clock.lap(), skipped_for))
        yield from lines
        if failure is not None:
            raise failure

    def _check(self, step: Launched, loss: float, grad_norm: float, last_broken: int) -> str | None:
        """Return the reason for which a step was skipped, or None. Later steps are discarded if the run must stop.

        Raises:
            FloatingPointError: the loss is not finite, because all later losses would not be either; or too many steps
                in a row were skipped.
        """
        if not math.isfinite(loss):
            self._discard_from(step)
            where = self.evaluator.first_non_finite(self._own_batch(self.steps_done))
            raise FloatingPointError(
                f"the loss is {loss} at step {step.number}; the first non-finite value is in {where}"
            )
        try:
            return self.skips.check(step, grad_norm, last_broken)
        except FloatingPointError:
            self._discard_from(step)
            raise

    def _discard_from(self, step: Launched) -> None:
        """Return to the state before a step that changed nothing, and after which the device has changed nothing."""
        self.progress.steps_done, self.progress.tokens = step.number - 1, step.tokens_so_far - step.tokens
        self._launched.discard()
        self.skips.reset_device()

    def _line(
        self, step: Launched, losses: list[float], grad_norm: float, seconds: float, skipped_for: str | None
    ) -> Record:
        """The metrics of a step, with model FLOPs per second, and MFU if the GPU's peak is known."""
        self.progress.seconds += seconds
        loss, *parts = losses
        tokens_per_s = step.tokens / seconds
        flops_per_s = self._flops_per_token * tokens_per_s
        return {
            "step": step.number,
            "loss": loss,
            **{f"{name}_loss": part for name, part in zip(self.strategy.loss_parts, parts, strict=True)},
            "lr": step.learning_rate,
            "grad_norm": grad_norm,
            "tokens": step.tokens_so_far,
            "tokens_per_s": tokens_per_s,
            "flops_per_s": flops_per_s,
            **({} if self._peak is None else {"mfu": flops_per_s / (self.ranks.size * self._peak)}),
            "seconds": self.progress.seconds,
            "skipped": self.skips.total,
            **step.scheduled,
            **({"skipped_for": skipped_for} if skipped_for else {}),
        }

    def gather_weights(self) -> None:
        """Let every rank have the weights of all after the last launched step. All ranks must call this.

        They have them whenever every launched step is collected.
        """
        if not self.strategy.is_gathered:
            self.strategy.gather_weights()
            self.strategy.is_gathered = True

    def release_captured(self) -> None:
        """Free the memory of captured steps, if there are any; later steps are captured again."""
        if self.captured is not None:
            self.captured.release()

    def close(self) -> None:
        """End the thread that prepares batches. A later step prepares its own."""
        self._prepared.close()

    def _own_batch(self, step: int) -> Tensor:
        """The sequences of a step's batch that this rank computes."""
        return self.batches.batch(step, self.strategy.rank, self.strategy.size)

    def expert_load(self) -> dict[str, list[int]]:
        """The number of tokens that each expert of each layer received in the last step."""
        return {name: load_E.tolist() for name, load_E in self.last_load.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state on which later steps depend: tensors, of which a rank has its rows, and values for JSON.

        Raises:
            RuntimeError: steps were launched and not collected.
        """
        self._launched.check_none("state")
        return self._state.save()

    def load(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore the result of `state`, or of `StateLayout.own_rows` of `strategy.layout`.

        Raises:
            RuntimeError: steps were launched and not collected.
            ValueError: see `TrainingState.restore`.
        """
        self._launched.check_none("load")
        self.release_captured()  # its graphs write the moments that are replaced here
        self._state.restore(tensors, state)
