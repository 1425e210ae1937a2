import io

import pytest

from octile.report.console import Console


def printed(text, **options):
    console = Console(file=io.StringIO(), width=20, **options)
    console.print_line(text)
    return console.file.getvalue()


@pytest.mark.parametrize("text", ["runs/[old]/a.svg", "runs/[/old].svg", "5 [1/2] of 1e3"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_text_is_printed_as_given(text, is_terminal):
    assert printed(text, force_terminal=is_terminal, no_color=True) == f"{text}\n"


def test_a_terminal_does_not_split_a_number():
    text = "a step of 120 × 4,096 tokens takes 62,914,560 rows"
    lines = [line.rstrip() for line in printed(text, force_terminal=True).splitlines()]
    assert lines == ["a step of 120 ×", "4,096 tokens takes", "62,914,560 rows"]


def test_a_line_of_a_file_stays_whole():
    assert printed("picture: /a/long/path of/a picture.svg") == "picture: /a/long/path of/a picture.svg\n"


def test_control_characters_reach_no_terminal():
    assert printed("old\x1b[2Jname", force_terminal=True, no_color=True) == "old\\x1b[2Jname\n"
    assert printed("old\x1b[2Jname") == "old\x1b[2Jname\n"
