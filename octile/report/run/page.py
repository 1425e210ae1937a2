"""The page of one training run, RUN/report.html, and its figures as files."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octile.atomic_files import write_text
from octile.report.page import render
from octile.report.run import curves, experts_and_scales, telemetry
from octile.report.run.lines import Record
from octile.report.run.memorization import find_memorization
from octile.report.run.metrics import TELEMETRY_STATISTICS, Run, as_float, find, flatten, last_known, read_run
from octile.report.run.spikes import find_spikes
from octile.report.style import HALF, PHONE, THIRD, WIDE, save_drawing
from octile.report.svg import Chart, make_chart
from octile.text import escape_control_characters, format_count, format_duration, format_flops, format_quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RunFigure:
    """A figure of the run page, with its size in pixels.

    It is drawn for a run that recorded a finite value under one of `keys`, and for which `has_points` is true.
    """

    title: str
    keys: tuple[str, ...]
    draw: Callable[["Figure", Run], None]
    caption: Callable[[Run], str]
    width: int
    height: int
    has_points: Callable[[Run], bool] = lambda run: True

    def exists(self, run: Run) -> bool:
        """Whether the run recorded what the figure shows, so that the figure is not empty."""
        records = (*run.training, *run.validation, *run.experts, *run.tile_scales, *run.telemetry)
        values = (record[key] for record in records for key in self.keys if key in record)
        recorded = any(isinstance(value, dict) or math.isfinite(as_float(value)) for value in values)
        return recorded and self.has_points(run)


FIGURES = {
    "loss": RunFigure("Loss", ("loss", "val_loss"), curves.draw_loss, curves.caption_loss, WIDE, 340),
    "learning_rate": RunFigure(
        "Learning rate", ("lr",), curves.draw_learning_rate, curves.caption_learning_rate, THIRD, 220
    ),
    "schedule": RunFigure(
        "Scheduled values", tuple(curves.SCHEDULED), curves.draw_schedule, curves.caption_schedule, THIRD, 220
    ),
    "gradient": RunFigure(
        "Gradient norm",
        ("grad_norm",),
        curves.draw_gradient,
        curves.caption_gradient,
        THIRD,
        220,
        curves.has_gradient,
    ),
    "throughput": RunFigure(
        "Throughput", ("tokens_per_s",), curves.draw_throughput, curves.caption_throughput, THIRD, 220
    ),
    "expert_load": RunFigure(
        "Expert load",
        ("expert_load",),
        experts_and_scales.draw_load,
        experts_and_scales.caption_load,
        HALF,
        290,
        experts_and_scales.has_load,
    ),
    "imbalance": RunFigure(
        "Expert balance",
        ("expert_load",),
        experts_and_scales.draw_balance,
        experts_and_scales.caption_balance,
        HALF,
        290,
        experts_and_scales.has_load,
    ),
    "tile_scales": RunFigure(
        "Tile scales",
        ("tile_scales",),
        experts_and_scales.draw_scales,
        experts_and_scales.caption_scales,
        WIDE,
        230,
        experts_and_scales.has_scales,
    ),
    "telemetry": RunFigure(
        "FP8 errors",
        TELEMETRY_STATISTICS,
        telemetry.draw_telemetry,
        telemetry.caption_telemetry,
        WIDE,
        230,
        telemetry.has_telemetry,
    ),
}
NAMED_GEMMS = 4  # of those that guards switched; metrics.jsonl has all
PHONE_HEIGHT = {"loss": 300, "tile_scales": 420, "telemetry": 540}


def write_run_report(run: Path) -> Path:
    """Write RUN/report.html from what the run has recorded so far.

    Reads config.json and metrics.jsonl, and summary.json, sample.txt and telemetry.jsonl if they exist. A run that has
    just begun, was killed or was resumed is reported as far as it went. The same files always give the same page, byte
    for byte.

    Args:
        run: the run folder.

    Returns:
        The path of the page, a single file that needs no network.

    Raises:
        FileNotFoundError: the folder, its config.json or its metrics.jsonl is missing.
        ValueError: config.json or summary.json is not a JSON object.
    """
    records = read_run(run)
    page = render(
        "run.html.jinja",
        title=f"{records.fact('preset') or 'run'} · {_recipe(records)}",
        lead=_lead(records),
        origin=_origin(records),
        facts=_facts(records),
        notices=_notices(records),
        charts={name: _chart(name, figure, records) for name, figure in FIGURES.items() if figure.exists(records)},
        worst_gemms=telemetry.worst_gemms(records),
        sample=_sample(records),
        configuration=flatten(records.config),
    )
    path = Path(run) / "report.html"
    write_text(path, page)
    return path


def save_figure(run: Path, name: str, path: Path) -> Path:
    """Write one figure of a run as a file, PNG (twice the pixels, for sharp screens) or SVG by the suffix of `path`.

    Args:
        run: the run folder.
        name: one of "loss", "learning_rate", "schedule", "gradient", "expert_load", "imbalance", "tile_scales",
            "throughput", "telemetry".
        path: where to write; ends in .png or .svg.

    Raises:
        FileNotFoundError: the folder, its config.json or its metrics.jsonl is missing.
        ValueError: there is no figure of that name, the run has not recorded its data, or the suffix is another.
    """
    if name not in FIGURES:
        raise ValueError(f"name must be one of {', '.join(FIGURES)}, not {name!r}")
    records, figure = read_run(run), FIGURES[name]
    if not figure.exists(records):
        raise ValueError(f"run {run} has recorded no {' or '.join(figure.keys)}, which the figure {name!r} needs")
    return save_drawing(path, figure.width, figure.height, lambda canvas: figure.draw(canvas, records))


def _chart(name: str, figure: RunFigure, run: Run) -> Chart:
    narrow = (PHONE, PHONE_HEIGHT[name]) if name in PHONE_HEIGHT else None
    size = (figure.width, figure.height)
    return make_chart(figure.title, figure.caption(run), lambda canvas: figure.draw(canvas, run), size, narrow)


def _recipe(run: Run) -> str:
    recipe = run.fact("recipe")
    return str((recipe.get("name") if isinstance(recipe, dict) else recipe) or "unnamed")


def _lead(run: Run) -> str:
    parameters, active = run.fact("parameters"), run.fact("active_parameters")
    size = f" of {format_quantity(parameters)} parameters" if parameters else ""
    size += f", {format_quantity(active)} of them active per token with the embedding," if active else ""
    planned, done = as_float(find(run.config, "steps")), run.last_step
    steps = f"{done:,} of {planned:,.0f} steps" if done < planned else f"{done:,} step{'s' * (done != 1)}"
    machine = f" on {run.fact('machine')}" if run.fact("machine") else ""
    return (
        f"A language model with the architecture of DeepSeek-V3{size} trained with the recipe {_recipe(run)}"
        f" for {steps}{machine}."
    )


def _origin(run: Run) -> str:
    """Initial weights, data, date, version and command, as far as they are known: a run says all when it has ended."""
    found = run.summary.get("measured_on")
    by = found if isinstance(found, dict) else {}
    version = f" by octile {by['octile']}" if by.get("octile") else ""
    commit = f", commit {by['commit']}" if by.get("commit") else ""
    sentences = [
        f"Began with the weights of {run.config['init_from']}." if run.config.get("init_from") else "",
        f"Data: {run.config['data']}." if run.config.get("data") else "",
        f"Ended on {by['date']}{version}{commit}." if by.get("date") else "",
        f"Command: {run.summary['command']}" if run.summary.get("command") else "",
    ]
    return " ".join(filter(None, sentences))


def _facts(run: Run) -> list[tuple[str, str, str]]:
    """The key figures as (label, value, note), as far as they are known."""
    facts = []
    model_loss = as_float(run.summary.get("model_val_loss"))
    held_out = model_loss if math.isfinite(model_loss) else last_known(run.series("val_loss")[1])
    if math.isfinite(held_out):
        notes = ["nats per token"]
        if held_out < curves.MAX_LOSS_FOR_PERPLEXITY:
            notes.append(f"perplexity {math.exp(held_out):,.2f}")
        bytes_per_token = as_float(run.fact("bytes_per_token"))
        if math.isfinite(bytes_per_token):
            notes.append(f"{held_out / math.log(2) / bytes_per_token:.3f} bits per byte")
        if run.training and math.isfinite(run.initial_val_loss):
            notes.append(f"{run.initial_val_loss:.4f} before the first step")
        facts.append(("Held-out loss", f"{held_out:.4f}", " · ".join(notes)))
    else:
        facts.append(("Held-out loss", "–", "not measured yet"))
    steps_of_average, average = run.series("ema_val_loss")
    if np.isfinite(average).any():
        note = f"nats per token, of the weights averaged up to step {steps_of_average[np.isfinite(average)][-1]:,.0f}"
        facts.append(("Held-out loss, EMA", f"{last_known(average):.4f}", f"{note}: model_ema/"))
    indexers = run.series("indexer_loss")[1]
    if np.isfinite(indexers).any():
        facts.append(("Indexers' loss", f"{last_known(indexers):.4f}", f"nats, {indexers[0]:.4f} at first"))
    if run.fact("parameters"):
        active = run.fact("active_parameters")
        note = f"{format_quantity(active)} active per token with the embedding" if active else ""
        facts.append(("Parameters", format_quantity(run.fact("parameters")), note))
    tokens, speed = last_known(run.series("tokens")[1]), run.series("tokens_per_s")[1]
    if math.isfinite(tokens):
        steps = len(run.training)
        facts.append(("Tokens seen", format_quantity(tokens), f"in {steps:,} recorded step{'s' * (steps != 1)}"))
    share = as_float(run.fact("held_out_share"))
    if math.isfinite(share):
        facts.append(("Held out", f"{share:.1%}", f"of the text: {run.fact('held_out_text')}"))
    elif val_data := run.fact("val_data"):
        facts.append(("Held out", "all", f"of {val_data}: {run.fact('held_out_text')}"))
    if examples := run.fact("examples"):
        facts += _facts_of_examples(examples)
    if run.seconds:
        facts.append(("Time", format_duration(run.seconds), ""))
    if np.isfinite(speed).any():
        facts.append(("Speed", f"{np.nanmedian(speed):,.0f}", "tokens per second (median)"))
    flops, mfu = (run.series(name)[1] for name in ("flops_per_s", "mfu"))
    if np.isfinite(flops).any():
        known = f", {np.nanmedian(mfu):.1%} MFU" if np.isfinite(mfu).any() else ""
        facts.append(("Model FLOPs", format_flops(float(np.nanmedian(flops))), f"(median){known}"))
    return facts


def _facts_of_examples(examples: Record) -> list[tuple[str, str, str]]:
    """What became of the examples of a run; one of an earlier version does not know how many tokens they have."""
    left_out, padding = examples["left_out_without_a_loss"], examples["padding"]
    texts = examples["texts"] + left_out
    facts = [
        ("Truncated", f"{examples['truncated']:,}", f"of {texts:,} texts, to a sequence"),
        ("Left out", f"{left_out:,}", f"of {texts:,} texts, because no token has a loss"),
    ]
    if tokens := examples.get("tokens"):
        labels = examples["tokens_with_a_loss"]
        facts += [
            ("Tokens with a loss", f"{labels:,}", f"of {tokens:,} tokens to train on"),
            ("Padding", f"{padding / (tokens + padding):.1%}", f"{padding:,} tokens in the sequences to train on"),
        ]
    return facts


def _notices(run: Run) -> list[str]:
    """Warnings: why the run stopped, non-finite losses, skipped steps, guards, spikes, memorization, damaged lines."""
    notices = [f"Training stopped: {stop['stopped']}." for stop in run.stops if stop["step"] > run.last_step]
    if run.config.get("indexer_stage") == "warm_up":
        notices.append(
            "Only the indexers were trained, so the training loss, that of the model with dense attention, does not "
            "fall. The held-out loss is that of sparse attention."
        )
    if run.broken_steps:
        first, others = run.broken_steps[0], len(run.broken_steps) - 1
        more = f" and at {others:,} other step{'s' * (others > 1)}" if others else ""
        notices.append(f"The loss was not finite at step {first:,}{more}.")
    skipped = [r["step"] for r in run.training if r.get("skipped_for")]
    if skipped:
        steps = f"{len(skipped):,} step{'s' * (len(skipped) != 1)}"
        were = "was" if len(skipped) == 1 else "were"
        notices.append(f"{steps} {were} skipped because a gradient was not finite; the first was step {skipped[0]:,}.")
    notices += _guard_notices(run)
    spikes = find_spikes((r["step"], as_float(r.get("main_loss", r["loss"]))) for r in run.training)
    if spikes:
        more = f", and {len(spikes) - 1:,} more time{'s' * (len(spikes) > 2)}" if len(spikes) > 1 else ""
        text = f"{spikes[0]}{more}."
        notices.append(text[0].upper() + text[1:])
    last, initial = last_known(run.series("val_loss")[1]), run.initial_val_loss
    lowest = "the lowest held-out loss"
    if initial <= as_float(run.summary.get("model_val_loss")):
        lowest += " of its steps"
        notices.append(
            f"Training has not lowered the held-out loss: it was {initial:.4f} before the first step, and "
            f"{run.summary['model_val_loss']:.4f} in model/, {lowest}."
        )
    if (step := run.summary.get("model_step")) is not None and step != run.last_step:
        notices.append(
            f"model/ is the model after step {step:,}, which has {lowest}, "
            f"{run.summary['model_val_loss']:.4f}; after step {run.last_step:,} it was {last:.4f}."
        )
    if memorization := find_memorization(run):
        text = f"{memorization}."
        notices.append(text[0].upper() + text[1:])
    if patience := run.summary.get("stopped_after_validations"):
        notices.append(f"The run was stopped early: {patience:,} validations in a row found no lower held-out loss.")
    if not run.training:
        notices.append("No training step has been recorded yet.")
    if run.experts and not experts_and_scales.has_load(run):
        notices.append("No expert has received a token.")
    for file, count in run.unreadable_lines.items():
        if count:
            were = "was" if count == 1 else "were"
            notices.append(f"{format_count(count, 'line')} of {file} could not be read and {were} left out here.")
    return notices


def _guard_notices(run: Run) -> list[str]:
    """Which guards fired, and which GEMMs they switched to BF16, so that the recipe's name is not all of the truth."""
    fired = [(record["step"], guard) for record in run.guards for guard in record["guards"]]
    if not fired:
        return []
    step, first = fired[0]
    times = "once" if len(fired) == 1 else f"{len(fired):,} times"
    gemm = f"{first.get('product')} of {first.get('layer')}"
    notices = [f"Guards fired {times}, first at step {step:,}: {first.get('when')} in {gemm}."]
    switched: dict[str, int] = {}
    for step, guard in fired:
        if guard.get("then") == "bf16":
            switched.setdefault(f"{guard.get('product')} of {guard.get('layer')}", step + 1)
    if switched:
        named = [f"{gemm} from step {step:,} on" for gemm, step in list(switched.items())[:NAMED_GEMMS]]
        more = f", and {len(switched) - len(named):,} more" if len(switched) > len(named) else ""
        notices.append(f"Guards had these GEMMs computed in BF16: {', '.join(named)}{more}.")
    return notices


def _sample(run: Run) -> tuple[str, str] | None:
    """The generated text as (prompt, continuation); without a known prompt all of it is continuation."""
    if run.sample is None:
        return None
    prompt = str(run.fact("prompt") or "")
    if not run.sample.startswith(prompt):
        prompt = ""
    return escape_control_characters(prompt), escape_control_characters(run.sample[len(prompt) :])
