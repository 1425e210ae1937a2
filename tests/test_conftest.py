"""Tests of the option by which CI runs a share of the tests."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import _share

ROOT = Path(__file__).parent.parent

MODULE = """
import pytest

@pytest.fixture(scope="module", params=range(3))
def costly(request):
    return request.param

@pytest.mark.slow
@pytest.mark.parametrize("case", range(2))
def test_slow(case): ...

@pytest.mark.slow
def test_slow_too(): ...

@pytest.mark.exhaustive
def test_first(costly): ...

@pytest.mark.slow
@pytest.mark.exhaustive
def test_second(costly): ...

def test_other(): ...
"""

COLLECT = """
import sys
import pytest
for share in range(3):
    print("share", share)
    shares = "--share", f"exhaustive={share}/3", "--share", f"slow={share}/3"
    pytest.main(["-q", "--collect-only", "-p", "tests.conftest", "-p", "no:cacheprovider", *shares, sys.argv[1]])
"""


@pytest.fixture(scope="module")
def shares(tmp_path_factory) -> list[set[str]]:
    """The tests of each of three shares of four files."""
    folder = tmp_path_factory.mktemp("shares")
    (folder / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow\n    exhaustive\naddopts = --import-mode=importlib\n"
    )
    for name in "abcd":
        (folder / f"test_{name}.py").write_text(MODULE)
    command = [sys.executable, "-c", COLLECT, str(folder)]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [{line for line in part.splitlines() if "::" in line} for part in out.split("share ")[1:]]


def named(share: set[str], *names: str) -> set[str]:
    return {test for test in share if test.partition("::")[2].partition("[")[0] in names}


def test_a_share_is_a_marker_and_two_numbers():
    assert _share("slow=1/6") == ("slow", 1, 6)


@pytest.mark.parametrize("text", ["1/6", "slow=6/6", "slow=1", "=0/1", "slow=-1/6"])
def test_other_shares_are_refused(text: str):
    with pytest.raises(ValueError, match=r"^$|invalid literal|not enough values"):
        _share(text)


@pytest.mark.slow
def test_an_unknown_marker_is_refused():
    command = [sys.executable, "-m", "pytest", "--collect-only", "--share", "slo=0/6", __file__]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--share: there is no marker slo" in found.stderr


@pytest.mark.slow
def test_each_slow_or_exhaustive_test_is_in_one_share(shares):
    names = "test_slow", "test_slow_too", "test_first", "test_second"
    assert len(set.union(*(named(share, *names) for share in shares))) == 4 * (2 + 1 + 3 + 3)
    assert sum(len(named(share, *names)) for share in shares) == 4 * (2 + 1 + 3 + 3)


@pytest.mark.slow
def test_other_tests_are_in_all_shares(shares):
    assert [len(named(share, "test_other")) for share in shares] == [4, 4, 4]


@pytest.mark.slow
def test_tests_of_a_file_are_in_the_same_share(shares):
    for share in shares:
        files = {test.partition("::")[0] for test in named(share, "test_slow")}
        assert files == {test.partition("::")[0] for test in named(share, "test_slow_too")}


@pytest.mark.slow
def test_values_of_a_fixture_are_divided_and_tests_of_the_same_one_are_not(shares):
    for share in shares:
        assert len(named(share, "test_first")) == 4  # of the four files' three values each
        first = {test.replace("test_first", "test_second") for test in named(share, "test_first")}
        assert first == named(share, "test_second")
