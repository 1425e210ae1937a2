"""Tests of the rows of a benchmark and their JSON file."""

import json
from importlib import import_module

import pytest

from octile import bench
from octile.bench.rows import Row, compare, table, table_with, write

ROWS = [Row("a", "b", 1.0, "s"), compare("a long case", "c", 23456.0, "tokens/s", "p", 4.0)]


def test_a_ratio_is_ours_over_the_peers():
    assert compare("case", "what", 3.0, "TFLOP/s", "peer", 2.0).against.ratio == 1.5


def test_the_file_has_the_rows_and_what_they_were_measured_on(tmp_path):
    write(tmp_path / "rows.json", ROWS, {"cpu": "fast"})
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["rows"][0] == {"case": "a", "what": "b", "value": 1.0, "unit": "s", "against": None}
    assert content["rows"][1]["against"] == {"peer": "p", "value": 4.0, "ratio": 5864.0}
    assert content["machine"] == {"cpu": "fast"}


def test_a_row_is_one_aligned_line():
    assert table(ROWS).splitlines() == [
        "case         what   value  unit      vs.  its value     ratio",
        "a            b          1  s",
        "a long case  c     23,456  tokens/s  p            4  5864.000",
    ]


def test_rows_without_a_peer_have_no_columns_for_one():
    assert table(ROWS[:1]).splitlines() == ["case  what  value  unit", "a     b         1  s"]


def test_the_legend_of_ratios_stands_below_rows_that_have_one():
    assert table_with("ratio: …", ROWS) == f"{table(ROWS)}\n\nratio: …"
    assert table_with("ratio: …", ROWS[:1]) == table(ROWS[:1])


@pytest.mark.parametrize("name", ["attention", "sparse"])
def test_no_legend_explains_a_column_that_is_empty(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "ratio:" not in import_module(f"octile.bench.{name}").show(ROWS[:1])


def test_a_narrow_screen_breaks_no_row(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr("octile.bench.casts.rows", lambda: ROWS)
    bench.run("casts")
    assert table(ROWS) in capsys.readouterr().out


def test_a_narrow_terminal_splits_no_word_below_the_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("octile.report.console.Console.is_terminal", True)
    monkeypatch.setattr("octile.bench.casts.rows", lambda: ROWS)
    goal = "quantization that writes once: geometric mean 0.912, floor 0.80 met"
    monkeypatch.setattr("octile.bench.casts.show", lambda rows: goal)
    bench.run("casts")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) <= 40 for line in lines)
    assert lines[-2:] == ["quantization that writes once: geometric", "mean 0.912, floor 0.80 met"]


def test_rows_measured_before_an_interruption_are_written(tmp_path, monkeypatch, capsys):
    def rows():
        yield ROWS[0]
        raise KeyboardInterrupt

    monkeypatch.setattr("octile.bench.casts.rows", rows)
    with pytest.raises(KeyboardInterrupt):
        bench.run("casts", tmp_path / "rows.json")
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1


@pytest.mark.parametrize("shape", ["1,2", "1,2,3,4", "a,2,3", "-1,2,3", "1;2;3"])
def test_an_invalid_shape_is_refused(shape):
    with pytest.raises(ValueError, match="shape must be M,N,K"):
        bench.search(shape, None)


@pytest.mark.parametrize("what", ["gemm", "step"])
def test_a_folder_as_file_is_refused_before_anything_is_measured(tmp_path, monkeypatch, what):
    monkeypatch.setattr(f"octile.bench.{what}.rows", lambda: pytest.fail("it was measured"))
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        bench.run(what, tmp_path)


def test_a_missing_folder_is_reported_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("octile.bench.gemm.rows", lambda: pytest.fail("it was measured"))
    with pytest.raises(FileNotFoundError, match="json must be in a folder that exists"):
        bench.run("gemm", tmp_path / "none" / "rows.json")


def test_a_narrow_terminal_gets_a_list_whose_numbers_are_whole(monkeypatch):
    monkeypatch.setattr("octile.bench.rows.fits_terminal", lambda text: False)
    assert table(ROWS).splitlines()[:3] == ["a", "  what       b", "  value      1"]
    assert "  value      23,456" in table(ROWS)
