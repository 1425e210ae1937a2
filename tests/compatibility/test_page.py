"""Every row of docs/compatibility.md names a test that exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text("utf-8")
ROWS = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)(?:\[\w+\])?`", PAGE)


@pytest.mark.parametrize(("file", "test"), ROWS)
def test_a_row_names_a_test_that_exists(file: str, test: str):
    (path,) = (ROOT / "tests").rglob(file)
    assert f"def {test}(" in path.read_text("utf-8")


def test_there_are_rows():
    assert len(ROWS) > 20
