"""Tests of `octile train --profile` on a CPU: which steps it records, its files, and that it changes no result."""

import gzip
import json
import re
from contextlib import contextmanager

import pytest

from octile.train.loop import train
from octile.train.run.folder import RunFolder
from octile.train.run.profile import LARGEST, MAX_NAME, PROFILED, WARM_UP, _first_step, describe, profiling, table
from octile.train.run.recorder import no_hook
from octile.train.step.kernel_records import Communication, Cost
from tests.train.conftest import micro, micro_bf16, silent_console, write_no_report
from tests.train.test_loop import metrics

ENOUGH = {"steps": WARM_UP + PROFILED + 1, "validate_every": 100, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def profiled(text, tmp_path_factory):
    """A profiled run with another hook: its folder, what it printed, and the steps around which that was entered."""
    out, screen, seen = tmp_path_factory.mktemp("profiled") / "run", silent_console(), []

    def hook(*_):
        @contextmanager
        def around(step):
            seen.append(step)
            yield

        return around

    config = micro_bf16(data=str(text), out=out, **ENOUGH)
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        train(config, False, screen, profiling(config, hook, screen))
    return out, screen.console.file.getvalue(), seen


@pytest.mark.slow
def test_it_names_the_steps_and_its_files(profiled):
    out, shown, _ = profiled
    assert f"steps {WARM_UP + 1} to {WARM_UP + PROFILED} took" in shown
    assert f"profile: {out / 'profile.txt'}" in shown
    assert f"trace:   {out / 'trace.json.gz'}" in shown


@pytest.mark.slow
def test_the_trace_is_one_that_chrome_reads(profiled):
    with gzip.open(profiled[0] / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name", "").startswith("aten::") and event.get("ph") == "X" for event in events)


def test_the_table_has_the_ten_largest_operators(profiled):
    _, _, head, *rows = (profiled[0] / "profile.txt").read_text().splitlines()
    assert head.split() == ["ms", "a", "step", "share", "calls", "name"]
    times = [float(row.split()[0].replace(",", "")) for row in rows]
    assert len(times) == LARGEST
    assert times == sorted(times, reverse=True)
    shares = [float(re.search(r"([0-9.]+)%", row)[1]) for row in rows]
    assert 0 < sum(shares) <= 110  # rounded; the profiler's own clock differs a little from the host's


@pytest.mark.slow
def test_profiling_changes_no_loss(profiled, text, tmp_path):
    train(micro_bf16(data=str(text), out=tmp_path / "run", **ENOUGH), False, silent_console())
    assert metrics(profiled[0], "loss") == metrics(tmp_path / "run", "loss")


def test_another_hook_is_entered_around_every_step(profiled):
    assert profiled[2] == list(range(1, ENOUGH["steps"] + 1))


@pytest.mark.parametrize(
    ("changes", "first"),
    [({"validate_every": 100}, 11), ({"validate_every": 11}, 12), ({"validate_every": 4, "checkpoint_every": 9}, 13)],
)
def test_no_validation_and_no_checkpoint_lies_between_the_profiled_steps(changes, first):
    assert _first_step(micro(**{"steps": 40, "checkpoint_every": 0, **changes}), 0) == first


@pytest.mark.parametrize("changes", [{"steps": WARM_UP + PROFILED - 1}, {"steps": 50, "validate_every": 2}], ids=str)
def test_a_run_without_such_steps_is_refused_before_any_work(changes, tmp_path):
    config = micro(**{"out": tmp_path / "run", **ENOUGH, **changes})
    with pytest.raises(ValueError, match=f"profile needs {PROFILED} steps after {WARM_UP}, without a validation"):
        profiling(config, no_hook, silent_console())
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_with_too_few_steps_left_is_refused(profiled):
    config = RunFolder.open(profiled[0]).read_config()
    with pytest.raises(ValueError, match=f"profile needs .* of which {ENOUGH['steps']} are done"):
        train(config, True, silent_console(), profiling(config, no_hook, silent_console()))


def test_a_long_name_is_cut():
    (_, row) = table([Cost("x" * 500, 1.0, 2.0)], 4.0).splitlines()
    assert row.endswith(" " + "x" * (MAX_NAME - 1) + "…")
    assert "50.0%" in row


def test_communication_is_described_in_ms_of_a_step():
    expected = "communication with other ranks: 3.00 ms a step, of which 25.0% is exposed: no other kernel runs"
    assert describe(Communication(6000, 1500), 2) == expected
