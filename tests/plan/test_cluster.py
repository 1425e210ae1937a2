"""`octile plan cluster` and `octile plan published` on the command line."""

import json
from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.parallel.schedules import SCHEDULES
from octile.plan.hardware import CLUSTERS
from tests.test_cli import call, refused

SMALL = ("--preset", "v2_lite_16b", "--cluster", "h200_8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_published_run_is_planned_within_15_percent_of_its_gpu_hours(capsys, folder):
    code, out, _ = call(capsys, "plan", "cluster", "--preset", "v3_671b", "--cluster", "h800_2048", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["layout"]["pp"] == 16
    assert found["gpu_hours_per_trillion_tokens"] == pytest.approx(180_000, rel=0.15)
    assert found["experts_at_equal_cost"]["per_node"] == pytest.approx(3.2)
    assert all(no["reason"] for no in found["ruled_out"])
    assert [row["schedule"] for row in found["schedules"]] == [kind.title for kind in SCHEDULES.values()]
    assert not list(folder.iterdir())


def test_the_schedules_of_the_json_have_their_units_in_their_keys(capsys, folder):
    options = ("--preset", "tiny", "--cluster", "h200_8", "--pp", "2", "--json")
    schedules = {row["schedule"]: row for row in json.loads(call(capsys, "plan", "cluster", *options)[1])["schedules"]}
    row = schedules["1F1B"]
    assert row["bubble_fraction"] == pytest.approx(row["bubble_seconds"] / row["seconds"])
    assert row["bubble_seconds"] == pytest.approx(row["bubble_by_formula_seconds"])
    assert (row["activations"], row["activations_by_formula"], row["activations_formula"]) == (2, 2, "min(PP, M)")
    assert [schedules[name]["parameter_copies"] for name in ("1F1B", "DualPipe")] == [1, 2]


def test_replicated_masters_are_weights_of_twice_the_bytes_on_every_rank(capsys, folder):
    options = ("--preset", "tiny", "--cluster", "h200_8", "--pp", "2", "--ep", "4", "--micro-batch-size", "1", "--json")
    sharded, replicated = (
        json.loads(call(capsys, "plan", "cluster", *options, "--masters", masters)[1])
        for masters in ("sharded", "replicated")
    )
    assert replicated["layout"]["masters"] == "replicated"
    assert replicated["memory_bytes"]["weights"] == pytest.approx(2 * sharded["memory_bytes"]["weights"])
    assert replicated["memory_bytes"]["moments"] < sharded["memory_bytes"]["moments"]


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("masters", "line"),
    [
        ("sharded", "weights: BF16 on every rank, FP32 masters sharded; octile train has FP32 on every rank"),
        ("replicated", "weights: FP32 on every rank, as octile train has them"),
    ],
)
def test_a_plan_says_how_ranks_hold_the_weights(masters, line, capsys, folder):
    options = ("--preset", "tiny", "--cluster", "h200_8", "--pp", "2", "--ep", "4", "--micro-batch-size", "1")
    assert line in call(capsys, "plan", "cluster", *options, "--masters", masters)[1]


@pytest.mark.slow
def test_actions_of_microseconds_are_not_rounded_to_nothing(capsys, folder):
    options = ("--preset", "tiny", "--cluster", "h200_8", "--pp", "2", "--batch-size", "8", "--sequence-length", "64")
    code, out, err = call(capsys, "plan", "cluster", *options)
    assert (code, err) == (0, "")
    assert "schedules of 2 equal stages" in out


@pytest.mark.slow
def test_without_a_layout_the_fastest_one_is_planned_with_picture_and_trace(capsys, folder):
    code, out, err = call(capsys, "plan", "cluster", *SMALL)
    assert (code, err) == (0, "")
    assert "layouts fit" in out
    assert (folder / "plan" / "step.svg").exists()
    assert json.loads((folder / "plan" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_a_layout_that_is_asked_for_is_planned(capsys, folder):
    _, out, _ = call(capsys, "plan", "cluster", *SMALL, "--pp", "2", "--ep", "4", "--schedule", "zb1p", "--json")
    layout = json.loads(out)["layout"]
    assert (layout["pp"], layout["ep"], layout["schedule"]) == (2, 4, "zb1p")


@pytest.mark.slow
def test_the_configuration_of_a_folder_is_planned_as_the_preset_with_its_shape(capsys, folder):
    ModelConfig.tiny().write(folder / "config.json")
    options = ("--cluster", "h200_8", "--pp", "2", "--json")
    found, preset = (
        json.loads(call(capsys, "plan", "cluster", *model, *options)[1])
        for model in (("--model", str(folder)), ("--preset", "tiny"))
    )
    assert found == preset | {"preset": str(folder)}


def test_sparse_attention_is_not_planned(capsys, folder):
    replace(ModelConfig.tiny(), index_topk=8, index_n_heads=2, index_head_dim=64).write(folder / "config.json")
    message = refused(capsys, "plan", "cluster", "--model", "config.json")
    assert "--model must have attention that is not sparse" in message


def test_a_model_of_another_family_is_not_planned(capsys, folder):
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert "model_type is 'llama'" in refused(capsys, "plan", "cluster", "--model", "config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (("--preset", "small", "--micro-batch-size", "1"), {"micro_batch_size": 1}),
        (("--preset", "tiny", "--pp", "2"), {"pp": 2, "schedule": "dualpipe"}),
        (("--preset", "small", "--schedule", "gpipe"), {"schedule": "gpipe"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_option_of_the_layout_restricts_the_search_over_the_rest(capsys, folder, options, layout):
    code, out, _ = call(capsys, "plan", "cluster", *options, "--cluster", "h200_8", "--json")
    found = json.loads(out)
    assert code == 0
    assert layout.items() <= found["layout"].items()
    assert found["layout"] | {"dp": 0} == found["best"][0]["layout"] | {"dp": 0}
    name = options[2].removeprefix("--").replace("-", "_")
    assert {no["layout"][name] for no in found["best"] + found["ruled_out"]} == {layout[name]}


@pytest.mark.slow
def test_an_option_replaces_the_published_layout_by_a_search(capsys, folder):
    code, out, _ = call(capsys, "plan", "cluster", "--batch-size", "1024", "--micro-batch-size", "1", "--json")
    layout = json.loads(out)["layout"]
    assert code == 0
    assert (layout["batch_size"], layout["micro_batch_size"]) == (1024, 1)


def test_scatter_makes_the_step_longer(capsys, folder):
    options = (*SMALL, "--pp", "2", "--ep", "4", "--scatter.jitter", "0.05", "--json")
    found = json.loads(call(capsys, "plan", "cluster", *options)[1])
    assert found["with_scatter"]["step_seconds"] > found["step_seconds"]


def test_published_figures_are_listed_with_the_error_of_the_plan(capsys, folder):
    code, out, _ = call(capsys, "plan", "published", "--json")
    assert code == 0
    assert {"GPU hours per 10¹² tokens", "peak memory of tensors"} <= {row["what"] for row in json.loads(out)}


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "tiny", "--model", "."), "--preset and --model exclude each other: give one of them"),
        (("--preset", "v9"), "unknown preset 'v9'; there are tiny"),
        (("--cluster", "moon"), "unknown cluster 'moon'; there are h100_8, h200_2048"),
        (("--cluster", "moon.toml"), "cluster file 'moon.toml' does not exist"),
        (("--gpus", "4096"), "gpus must be at most the 2,048 of cluster h800_2048, not 4,096"),
        (("--pp", "15"), "pp must divide the 2,048 GPUs, not 15"),
        (("--batch-size", "15361"), "--batch-size must be a multiple of"),
        (
            ("--batch-size", "1280", "--pp", "16", "--schedule", "dualpipe", "--micro-batch-size", "1"),
            "dualpipe needs at least 32 micro-batches, not 10",
        ),
        (
            ("--pp", "16", "--ep", "1"),
            "with --pp 16, --ep 1 can run on the 2,048 GPUs of h800_2048: the nearest to fitting is PP16",
        ),
        (("--ep", "7"), "with --ep 7 can run on the 2,048 GPUs of h800_2048: for example PP"),
        (("--trace", "trace.txt"), "trace must end in .json, not 'trace.txt'"),
        (("--scatter.slow-gpus", "5000"), "--scatter.slow-gpus must be at most the 2,048 GPUs, not 5,000"),
        (("--scatter.slowdown", "1e308"), "slowdown must be at most 1,000, not 1e+308"),
        (("--out", "/dev/null/step.svg"), "cannot be written: '/dev/null' is not a folder"),
        (("--out", "."), "out '.' is a folder: name a file"),
        (("--out", "step.pdf"), "out must end in .svg or .png, not 'step.pdf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_options_are_refused_with_the_constraint_before_anything_is_written(capsys, folder, options, message):
    assert message in refused(capsys, "plan", "cluster", *options)
    assert not list(folder.iterdir())


def test_gpus_that_cannot_be_slow_are_refused_before_anything_is_planned(capsys, folder, monkeypatch):
    monkeypatch.setattr("octile.plan.cluster.search", lambda *_: pytest.fail("planned"))
    assert "5,000" in refused(capsys, "plan", "cluster", "--pp", "16", "--scatter.slow-gpus", "5000")


def test_published_figures_have_all_their_digits(capsys, folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = call(capsys, "plan", "published")
    assert all(figure in out for figure in ("180,000", "73,700", "38.94"))
    assert "e+" not in out


def test_a_model_that_no_layout_fits_is_refused(capsys, folder):
    message = "no layout of v3_671b can run on 4 of the 8 GPUs of h200_8: the nearest to fitting is PP"
    assert message in refused(capsys, "plan", "cluster", "--cluster", "h200_8", "--gpus", "4")


def test_a_users_cluster_without_a_field_is_refused(capsys, folder):
    text = (CLUSTERS / "h200_8.toml").read_text(encoding="utf-8")
    (folder / "mine.toml").write_text(text.replace("gpus_per_node = 8\n", ""), encoding="utf-8")
    message = "mine.toml: gpus_per_node is missing"
    assert message in refused(capsys, "plan", "cluster", "--cluster", "mine.toml")
