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
    lab_page.py     the pages of octile.lab; lab_formats.py, lab_real.py and lab_accumulate.py draw their figures
    comparison.py   recipes beside BF16: what the numbers mean; intervals.py, token_differences.py, gradients.py
    compare_file.py compare.json, written and read again
    compare.py      its page; compare_words.py, compare_tables.py, compare_figure.py and *_figures.py are parts of it
"""

from octile.report.compare.file import read_result
from octile.report.compare.page import save_compare_figure, write_compare_report
from octile.report.compare.result import CompareResult, Curve
from octile.report.compare.summary import verdict_sentence
from octile.report.compare.tables import format_compare_table, format_details_table
from octile.report.run.page import save_figure, write_run_report

__all__ = [
    "CompareResult",
    "Curve",
    "format_compare_table",
    "format_details_table",
    "read_result",
    "save_compare_figure",
    "save_figure",
    "verdict_sentence",
    "write_compare_report",
    "write_run_report",
]
