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
    evaluation.py   the statistics and the terminal output of `octile eval`
    machine.py      the machine, versions and commit of a measurement
    conversion.py   the terminal output of `octile convert`
    roofline.py     the roofline figure of `octile bench gemm`
    schedule.py     the figure of a pipeline schedule
"""

from typing import TYPE_CHECKING

from octile.lazy import attach

if TYPE_CHECKING:
    from octile.report.compare.file import read_result
    from octile.report.compare.page import save_compare_figure, write_compare_report
    from octile.report.compare.result import CompareResult, Curve
    from octile.report.compare.summary import verdict_sentence
    from octile.report.compare.tables import format_compare_table, format_details_table
    from octile.report.run.page import save_figure, write_run_report

__getattr__, __dir__, __all__ = attach(
    __name__,
    {  # `octile.report.page` needs no torch
        "compare.file": ("read_result",),
        "compare.page": ("save_compare_figure", "write_compare_report"),
        "compare.result": ("CompareResult", "Curve"),
        "compare.summary": ("verdict_sentence",),
        "compare.tables": ("format_compare_table", "format_details_table"),
        "run.page": ("save_figure", "write_run_report"),
    },
)
