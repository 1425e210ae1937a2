"""Tests of tables for the terminal: where they are too wide they become lists, and no number is split."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from octile.report import table as tables
from octile.report.table import ScreenTable, as_list, fits_terminal

ROWS = [("model.layers.12.mlp.experts.down_proj", "21.25 dB", "1,234,567"), ("lm_head", "–", "7")]


def shown(width: int, rows=ROWS) -> str:
    console = Console(file=io.StringIO(), width=width)
    table = ScreenTable("layer", title="errors", box=None)
    table.add_column("signal to\nnoise", justify="right")
    table.add_column("values", justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return console.file.getvalue()


def test_a_table_that_fits_has_a_line_per_row():
    assert shown(80).splitlines()[-1].split() == ["lm_head", "–", "7"]


@given(width=st.integers(20, 100), number=st.integers(0, 10**12))
def test_no_number_is_split_or_cut_off(width, number):
    assert f"{number:,}" in shown(width, [*ROWS, ("head", f"{number:,}", "1")])


def test_a_long_name_is_broken_where_the_numbers_fit():
    assert not any("signal to noise" in line for line in shown(40).splitlines())


def test_a_table_that_does_not_fit_becomes_a_list():
    assert shown(30) == (
        "errors\nmodel.layers.12.mlp.experts.do\nwn_proj\n  signal to noise  21.25 dB\n  values           1,234,567\n\n"
        "lm_head\n  signal to noise  –\n  values           7\n"
    )


def test_lines_of_a_cell_are_one_line_of_a_list():
    assert "values           1  2\n" in shown(25, [("head", "3 dB", "1\n2"), ROWS[1]])


def test_empty_cells_of_a_list_are_left_out():
    assert as_list(["case", "µs", "peer"], [["x", "1.5", ""]]) == "x\n  µs    1.5"


@pytest.mark.parametrize(("is_terminal", "fits"), [(True, False), (False, True)])
def test_only_a_terminal_breaks_lines(monkeypatch, is_terminal, fits):
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: is_terminal, raising=False)
    assert fits_terminal("12345678901") == fits
