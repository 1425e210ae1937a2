"""Pictures and pages: what `train` and `compare` draw.

A page is one file that opens anywhere: figures are inline SVG whose colours follow the reader's light or dark setting,
and nothing is fetched from a network. Every figure carries one sentence, written from the data, that says what to see.

    metrics.py      a run folder read back, whatever state it is in
    figures.py      the drawing style: colours, axes, direct labels
    svg.py          a figure as part of a page
    page.py         templates, numbers as a person writes them
    machine.py      what figures were measured on: hardware, versions, commit, date
    run_curves.py   loss, learning rate, gradient norm, throughput of one run
    run_inside.py   its experts' load and its tiles' scales
    train.py        its page
    compare.py      recipes beside BF16: the figures' meaning, the page, the table; drawn by compare_figure.py
"""

from octile.report.compare import (
    CompareResult,
    Curve,
    format_compare_table,
    save_compare_figure,
    verdict_sentence,
    write_compare_report,
)
from octile.report.train import save_figure, write_run_report

__all__ = [
    "CompareResult",
    "Curve",
    "format_compare_table",
    "save_compare_figure",
    "save_figure",
    "verdict_sentence",
    "write_compare_report",
    "write_run_report",
]
