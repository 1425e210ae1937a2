"""Pages and figures: report.html of `octile train` and `octile compare`, and the parts that `octile.lab` shares.

A page is a single HTML file that needs no network. Its figures are inline SVG whose colors follow the reader's light or
dark setting. Every figure has a caption that is written from the data.

    run/            the page of one training run
    compare/        the page of a comparison of recipes with BF16
    rl.py           the page of a run of reinforcement learning
    page.py         templates of pages
    style.py        the style of figures: palette, axes, labels
    svg.py          figures as inline SVG
    console.py      the console on which commands print
    machine.py      the machine, versions and commit of a measurement
    conversion.py   the terminal output of `octile convert`
    roofline.py     the roofline figure of `octile bench gemm`
    schedule.py     the figure of a pipeline schedule
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octile.report.compare.file import read_result
    from octile.report.compare.page import save_compare_figure, write_compare_report
    from octile.report.compare.result import CompareResult, Curve
    from octile.report.compare.summary import verdict_sentence
    from octile.report.compare.tables import format_compare_table, format_details_table
    from octile.report.run.page import save_figure, write_run_report

_MODULES = {  # the public names of each module, late: `octile.report.page` needs no torch
    "compare.file": ("read_result",),
    "compare.page": ("save_compare_figure", "write_compare_report"),
    "compare.result": ("CompareResult", "Curve"),
    "compare.summary": ("verdict_sentence",),
    "compare.tables": ("format_compare_table", "format_details_table"),
    "run.page": ("save_figure", "write_run_report"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(f"octile.report.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'octile.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
