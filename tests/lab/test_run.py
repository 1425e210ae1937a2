"""Tests of the lab with a training run: telemetry, guards, resumed runs, and captures afterwards."""

import io
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from octile.checkpoint import hugging_face
from octile.checkpoint.training import latest_checkpoint, load_checkpoint
from octile.lab.capture import load
from octile.lab.pages.preflight import read_model
from octile.lab.run import capture_run, load_newest_weights, observer
from octile.train.loop import train
from octile.train.memory import check
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, estimate_once, micro, text, write_no_report  # noqa: F401  text is a fixture

LAYER = "model.layers.0.mlp.down_proj"
ALWAYS = "flushed >= 0%"
SWITCH = f'[[rule]]\nwhen = "{ALWAYS}"\nthen = "bf16"\nproduct = "wgrad"\nlayers = "{LAYER}"\n'
CAPTURE = f'[[rule]]\nwhen = "{ALWAYS}"\nthen = "capture"\nproduct = "dgrad"\nlayers = "{LAYER}"\nfor_steps = 2\n'
SWITCHING = SWITCH + CAPTURE
EXACT_MODEL = replace(MICRO, moe_intermediate_size=128)  # which the recipe `exact` takes
KV_B_PROJ = "model.layers.0.self_attn.kv_b_proj"


def quiet():
    return RunConsole(Console(file=io.StringIO(), width=120))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def guards_of(run):
    return [line for line in lines(run / "metrics.jsonl") if "guard" in line]


def final(run):
    return load_checkpoint(latest_checkpoint(run / "checkpoints"))[0]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module", autouse=True)
def no_report() -> Iterator[None]:
    """Have no run write pictures and a sample, and runs of the same settings estimate their memory once."""
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        patch.setattr(check, "estimate_need", estimate_once)
        yield


@pytest.fixture(scope="module")
def run_with(text, tmp_path_factory):  # noqa: F811
    """Train the micro model for 4 steps under an observer."""

    def run(every=0, layers="*", rules=None, steps=4, **changes):
        out = tmp_path_factory.mktemp("runs") / "run"
        config = micro(
            **{"data": str(text), "out": out, "steps": steps, "checkpoint_every": 2, "validate_every": 2, **changes},
            telemetry_every=every,
            telemetry_layers=layers,
            **({} if rules is None else {"guards": Path("rules.toml"), "guards_text": rules}),
        )
        train(config, False, quiet(), observer(config))
        return out

    return run


def resume(run, **changes):
    """Resume a run as `octile train --resume --out RUN` does, with the configuration in its folder."""
    config = replace(RunFolder.open(run).read_config(), out=run, **changes)
    train(config, True, quiet(), observer(config))


@pytest.fixture(scope="module")
def measured(run_with):
    return run_with(2, "*.mlp.down_proj,*.experts.down", log=("tensorboard",))


@pytest.fixture(scope="module")
def unmeasured(run_with):
    return run_with()


@pytest.fixture(scope="module")
def switched(run_with):
    return run_with(1, LAYER, SWITCHING)


@pytest.mark.slow
def test_rows_of_every_measured_step_and_chosen_layer(measured):
    rows = lines(measured / "telemetry.jsonl")
    assert {row["step"] for row in rows} == {2, 4}
    assert {row["layer"] for row in rows} >= {LAYER, "model.layers.1.mlp.experts.down"}
    assert all("down" in row["layer"] for row in rows)


def test_tensorboard_has_the_same_values(measured):
    board = EventAccumulator(str(measured / "tensorboard"))
    board.Reload()
    tag = f"telemetry/{LAYER}/fprop_x_underflows%"
    assert tag in board.Tags()["scalars"]
    rows = [r for r in lines(measured / "telemetry.jsonl") if r["layer"] == LAYER and r.get("operand") == "x"]
    expected = [(r["step"], pytest.approx(r["underflows%"])) for r in rows if r["product"] == "fprop"]
    assert [(event.step, event.value) for event in board.Scalars(tag)] == expected


@pytest.mark.slow
def test_measuring_changes_no_bit_of_the_run(measured, unmeasured):
    assert same(final(measured), final(unmeasured))


@pytest.mark.slow
def test_a_switched_gemm_is_recorded_and_changes_the_run(switched, unmeasured):
    first = guards_of(switched)[0]
    assert first["step"] == 1
    assert {k: first["guard"][k] for k in ("then", "layer", "product")} == {
        "then": "bf16",
        "layer": LAYER,
        "product": "wgrad",
    }
    assert not same(final(switched), final(unmeasured))
    rows = [row for row in lines(switched / "telemetry.jsonl") if row["product"] == "wgrad"]
    assert {row["step"] for row in rows} == {1}  # from step 2 on it is not in 8 bits


@pytest.mark.slow
def test_the_action_of_a_guard_is_logged(run_with, caplog):
    run_with(1, LAYER, SWITCH, steps=2)
    messages = [record.getMessage() for record in caplog.records]
    guard = f"guard at step 1: {ALWAYS} holds since step 1 in wgrad of {LAYER}"
    assert any(message.startswith(guard) for message in messages)
    assert messages.count(f"from step 2 on wgrad of {LAYER} is computed in bfloat16") == 1  # of two operands


def test_a_guards_capture_is_of_the_next_step_and_equals_one_made_afterwards(switched, tmp_path):
    (path,) = (switched / "captures").iterdir()
    found = load(path)
    assert found.step == 3  # the rule held from step 1 to 2
    again = load(capture_run(switched, 3, LAYER, ("dgrad",), tmp_path / "again.safetensors", say=lambda line: None))
    assert torch.equal(found.gemms[0].a, again.gemms[0].a)
    assert torch.equal(found.gemms[0].b, again.gemms[0].b)
    assert torch.equal(found.tokens, again.tokens)


@pytest.fixture
def interrupted(switched, tmp_path):
    """The switched run, killed in its fourth step: the newest checkpoint is that of step 2."""
    run = shutil.copytree(switched, tmp_path / "killed")
    shutil.rmtree(run / "checkpoints" / "step_00000004")
    with (run / "telemetry.jsonl").open("a") as file:
        file.write('{"step": 4, "layer": "cut sh')
    return run


@pytest.mark.slow
def test_a_resumed_run_continues_as_the_uninterrupted_one(switched, interrupted):
    resume(interrupted)
    assert same(final(interrupted), final(switched))
    for file in ("telemetry.jsonl", "metrics.jsonl"):
        old, new = (
            [line for line in lines(run / file) if "layer" in line or "guard" in line]
            for run in (switched, interrupted)
        )
        assert new == old, file


LOST = {
    "metrics.jsonl": "metrics.jsonl is gone, and with it which GEMMs the run's guards have switched",
    "telemetry.jsonl": "telemetry.jsonl: if the run has measured steps under guards already",
}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [*LOST, None])
def test_what_guards_lack_is_printed(interrupted, lost):
    if lost:
        (interrupted / lost).unlink()
    config, screen = RunFolder(interrupted).read_config(), io.StringIO()
    train(replace(config, out=interrupted), True, RunConsole(Console(file=screen, width=400)), observer(config))
    assert [file for file, message in LOST.items() if message in screen.getvalue()] == ([lost] if lost else [])


@pytest.mark.slow
def test_a_run_without_a_measured_step_has_lost_no_telemetry(run_with):
    out, screen = run_with(4, LAYER, SWITCH, steps=4, checkpoint_every=2), io.StringIO()
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    (out / "telemetry.jsonl").unlink()
    config = RunFolder(out).read_config()
    train(config, True, RunConsole(Console(file=screen, width=400)), observer(config))
    assert LOST["telemetry.jsonl"] not in screen.getvalue()


@pytest.mark.slow
def test_a_resumed_run_makes_the_capture_that_was_due(interrupted):
    shutil.rmtree(interrupted / "captures")
    resume(interrupted)
    (path,) = (interrupted / "captures").iterdir()
    assert load(path).step == 3


@pytest.mark.slow
def test_a_capture_without_a_following_step_is_reported_missing(run_with, caplog):
    out = run_with(1, LAYER, CAPTURE, steps=2)
    messages = [record.getMessage() for record in caplog.records]
    how = f"octile lab capture {out} --step 3 --layers {LAYER} --products dgrad"
    assert f"this was the last step; to capture the next one: {how}" in messages
    assert not (out / "captures").exists()


@pytest.mark.slow
def test_a_resumed_run_measures_and_guards_as_before_whatever_became_of_the_file(switched, interrupted, tmp_path):
    file = tmp_path / "rules.toml"
    file.write_text("other = 1", encoding="utf-8")
    resume(interrupted)
    assert same(final(interrupted), final(switched))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"telemetry_every": 2}, "telemetry_every is 2 instead of 1"),
        ({"telemetry_layers": "*"}, r"telemetry_layers is \* instead of model.layers.0"),
        ({"guards": None, "guards_text": None}, "guards is None instead of rules.toml"),
        ({"guards_text": SWITCH}, "the file of guards has other contents"),
    ],
    ids=["interval", "layers", "no guards", "other guards"],
)
def test_a_run_with_guards_keeps_its_telemetry_and_its_guards(interrupted, changes, message):
    with pytest.raises(ValueError, match=message):
        resume(interrupted, **changes)


@pytest.mark.slow
def test_guards_can_be_added_to_a_run_without(run_with):
    out = run_with(steps=2)
    rules = {"telemetry_every": 1, "telemetry_layers": LAYER, "guards": Path("rules.toml"), "guards_text": SWITCH}
    resume(out, steps=4, **rules)
    assert {line["step"] for line in guards_of(out)} == {3}


@pytest.mark.slow
def test_guards_that_are_added_fire_where_the_telemetry_so_far_meets_them(run_with):
    out = run_with(1, LAYER, steps=2)
    resume(out, steps=4, guards=Path("rules.toml"), guards_text=SWITCH)
    assert {line["step"] for line in guards_of(out)} == {3}


def test_a_capture_into_a_folder_is_refused_before_a_step_is_repeated(unmeasured, tmp_path, monkeypatch):
    monkeypatch.setattr("octile.lab.run.Trainer", lambda *_: pytest.fail("the run was loaded"))
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        capture_run(unmeasured, 1, out=tmp_path)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("config.json", r"out must end in \.safetensors, not '.*config\.json'"),
        ("model/model.safetensors", "captures or outside of the run, not among its own files: .*model.safetensors"),
    ],
)
def test_a_capture_replaces_no_file_of_the_run(unmeasured, out, message):
    before = (unmeasured / out).read_bytes()
    with pytest.raises(ValueError, match=message):
        capture_run(unmeasured, 1, out=unmeasured / out)
    assert (unmeasured / out).read_bytes() == before


def test_a_capture_replaces_no_checkpoint_outside_of_the_runs_folder(unmeasured, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "checkpoints_of", lambda run, config: str(tmp_path))
    with pytest.raises(ValueError, match="not among its own files"):
        capture_run(unmeasured, 1, out=tmp_path / "step_00000001" / "tensors.safetensors")


def test_a_capture_needs_no_older_checkpoint(unmeasured, tmp_path):
    messages = []
    path = capture_run(unmeasured, 1, LAYER, ("fprop",), tmp_path / "c.safetensors", say=messages.append)
    assert load(path).step == 1
    assert messages == ["step 1: from the beginning, since no checkpoint is older, after 0 repeated steps"]


@pytest.mark.slow
def test_a_capture_begins_at_the_newest_checkpoint_before_the_step(unmeasured, tmp_path):
    messages = []
    capture_run(unmeasured, 4, LAYER, ("fprop",), tmp_path / "c.safetensors", say=messages.append)
    assert messages == ["step 4: from step_00000002, after 1 repeated step"]


@pytest.mark.slow
def test_a_capture_begins_at_a_checkpoint_in_a_store(unmeasured, tmp_path):
    run, place, messages = shutil.copytree(unmeasured, tmp_path / "run"), "memory://octile/captured", []
    fsspec.filesystem("memory").put(str(run / "checkpoints"), place, recursive=True)
    shutil.rmtree(run / "checkpoints")
    RunFolder(run).write_config(replace(RunFolder(run).read_config(), checkpoints=place))
    path = capture_run(run, 4, LAYER, ("fprop",), tmp_path / "c.safetensors", say=messages.append)
    assert messages == [
        f"checkpoints: None before, {place} now",
        "step 4: from step_00000002, after 1 repeated step",
    ]
    whole = capture_run(unmeasured, 4, LAYER, ("fprop",), tmp_path / "d.safetensors", say=messages.append)
    assert torch.equal(load(path).gemms[0].a, load(whole).gemms[0].a)


def with_metric_of_step_4(run: Path, copy: Path, name: str, value: float | None) -> Path:
    """Copy a run, and change a metric of its fourth step."""
    shutil.copytree(run, copy)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, name: value} if line["step"] == 4 and name in line else line for line in lines]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return copy


def test_a_step_that_was_done_under_other_schedules_is_not_repeated(unmeasured, tmp_path):
    run = with_metric_of_step_4(unmeasured, tmp_path / "run", "lr", 0.5)
    message = (
        r"^step 4 cannot be repeated: the run did it with lr 0\.5, and the schedules of \d+ steps, to which it was "
    )
    with pytest.raises(ValueError, match=message):
        capture_run(run, 4, LAYER, ("fprop",), tmp_path / "c.safetensors")


@pytest.mark.slow
def test_a_loss_with_other_bits_than_in_the_run_is_said(unmeasured, tmp_path):
    run, messages = with_metric_of_step_4(unmeasured, tmp_path / "run", "loss", 1.5), []
    capture_run(run, 4, LAYER, ("fprop",), tmp_path / "c.safetensors", say=messages.append)
    assert "and was 1.5 in the run, so the operands have other bits than the run's" in messages[-1]


@pytest.mark.slow
def test_a_loss_that_is_nan_again_has_the_same_bits(unmeasured, tmp_path, monkeypatch):
    run, messages = with_metric_of_step_4(unmeasured, tmp_path / "run", "loss", None), []
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self: {**step(self), "loss": math.nan})
    capture_run(run, 4, LAYER, ("fprop",), tmp_path / "c.safetensors", say=messages.append)
    assert len(messages) == 1


@pytest.fixture
def copied(unmeasured, tmp_path):
    """A run whose files one test may change."""
    return shutil.copytree(unmeasured, tmp_path / "run")


@pytest.mark.parametrize("step", [1, 4])  # from the beginning, and from a checkpoint
def test_a_capture_of_a_run_whose_configuration_was_edited_is_refused(copied, step, monkeypatch):
    monkeypatch.setattr("octile.lab.run.Trainer", lambda *_: pytest.fail("the run was loaded"))
    file = copied / "config.json"
    file.write_text(file.read_text().replace('"lr": 0.003', '"lr": 0.03'))
    message = r"config\.json was changed after the run began: optim\.lr is 0\.03 instead of 0\.003 in step_00000002"
    with pytest.raises(ValueError, match=message):
        capture_run(copied, step, LAYER)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_a_capture_says_which_settings_have_changed(copied, step):
    file, messages = copied / "config.json", []
    file.write_text(file.read_text().replace('"micro_batches": 1', '"micro_batches": 2'))
    capture_run(copied, step, LAYER, ("fprop",), say=messages.append)
    assert messages[0].startswith("micro_batches: 1 before, 2 now: gradients are summed in another order")


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_a_capture_warns_of_another_number_of_threads(copied, step, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    message = f"step_00000002 was computed with threads {threads}, this machine has {threads + 1}: steps that it comp"
    with pytest.warns(UserWarning, match=message):
        capture_run(copied, step, LAYER, ("fprop",), say=lambda line: None)


def test_a_capture_on_the_same_machine_warns_of_nothing(copied, recwarn):
    capture_run(copied, 4, LAYER, ("fprop",), say=lambda line: None)
    assert not [warning for warning in recwarn if "computed with" in str(warning.message)]


@pytest.mark.parametrize("damage", [lambda state: state.write_text("{broken"), Path.unlink], ids=["damaged", "lost"])
def test_a_capture_from_the_beginning_needs_no_later_checkpoint(copied, damage):
    for state in (copied / "checkpoints").glob("*/state.json"):
        damage(state)
    assert load(capture_run(copied, 1, LAYER, ("fprop",), say=lambda line: None)).step == 1


def test_a_capture_without_a_named_step_is_of_the_next_step_and_in_the_run_folder(unmeasured):
    path = capture_run(unmeasured, None, LAYER, say=lambda line: None)
    assert path == unmeasured / "captures" / "step_00000005.safetensors"
    assert {captured.gemm for captured in load(path).gemms} == {"fprop", "dgrad", "wgrad"}


@pytest.mark.parametrize("step", [0, 6])
def test_a_step_that_the_run_does_not_have_is_refused(unmeasured, step):
    with pytest.raises(ValueError, match=rf"step must be from 1 to 5 \(the step after the last\), not {step}"):
        capture_run(unmeasured, step)


def test_a_layer_that_the_run_does_not_have_is_refused(unmeasured):
    with pytest.raises(ValueError, match="no layer matches 'lm_head'"):
        capture_run(unmeasured, 2, "lm_head")


@pytest.mark.slow
def test_a_capture_names_the_layers_of_which_no_gemm_is_observed(run_with):
    run, said = run_with(steps=2, recipe="exact", model=EXACT_MODEL), []
    capture = load(capture_run(run, 1, "*.0.self_attn.*", say=said.append))
    assert f"not captured: {KV_B_PROJ}: a batch-invariant recipe absorbs it into attention" in said[-1]
    assert not any(gemm.layer == KV_B_PROJ for gemm in capture.gemms)
    with pytest.raises(ValueError, match="layers must match other layers than"):
        capture_run(run, 1, KV_B_PROJ)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        capture_run(tmp_path, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"telemetry_every": -1}, "telemetry_every must be at least 0, not -1"),
        ({"telemetry_every": 7}, "telemetry_every must be from 1 to 6, the run's steps, or 0 for none; not 7"),
        ({"telemetry_layers": "*.down"}, "telemetry_layers has no effect without telemetry: add --telemetry-every N"),
        ({"guards": Path("rules.toml")}, "guards need telemetry: add --telemetry-every N"),
        ({"telemetry_every": 1, "telemetry_layers": "nothing"}, "no layer matches 'nothing'"),
        (
            {
                "telemetry_every": 1,
                "telemetry_layers": LAYER,
                "guards": Path("rules.toml"),
                "guards_text": f'[[rule]]\nwhen = "{ALWAYS}"\nthen = "warn"\nlayers = "model.layers.1.*"\n',
            },
            r"no layer matches 'model\.layers\.1",
        ),
        (
            {"telemetry_every": 1, "recipe": "exact", "model": EXACT_MODEL, "telemetry_layers": KV_B_PROJ},
            "layers must match other layers than",
        ),
        (
            {
                "telemetry_every": 1,
                "recipe": "exact",
                "model": EXACT_MODEL,
                "guards": Path("rules.toml"),
                "guards_text": SWITCH,
            },
            "guards must not switch a GEMM to BF16 under recipe 'exact'",
        ),
    ],
)
def test_bad_options_are_refused_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        observer(micro(**changes))


def test_a_missing_file_of_guards_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the file of rules .*none\.toml.* does not exist"):
        observer(micro(telemetry_every=1, guards=tmp_path / "none.toml"))


def test_a_file_of_guards_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "rules.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"rules\.toml is damaged: byte 0 is not UTF-8"):
        observer(micro(telemetry_every=1, guards=tmp_path / "rules.toml"))


@pytest.mark.slow
def test_a_run_that_is_as_long_as_the_interval_is_measured_once(run_with):
    rows = lines(run_with(2, LAYER, steps=2) / "telemetry.jsonl")
    assert {row["step"] for row in rows} == {2}


def test_a_run_without_8_bit_gemms_has_nothing_to_measure():
    with pytest.raises(ValueError, match="telemetry measures GEMMs in 8 bits, and recipe 'bf16' has none"):
        observer(micro(recipe="bf16", telemetry_every=1))


# ---- weights before quantization


def test_the_newest_weights_of_a_run_are_those_that_were_not_rounded(unmeasured):
    model, name = load_newest_weights(unmeasured)
    assert name == "step_00000004"
    stored, _ = load_checkpoint(unmeasured / "checkpoints" / name)
    own = model.state_dict()
    assert own
    assert all(torch.equal(tensor, stored[f"model.{name}"]) for name, tensor in own.items())
    rounded = hugging_face.load(unmeasured).state_dict()[f"{LAYER}.weight"]
    assert not torch.equal(own[f"{LAYER}.weight"], rounded)


def test_a_folder_that_is_no_run_or_has_no_checkpoint_has_no_newest_weights(copied):
    assert load_newest_weights(copied / "model") is None
    shutil.rmtree(copied / "checkpoints")
    assert load_newest_weights(copied) is None


def test_preflight_says_which_weights_it_reads(unmeasured):
    assert read_model(unmeasured)[1] == "those of step_00000004, before quantization"
    model, weights = read_model(unmeasured / "model")
    assert "the error of w is missing" in weights
    assert model.training
