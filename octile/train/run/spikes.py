"""Spikes of the loss during a run: found, recorded, and described with the sequence that has the largest loss."""

from __future__ import annotations

from octile.report.run.lines import Record
from octile.report.run.spikes import Spike, SpikeDetector
from octile.train.data.packed_tokens import tokens_of
from octile.train.data.token_store import TokenStore
from octile.train.run.folder import RunFolder
from octile.train.run.metrics import MetricsWriter, read_lines
from octile.train.trainer import Trainer

MAX_SPIKE_TEXT = 80  # characters of the hardest sequence in a spike's record


def spikes_so_far(run: RunFolder) -> SpikeDetector:
    """A spike detector that has seen the losses of a run to resume."""
    detector = SpikeDetector()
    for line in read_lines(run.metrics_file):
        if line.get("main_loss") is not None:
            detector.update(line["step"], line["main_loss"])
    return detector


def write_spike(spike: Spike, trainer: Trainer, store: TokenStore, metrics: MetricsWriter, line: Record) -> str:
    """Record the first step of a loss spike, and describe it with the sequence that has the largest loss.

    The record in metrics.jsonl is {"step", "spike": {"loss", "usual", "scatter", "grad_norm", "sequence_losses",
    "worst_text", "measured_after"}}. The losses of the sequences are measured with the weights after the step
    `measured_after`. On a CPU that is the spike's first step. On a GPU up to 2 · COLLECT_EVERY − 1 steps follow it
    before its loss is collected. Measuring changes nothing that a later step depends on.

    Args:
        spike: the spike, which has just begun.
        trainer: the run, after the spike's first step or a later one.
        store: the run's tokens.
        metrics: where the record goes.
        line: the metrics of the step.
    """
    tokens_BS = trainer.batches.batch(spike.step - 1)
    losses_B = trainer.evaluator.sequence_losses(tokens_BS)
    worst = int(losses_B.argmax())
    text = " ".join(store.tokenizer.decode(tokens_of(tokens_BS)[worst].tolist()).split())[:MAX_SPIKE_TEXT]
    record = {
        "loss": spike.loss,
        "usual": spike.usual,
        "scatter": spike.scatter,
        "grad_norm": line["grad_norm"],
        "sequence_losses": losses_B.tolist(),
        "worst_text": text,
        "measured_after": trainer.steps_done,
    }
    metrics.write({"step": spike.step, "spike": record})
    return (
        f"{spike}; the gradient norm was {line['grad_norm']:.3g}; sequence {worst + 1} of {len(losses_B)} has the "
        f"largest loss now, {losses_B[worst]:.3f} (the median is {losses_B.median():.3f}): {text!r}"
    )
