"""The comparison of Muon with AdamW at equal tokens."""

from dataclasses import replace

import pytest

from experiments.muon.run import config_of, table


@pytest.mark.parametrize("size", ["30m", "tiny"])
def test_runs_of_a_learning_rate_differ_in_the_optimizer_only(size):
    adamw, muon = (config_of(size, name, 2.0, 65536 * 10) for name in ("adamw", "muon"))
    assert muon.optim.name == "muon"
    assert adamw == replace(muon, optim=replace(muon.optim, name="adamw"))
    assert adamw.steps * adamw.batch_size * adamw.sequence_length == 65536 * 10


def run(name: str, rate: float, losses: list[float], why: str = "") -> dict:
    return {
        "job": {"name": f"{name}-{rate}"},
        "config": {"optim": {"name": name, "lr": rate}},
        "steps": [10],
        "val_loss": [sum(losses) / len(losses)],
        "window_loss": losses,
        "tokens_per_s": 1000.0,
        "state_bytes": 40,
        "parameters": 10,
        "why": why,
    }


def test_the_best_runs_of_both_are_compared_window_by_window():
    runs = [
        run("adamw", 1, [2.0, 4.0]),
        run("adamw", 2, [3.0, 5.0]),
        run("muon", 1, [1.5, 3.7]),
        run("muon", 2, [9, 9]),
    ]
    _, first, *_, last = table(runs).splitlines()
    assert first.split() == ["muon-1", "1", "10", "2.6000", "1.1000", "1,000", "4.00"]
    assert last.startswith("Muon's lowest held-out loss, relative to AdamW's lowest: -13.33% ± 3.33%")


def test_a_run_that_diverged_is_named_and_not_compared():
    lines = table([run("adamw", 1, [2.0, 4.0]), {**run("muon", 1, [1.0, 1.0]), "why": "the loss is nan"}]).splitlines()
    assert lines[-1] == "muon-1 stopped: the loss is nan"
