"""tools/measure_long_load.py where a package is missing, and what tools/long_load.py says of memory."""

import os
from collections import Counter
from pathlib import Path

import pytest

from octile import extras
from octile.exit_codes import run_and_exit
from tools import measure_long_load


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ("fastapi", 'octile: octile\'s server needs fastapi: pip install "octile[serve]"\n'),
        ("llguidance", 'octile: octile\'s server needs llguidance: pip install "octile[serve]"\n'),
        ("httpx", 'octile: octile\'s tests and the tools that send requests need httpx: pip install "octile[test]"\n'),
    ],
)
def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys, missing, line):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr("sys.argv", ["measure_long_load", "tiny", "1"])
    with pytest.raises(SystemExit, match="2"):
        run_and_exit(measure_long_load.main)
    assert capsys.readouterr().err == line


def test_what_is_mapped_adds_up_to_the_resident_memory():
    pytest.importorskip("httpx")
    from tools.long_load import mapped_bytes

    mapped = mapped_bytes(os.getpid())
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert mapped.total() == pytest.approx(resident, rel=0.05)  # it may grow between the two
    assert mapped["[heap]"] > 0
    assert mapped["anonymous"] > 0


def test_a_process_that_has_ended_has_nothing_mapped():
    pytest.importorskip("httpx")
    from tools.long_load import mapped_bytes

    assert mapped_bytes(2**22 + 1) == Counter()  # the largest number of a process is 2²²


def test_what_has_grown_by_a_megabyte_is_listed_the_most_first():
    pytest.importorskip("httpx")
    from tools.long_load import Minute, growth

    mib = 2**20
    first = Minute(resident={1: Counter(heap=5 * mib, file=mib)})
    last = Minute(resident={1: Counter(heap=7 * mib, file=2 * mib - 1), 2: Counter(heap=3 * mib)})
    assert growth(first, last) == [(3 * mib, 2, "heap"), (2 * mib, 1, "heap")]
