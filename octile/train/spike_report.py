"""What a run writes down when its loss jumps: `octile.report.run.spikes` says when."""

from __future__ import annotations

from octile.report.run.spikes import Spike, Spikes
from octile.train.run_folder import Metrics, MetricsWriter, RunFolder, read_lines
from octile.train.token_losses import token_losses
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer

TEXT = 80  # characters of the hardest sequence that are kept


def spikes_so_far(run: RunFolder) -> Spikes:
    """What a run that is resumed knows of its losses."""
    spikes = Spikes()
    for line in read_lines(run.metrics_file) if run.metrics_file.exists() else []:
        if line.get("main_loss") is not None:
            spikes.look(line["step"], line["main_loss"])
    return spikes


def write_spike(spike: Spike, trainer: Trainer, store: TokenStore, metrics: MetricsWriter, line: Metrics) -> str:
    """Records the step with which a spike begins, and says which of its sequences is hardest by the weights after it.

    The record in metrics.jsonl is {"step", "spike": {"loss", "usual", "scatter", "grad_norm", "sequence_losses",
    "worst_text"}}. Looking changes nothing that a later step depends on.
    """
    tokens_BS = trainer.batches.batch(spike.step - 1)
    losses_B = token_losses(trainer, tokens_BS).mean(1)
    worst = int(losses_B.argmax())
    text = " ".join(store.tokenizer.decode(tokens_BS[worst].tolist()).split())[:TEXT]
    record = {
        "loss": spike.loss,
        "usual": spike.usual,
        "scatter": spike.scatter,
        "grad_norm": line["grad_norm"],
        "sequence_losses": losses_B.tolist(),
        "worst_text": text,
    }
    metrics.write({"step": spike.step, "spike": record})
    return (
        f"{spike}; its gradient norm was {line['grad_norm']:.3g}; sequence {worst + 1} of {len(losses_B)} has the "
        f"largest loss now, {losses_B[worst]:.3f} (their median is {losses_B.median():.3f}): {text!r}"
    )
