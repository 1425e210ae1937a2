"""Tests of the tables of the README and of the pages of results: they are those of the records."""

import re

import pytest

from tools import write_results as tool


@pytest.mark.parametrize("path", tool.PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_records(path):
    text = path.read_text(encoding="utf-8")
    assert text == tool.write(text), "call `python -m tools.write_results`"


def test_every_table_stands_in_one_page():
    pages = "".join(path.read_text(encoding="utf-8") for path in tool.PAGES)
    assert sorted(re.findall(r"<!-- table: (\w+) -->", pages)) == sorted(tool.TABLES)


@pytest.mark.parametrize("path", tool.PAGES, ids=lambda path: path.name)
def test_a_text_stands_before_every_table(path):
    before = re.findall(r"(\S.*)\s+<!-- table: \w+ -->", path.read_text(encoding="utf-8"))
    assert not [line for line in before if line.startswith(("<!--", "#"))]


def test_a_figure_that_differs_is_written_anew():
    text = "before\n<!-- table: interleaved_gemms -->\n\n| 128 rows | 6 | 9.999× |\n\n<!-- end -->\nafter"
    written = tool.write(text)
    assert "9.999" not in written
    assert "| 128 rows | 6 | 0.999× |" in written
    assert written.startswith("before\n<!-- table: interleaved_gemms -->\n\n| ")
    assert written.endswith(" |\n\n<!-- end -->\nafter")


def test_a_table_without_rows_in_its_page_is_filled():
    pages = ("<!-- table: gates -->\n<!-- end -->", "<!-- table: gates -->\n\n<!-- end -->")
    for text in pages:
        assert "256 experts" in tool.write(text)


def test_numbers_stand_to_the_right():
    rows = [["what", "value", "ratio"], ["a", "1,024", "0.9×"], ["b", "−2", "+3%"]]
    assert tool.format_table(rows).splitlines()[1] == "| --- | ---: | ---: |"


@pytest.mark.parametrize("case", ["no such case", "32768×64 of 6"])
def test_a_figure_that_is_not_one_row_of_the_record_is_refused(case):
    with pytest.raises(KeyError, match="rows have case"):
        tool.record("h200_casts").value(case, "gate")
