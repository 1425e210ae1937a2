"""Tests of one run of the loss experiment, and of the report on many runs."""

import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from experiments.loss import job as module
from experiments.loss.jobs import BALANCE_TOKENS, BALANCES, CORE, LONG, branch, job
from experiments.loss.recipes import nudge, recipe
from experiments.loss.report import (
    Results,
    answer_table,
    balance_figure,
    balance_table,
    branch_table,
    gap,
    interval,
    scratch_table,
    write,
)
from experiments.loss.runs import read_result, result_file, write_result
from octile.train.config import TrainConfig
from octile.train.data.batches import validation_windows
from octile.train.data.prepare import prepare
from octile.train.trainer import Trainer
from tests.report.conftest import draw_no_figures

TOKENS = 8 * 8 * 64  # eight steps of the model for a CPU
FEW_TOKENS = TOKENS // 4


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    import argparse
    import inspect

    text = tmp_path_factory.mktemp("text")
    source = inspect.getsource(argparse)
    for i in range(0, len(source), 4000):
        (text / f"{i}.txt").write_text(source[i : i + 4000])
    return prepare(text, 512, tmp_path_factory.mktemp("store"), 63, held_out_windows=8)


@pytest.fixture(scope="module", autouse=True)
def often():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEPS_PER_LINE", 2)
        patch.setattr(module, "VALIDATIONS", 2)
        patch.setattr(module, "AVERAGED", 0.5)
        yield


def run(store, out, one):
    module.run(store, one, result_file(out, one.name))
    return read_result(result_file(out, one.name))


@pytest.mark.slow
def test_a_run_stores_its_curves_and_its_cost(store, tmp_path):
    result = run(store, tmp_path, job("core", "toy", "deepseek_v3", 0, TOKENS))
    assert result["state"] == "done"
    assert result["steps"] == [2, 4, 6, 8]
    assert len(result["loss"]) == len(result["speed"]) == len(result["imbalance"]) == 4
    assert result["loads"] == []  # of `balance` alone
    assert result["facts"]["text_tokens"] == len(store.train)
    assert result["val_steps"] == [4, 8]
    assert result["val_loss"][-1] == pytest.approx(sum(result["window_loss"]) / len(result["window_loss"]), rel=1e-5)
    assert len(result["averaged_window_loss"]) == len(result["window_loss"])
    assert result["averaged_window_loss"] != result["window_loss"]
    assert result["facts"]["bytes_a_parameter"]["exp_avg"] == 2.0
    assert 0 < result["facts"]["bytes_a_parameter"]["copies"] < 1.1


TRUNK = replace(job("trunk", "toy", "bf16", 0, TOKENS), until=0.5)


@pytest.fixture(scope="module")
def branched(store, tmp_path_factory):
    """The folder of a trunk, its result, and that of the run which goes on."""
    out = tmp_path_factory.mktemp("trunk")
    return out, run(store, out, TRUNK), run(store, out, job("core", "toy", "bf16", 0, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        "deepseek_v3",
        "delayed",
        *(pytest.param(r, marks=pytest.mark.exhaustive) for r in ("bf16", "fp32_moments", "fp8_lm")),
    ],
)
def test_a_branch_continues_where_the_trunk_ended(store, branched, recipe):
    out, trunk, whole = branched
    assert trunk["steps"] == [2, 4]
    result = run(store, out, branch(TRUNK, recipe))
    assert result["state"] == "done"
    assert result["steps"] == [6, 8]
    assert result["facts"]["tokens"] == whole["facts"]["tokens"]
    if recipe == "bf16":
        assert result["window_loss"] == whole["window_loss"]
    else:
        assert result["val_loss"][-1] == pytest.approx(whole["val_loss"][-1], rel=0.01)
        assert result["val_loss"][-1] != whole["val_loss"][-1]


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "other"), [("bf16", "deepseek_v3"), ("deepseek_v3", "bf16")])
def test_weights_under_another_recipe_lose_what_a_model_of_that_recipe_loses(store, trained, other):
    config = job("core", "toy", trained, 0, TOKENS).config()
    windows = validation_windows(store.val, config.sequence_length - 1, 8)
    own, model = (Trainer(config, store, torch.device("cpu"), recipe(name)) for name in (trained, other))
    for _ in range(3):
        own.step()
    before = own.evaluator.token_losses(windows).double().mean(1)
    model.model.load_state_dict(own.model.state_dict())
    found = module.losses_under(other, own, windows)
    assert torch.equal(found, model.evaluator.token_losses(windows).double().mean(1))
    assert not torch.equal(found, before)


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "other"), [("nudged", "deepseek_v3"), ("fp8_lm", "bf16")])
def test_a_run_stores_what_its_weights_lose_under_another_recipe(store, tmp_path, trained, other):
    result = run(store, tmp_path, job("core", "toy", trained, 0, FEW_TOKENS))
    assert list(result["other_window_loss"]) == [other]
    assert len(result["other_window_loss"][other]) == len(result["window_loss"])
    assert result["other_window_loss"][other] != result["window_loss"]


@pytest.mark.slow
def test_a_result_names_its_commit_and_configuration(store, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "machine", lambda device: {"commit": "0123456789ab", "gpu": None})
    one = job("core", "toy", "fp32_moments", 3, FEW_TOKENS, lr=1e-3, num_nextn_predict_layers=1)
    facts = run(store, tmp_path, one)["facts"]
    assert facts["machine"] == {"commit": "0123456789ab", "gpu": None}
    config = TrainConfig.from_json(json.dumps(facts["config"]))
    model = replace(one.config().model, bos_token_id=store.tokenizer.begin, eos_token_id=store.tokenizer.end)
    assert config == replace(one.config(), recipe="fp32_moments", model=model)


def test_a_run_whose_first_step_diverges_reports_it(store, tmp_path, monkeypatch):
    def broken(trainer):
        raise FloatingPointError("the loss is nan")

    monkeypatch.setattr(module.Trainer, "step", broken)
    result = run(store, tmp_path, job("core", "toy", "bf16", 0, TOKENS))
    assert result["state"] == "diverged"
    assert {"machine", "config"} <= set(result["facts"])


def test_a_nudge_is_half_a_unit_of_bf16():
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    nudge("bf16", model)
    assert torch.equal(model.weight, before)
    nudge("nudged", model)
    assert torch.equal(model.weight, before.bfloat16().float())


@pytest.mark.slow
def test_a_run_that_diverges_reports_it(store, tmp_path):
    result = run(store, tmp_path, job("rate", "toy", "bf16", 0, 20 * TOKENS, lr=1e4))
    assert result["state"] == "diverged"
    assert result["why"]


@pytest.mark.slow
def test_drafts_are_measured_where_there_are_any(store, tmp_path):
    result = run(store, tmp_path, job("balance", "toy", "bf16", 0, FEW_TOKENS, num_nextn_predict_layers=1))
    assert set(result["drafts"]) == {"greedy", "drawn"}
    assert result["mtp_loss"][-1] > 0


@pytest.mark.slow
def test_a_run_of_balance_stores_the_load_of_every_expert(store, tmp_path):
    result = run(store, tmp_path, job("balance", "toy", "bf16", 0, TOKENS))
    assert len(result["loads"]) == len(result["steps"]) == 4
    for layers, worst in zip(result["loads"], result["imbalance"], strict=True):
        assert [len(load) for load in layers] == [8]  # experts of the one layer that has any
        assert [max(load) for load in layers] == pytest.approx(worst, abs=1e-3)
        assert sum(layers[0]) == pytest.approx(8, abs=0.01)


def test_a_run_that_is_stopped_writes_its_partial_result(store, tmp_path, monkeypatch):
    signals = [1]
    monkeypatch.setattr(module, "_signals", lambda: nullcontext(signals))
    result = run(store, tmp_path, job("core", "toy", "bf16", 0, TOKENS))
    assert result["state"] == "stopped"
    assert result["val_loss"]


# the report


def fake(one, loss, state="done", val_steps=(4, 8), **more):
    windows = [loss + 0.1 * i for i in (-2, -1, 0, 0, 1, 2)] if state == "done" else []
    return {
        "job": one.to_json(), "state": state, "facts": {"tokens": 1e6, "bytes_a_parameter": {"master": 4.0}},
        "steps": [2, 4, 6, 8], "loss": [6.0, 5.0, 4.0, loss], "grad_norm": [1.0] * 4, "speed": [100] * 4,
        "imbalance": [[2.0, 1.5]] * 4, "mtp_loss": [0.0] * 4, "skipped": 0, "val_steps": list(val_steps),
        "val_loss": [5.0] * (len(val_steps) - 1) + [loss], "val_error": [0.01] * len(val_steps),
        "window_loss": windows, "why": "", "drafts": {},
    } | more  # fmt: skip


BASE, OTHER, FP8 = (
    job("core", "30m", recipe, seed, 1e6) for recipe, seed in (("bf16", 0), ("bf16", 1), ("deepseek_v3", 0))
)


def test_a_gap_is_relative_to_bf16_at_the_last_step_that_both_have():
    base = fake(BASE, 4.0, val_steps=(4, 8))
    assert gap(fake(FP8, 4.04), base) == (pytest.approx(0.01), 8)
    assert gap(fake(FP8, 5.05, "stopped", val_steps=(4,)), base) == (pytest.approx(0.01), 4)


def test_an_interval_is_that_of_windows_in_pairs():
    base = fake(BASE, 4.0)
    assert interval(fake(FP8, 4.04), base) == "+1.00% … +1.00%"
    assert interval(fake(FP8, 4.04, "stopped"), base) == ""


@pytest.mark.slow
def test_the_report_has_every_table_and_names_what_is_missing(tmp_path, monkeypatch):
    draw_no_figures(monkeypatch)  # of the pages of comparisons
    runs = [fake(BASE, 4.0), fake(OTHER, 4.02), fake(FP8, 4.002)]
    runs += [
        fake(job("core", "30m", recipe, 2, 1e6), loss) for recipe, loss in (("bf16", 4.01), ("deepseek_v3", 4.014))
    ]
    runs += [
        fake(replace(one, group="ablation", name=one.name.replace("core", "ablation")), 4.0) for one in (BASE, OTHER)
    ]
    runs += [fake(job("ablation", "30m", "per_tensor", 0, 1e6), 4.5)]
    runs += [fake(replace(job("rate", "30m", "bf16", 0, 1e6), name="rate-bf16-64"), 9.0, "diverged")]
    runs += [fake(replace(BASE, name="balance-with-MTP", group="balance"), 4.0, drafts={"greedy": 0.5, "drawn": 0.6})]
    runs += [
        fake(replace(one, name=one.name.replace("core", "long"), group="long"), loss)
        for one, loss in ((BASE, 4.0), (OTHER, 4.04), (FP8, 4.02))
    ]
    runs += [
        {
            "job": FP8.to_json() | {"name": "x", "size": "80m"},
            "state": "failed",
            "why": "exit status 1",
            "log": ["oh"],
            "speed": [],
        }
    ]
    runs += [
        fake(branch(replace(BASE, name="trunk"), recipe), loss)
        for recipe, loss in (
            ("bf16", 3.0),
            ("nudged", 3.003),
            ("deepseek_v3", 3.009),
            ("per_tensor", 3.011),
            ("no_promotion", 3.026),
        )
    ]
    runs += [
        fake(branch(job("long-trunk", "30m", "bf16", seed, 1e6), recipe), loss)
        for seed in (1, 2)
        for recipe, loss in (("bf16", 3.0), ("nudged", 3.006), ("deepseek_v3", 3.0))
    ]
    for result in runs:
        write_result(result_file(tmp_path, result["job"]["name"]), result)
    text = write([tmp_path], tmp_path / "report").read_text()
    for part in (
        "+0.05%",
        "+0.50% (the noise)",
        "diverged, up to 9.0; stopped at step 8",
        "3.0 × the noise",
        "| +14.34%, +0.10% | +7.22% | 18.90% | 7.12% |",  # the two BF16 runs of seed 0 differ by 20.2%
        "| not shown: the mean lies beyond it, above BF16 |",
        "| 30m | 1M | 1 | 1 | +0.50% | +0.50% | 28.57% |  |  | not shown: one seed |",
        "| below the noise |",
        "| +0.50%, vs. `per_tensor` |",
        "BF16 whose weights were rounded once at the start ends 0.20% from BF16.",
        "50.0%, 60.0%",
        "- x: exit status 1; `oh`",
        "150m",
    ):
        assert part in text
    assert "| core | 150m | `bf16` | 0–5 |" in text.split("## Not run")[1]
    for figure in ("core-30m", "long-30m", "long-branch-30m", "balance", "rates"):
        assert f"`{figure}" in text
        assert (tmp_path / f"report/{figure}.svg").exists()
    assert (tmp_path / "report/core-30m/report.html").exists()


def test_without_a_second_seed_there_is_no_comparison():
    assert Results([fake(BASE, 4.0), fake(FP8, 4.0)]).comparison("core", "30m") is None


def test_longer_runs_have_separate_rows_and_noise():
    runs = [fake(job("core", "30m", recipe, 0, CORE), loss) for recipe, loss in (("bf16", 4.0), ("deepseek_v3", 4.004))]
    runs += [
        fake(job("long", "30m", recipe, 1, LONG), loss) for recipe, loss in (("bf16", 3.03), ("deepseek_v3", 3.006))
    ]
    runs += [
        fake(branch(job("trunk", "30m", "bf16", 0, CORE), recipe), loss)
        for recipe, loss in (("bf16", 4.0), ("nudged", 4.004), ("deepseek_v3", 4.008))
    ]
    runs += [
        fake(branch(job("long-trunk", "30m", "bf16", 1, LONG), recipe), 2.97 * times)
        for recipe, times in (("bf16", 1), ("nudged", 1.01), ("deepseek_v3", 1.03), ("per_tensor", 1.05))
    ]
    results = Results(runs)
    text = scratch_table(results)
    assert "1.00% (2 degrees of freedom)" in text  # two BF16 pairs: 2% and 0% apart
    assert "mean over sizes" not in text  # of one seed
    assert "| 30m | 100M | 2 | 1 | +0.10% | +0.10% | 1.22% |  |  | not shown: one seed |" in text
    assert "| 30m | 300M | 2 | 1 | +0.20% | +0.20% | 1.22% |  |  | not shown: one seed |" in text
    text = branch_table(results)
    assert "The noise, 0.100% over 100M tokens and 1.000% over 300M tokens, is" in text
    assert "| 30m, 0 | 100M | `deepseek_v3` | 4.0080 | +0.20% | +0.20% … +0.20% | 2.0 × the noise |  |  |" in text
    assert "| 30m, 1 | 300M | `deepseek_v3` | 3.0591 | +3.00% | +3.00% … +3.00% | 3.0 × the noise |  |  |" in text
    assert "| 5.0 × the noise | +2.00% |" in text
    text = answer_table(results)
    assert "| 30m | 100M | +0.20% | +0.10% | +0.10% | 0.00% | – | – |" in text
    assert "| 30m | 300M | +3.00% | +1.00% | −0.79% | −1.98% | – | – |" in text


def test_a_group_without_branches_has_a_row_of_its_own():
    runs = [
        fake(job(group, "30m", recipe, 0, CORE), loss)
        for group, fp8 in (("core", 4.004), ("slow", 4.008))
        for recipe, loss in (("bf16", 4.0), ("deepseek_v3", fp8))
    ]
    runs.append(fake(branch(job("trunk", "30m", "bf16", 0, CORE), "bf16"), 4.0))
    text = scratch_table(Results(runs))
    assert "| 30m, half the rate | 100M | 1 | 1 | +0.20% | +0.20% | 0.00% |  |  | not shown: one seed |" in text


def test_the_figure_of_balance_has_more_lines_than_there_are_colors(tmp_path):
    runs = [fake(replace(BASE, name=f"balance-{name.replace(' ', '-')}", group="balance"), 4.0) for name in BALANCES]
    balance_figure(Results(runs), tmp_path)
    drawn = (tmp_path / "balance.svg").read_text()
    assert [name for name in BALANCES if f">{name}<" not in drawn] == list(BALANCE_TOKENS)


def test_a_run_that_was_stopped_has_as_long_a_warm_up_as_the_others():
    run = fake(replace(BASE, name="balance-usual-again", group="balance"), 4.0)
    run |= {"state": "stopped", "steps": [20, 40, 60, 80, 100, 120], "imbalance": [[9.0]] * 5 + [[1.2]]}
    run["facts"] = {**run["facts"], "steps_asked": 500}
    assert "| usual again | 4.0000 ± 0.0577 | 1.200 | 1.200, up to 1.20 | met |" in balance_table(Results([run]))
