"""The terminal output of `octile convert`: progress, and which tensors were converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from octile.checkpoint.convert import ConversionReport, convert_checkpoint
from octile.checkpoint.convert.share import Share
from octile.checkpoint.convert.size import SizePrediction, predict_size
from octile.checkpoint.convert.tensor import Target
from octile.checkpoint.files import CONFIG
from octile.checkpoint.shards import check_no_adapter
from octile.command_text import how_to_download, quoted_path
from octile.report.console import Console
from octile.text import format_bytes


def run_conversion(src: Path, dst: Path | None, to: Target, keep: Sequence[str] = ()) -> None:
    """Convert a checkpoint and print what was converted, or predict its size.

    Args:
        src: a Hugging Face folder or a run.
        dst: the folder to write; None predicts the size only.
        to: the format of the weights.
        keep: patterns of the layers that stay in high precision, as for `convert_checkpoint`.

    Raises:
        FileNotFoundError: src does not exist, or is a folder without a config.json.
        ValueError: src is a weight file, a LoRA adapter, or a run's config.json.
        Exception: what `convert_checkpoint` and `predict_size` raise.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console()
    src = src / "model" if (src / "model" / CONFIG).exists() else src  # src is a run
    if dst is None:
        _check_configuration(src)
        _show_prediction(console, predict_size(src, to, keep))
        return
    sizes, time = (Column(no_wrap=True, min_width=len(widest)) for widest in ("999.9/999.9 GB", "0:00:00"))
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(table_column=sizes),
        TimeRemainingColumn(table_column=time),
        console=console,
    )
    task = bar.add_task("reading", total=None)

    def show(done: int, total: int, file: str) -> None:
        bar.update(task, completed=done // 2, total=total // 2, description=file)  # they are converted and read back
        bar.start()  # with the first file, so that nothing is printed before a refusal

    try:
        report = convert_checkpoint(src, dst, to, show, keep)
    finally:
        if bar.live.is_started:
            bar.stop()
    _show_report(console, report)
    console.print_line(f"written to {dst}")


def _check_configuration(src: Path) -> None:
    """Refuse what has no configuration of a model.

    Raises:
        FileNotFoundError, ValueError: as for `run_conversion`.
    """
    needed = f"src must be a folder with {CONFIG}, or that file"
    if not src.exists():
        raise FileNotFoundError(f"{needed}: {src} does not exist{how_to_download(src)}")
    check_no_adapter(src)
    if src.is_dir() and not (src / CONFIG).exists():
        raise FileNotFoundError(f"{needed}: {src} has no {CONFIG}")
    if src.is_file() and src.suffix != ".json":
        raise ValueError(f"{needed}, not the file {src}")
    run = src if src.is_dir() else src.parent
    if (src == run or src.name == CONFIG) and (run / "metrics.jsonl").exists():
        if (run / "model" / CONFIG).exists():
            what = f"octile convert {quoted_path(run)} predicts the size of the run's model"
        elif (run / "summary.json").exists():  # of a run that has finished
            what = f"the run is damaged: {run / 'model' / CONFIG} is missing"
        else:
            what = "the run has no model yet"
        raise ValueError(f"src must be the configuration of a model, not of a run: {what}")


def _show_prediction(console: Console, size: SizePrediction) -> None:
    stored = f"{_amount(size.share.parameters)} parameters stored, {format_bytes(size.nbytes)} as {size.to}"
    why = " (a multi-token prediction layer repeats the embedding and the head)" if size.repeats else ""
    console.print_line(stored + why)
    console.print_line(_share(size.share))
    _show_warnings(console, size.warnings)


def _show_report(console: Console, report: ConversionReport) -> None:
    from octile.report.table import ScreenTable

    title = report.rule if report.to == "fp8" else f"FP8 weights become {'BF16' if report.to == 'bf16' else 'FP32'}"
    table = ScreenTable(title=title, title_justify="left")
    table.add_column("weights")
    table.add_column("tensors", justify="right")
    table.add_column("result")
    for names, what in ((report.converted, report.to), (report.cast, "bf16"), (report.unchanged, "unchanged")):
        for name, count in names.items():
            table.add_row(name, str(count), what)
    console.print(table)
    before, after = format_bytes(report.bytes_before), format_bytes(report.bytes_after)
    tense = "" if report.to == "fp8" else "was "
    console.print_line(f"{before} → {after}; {tense}{_share(report.share)}")
    console.print_line(f"checked: every value lies within {report.max_error:.2%} of its block's range")
    if report.cast:
        was = "the checkpoint was FP32: what is not FP8" if report.to == "fp8" else "what was FP16"
        console.print_line(f"{was}, and the dtype in config.json, became BF16")
    if report.not_copied:
        console.print_line(_not_copied(report.not_copied))
    if report.resumed_files:
        console.print_line(f"{report.resumed_files} of {report.files} files were finished before")
    _show_warnings(console, report.warnings)


def _not_copied(sizes: Mapping[str, int]) -> str:
    *first, last = sizes if len(sizes) <= 3 else (*list(sizes)[:2], f"{len(sizes) - 2} other weight files")
    names = f"{', '.join(first)} and {last}" if first else last
    return f"not copied: {names} ({format_bytes(sum(sizes.values()))})"


def _show_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print_line(f"warning: {warning}")


def _amount(parameters: int) -> str:
    return f"{parameters / 1e9:,.1f}B" if parameters >= 1e8 else f"{parameters / 1e6:,.1f}M"


def _share(share: Share) -> str:
    flops = "unknown" if share.flops is None else f"{share.flops:.1%}"
    return f"FP8: {share.parameter_share:.1%} of the parameters, {flops} of a token's matrix products"
