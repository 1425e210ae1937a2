"""Tests of `octile compare`: recipes and BF16 with two seeds, trained from the same weights on the same batches."""

import errno
import gc
import io
import json
import os
import re
import shlex
import shutil
import signal
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from rich.console import Console

from octile.checkpoint.training import load_checkpoint
from octile.report import read_result, write_compare_report
from octile.signals import Stopped, Terminated
from octile.train.compare import run as compared_run
from octile.train.compare.compare import compare
from octile.train.compare.comparison import Comparison, parse_seeds, seeds_text
from octile.train.run import duration
from octile.train.run.console import RunConsole
from octile.train.trainer import Trainer
from tests.report.conftest import draw_no_figures
from tests.train.conftest import micro, silent_console, write_no_report


@pytest.fixture(scope="module", autouse=True)
def short_references() -> Iterator[None]:
    """Have comparisons time small GEMMs as their reference: those of 512³ take as long as some steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(duration, "REFERENCE_SIZE", 32)
        yield


@pytest.fixture(scope="module")
def compared(text, tmp_path_factory):
    """A comparison of four steps; only the page of its complete result has figures."""

    def write(folder, result):
        with pytest.MonkeyPatch.context() as patch:
            if not result.tokens:
                draw_no_figures(patch)
            return write_compare_report(folder, result)

    out = tmp_path_factory.mktemp("compare")
    screen = RunConsole(Console(file=io.StringIO(), width=120))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octile.train.compare.compare.write_compare_report", write)
        result = compare(micro(data=str(text), steps=4, validate_every=2), ("deepseek_v3", "bf16"), out, screen)
    return result, out, screen


@pytest.mark.slow
def test_the_memory_of_a_run_is_free_before_the_next(text, tmp_path, monkeypatch):
    models = []

    class Recorded(Trainer):
        def __init__(self, *arguments):
            assert [model for model in models if model() is not None] == []
            super().__init__(*arguments)
            models.append(weakref.ref(self.model))

    monkeypatch.setattr(compared_run, "Trainer", Recorded)
    gc.disable()  # a collection by chance must not be needed
    try:
        compare(micro(data=str(text), steps=1), ("deepseek_v3",), tmp_path / "out", silent_console())
    finally:
        gc.enable()
    assert len(models) == 3


@pytest.mark.slow
def test_every_run_starts_from_the_same_weights_on_the_same_batch(compared):
    result, _, _ = compared
    assert result.recipes[0].train_loss[0] == pytest.approx(result.bf16.train_loss[0], rel=1e-3)


def test_trainers_of_one_seed_have_the_same_weights_and_the_same_batches(new_trainer):
    bf16, fp8 = new_trainer(recipe="bf16"), new_trainer(recipe="deepseek_v3")
    assert all(a.equal(b) for a, b in zip(bf16.model.parameters(), fp8.model.parameters(), strict=True))
    assert all(bf16.batches.batch(n).equal(fp8.batches.batch(n)) for n in range(5))


@pytest.mark.slow
def test_the_other_seed_gives_another_run(compared):
    result, _, _ = compared
    assert result.bf16_other_seed.seed == result.bf16.seed + 1
    assert result.bf16_other_seed.train_loss[0] != result.bf16.train_loss[0]


def test_bf16_is_trained_twice_and_not_three_times(compared):
    result, _, _ = compared
    assert [curve.recipe for curve in result.recipes] == ["deepseek_v3"]


def test_the_page_and_the_numbers_are_written(compared):
    result, out, _ = compared
    assert (out / "report.html").stat().st_size > 10_000
    written = json.loads((out / "compare.json").read_text())
    assert written["bf16"]["val_loss"] == list(result.bf16.val_loss)


def test_the_noise_band_is_printed(compared):
    _, _, screen = compared
    assert "differ only in their seed" in " ".join(screen.console.file.getvalue().split())


def test_an_unknown_recipe_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="unknown recipe 'fp9'"):
        compare(micro(), ("fp9",), tmp_path / "out", RunConsole())
    assert not (tmp_path / "out").exists()


def test_a_comparison_is_not_overwritten(compared):
    _, out, _ = compared
    with pytest.raises(FileExistsError, match="holds a comparison already"):
        compare(micro(), ("deepseek_v3",), out, RunConsole())


def test_a_run_is_not_overwritten_by_a_comparison(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds a run already: choose another --out"):
        compare(micro(), ("deepseek_v3",), tmp_path, RunConsole())
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_finished_runs_are_written_when_the_next_run_is_interrupted(text, tmp_path, monkeypatch):
    import octile.train.compare.compare

    original = octile.train.compare.compare.train_compared_run

    def interrupted(config, *others):
        if config.recipe == "per_tensor":
            raise KeyboardInterrupt
        return original(config, *others)

    monkeypatch.setattr(octile.train.compare.compare, "train_compared_run", interrupted)
    config = micro(data=str(text), steps=2, validate_every=1)
    with pytest.raises(KeyboardInterrupt):
        compare(config, ("deepseek_v3", "per_tensor"), tmp_path, RunConsole(Console(file=io.StringIO())))
    assert len(json.loads((tmp_path / "compare.json").read_text())["recipes"]) == 1


def test_gradients_and_tokens_are_compared_with_bf16(compared):
    result, out, screen = compared
    assert [check.step for check in result.gradients] == [1, 2, 4]
    assert [tokens.recipe for tokens in result.tokens] == ["deepseek_v3"]
    written = read_result(out / "compare.json")
    assert str(written.tokens) == str(result.tokens)  # as text, in which NaN equals NaN
    assert written.gradients == result.gradients
    assert "gradient" in screen.console.file.getvalue()


def test_the_mean_loss_of_the_windows_is_the_held_out_loss(compared):
    result, _, _ = compared
    assert all(sum(c.window_loss) / len(c.window_loss) == pytest.approx(c.final_val_loss) for c in result.curves)


@pytest.mark.slow
def test_a_recipe_is_trained_with_every_seed_and_compared_with_bf16_of_that_seed(text, tmp_path):
    config = micro(data=str(text), steps=2, validate_every=1)
    screen = RunConsole(Console(file=io.StringIO()))
    result = compare(config, ("deepseek_v3",), tmp_path, screen, seeds=(5, 0), gradient_steps="none")
    assert [curve.seed for curve in result.baselines] == [5, 0]
    assert [curve.seed for curve in result.recipes] == [5, 0]
    assert all(c.train_loss[0] == pytest.approx(result.partner(c).train_loss[0], rel=1e-3) for c in result.recipes)
    assert result.gradients == ()


@pytest.mark.slow
def test_recipe_files_are_named_without_their_folders_and_stored(text, tmp_path):
    files = [tmp_path / folder / f"{name}.toml" for folder, name in (("a", "mine"), ("a", "same"), ("b", "same"))]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text('recipe = "deepseek_v3"\n')
    config = micro(data=str(text), steps=1, validate_every=1)
    screen = RunConsole(Console(file=io.StringIO()))
    result = compare(config, tuple(map(str, files)), tmp_path / "out", screen, gradient_steps="none")
    assert result.names == ("mine.toml", "a/same.toml", "b/same.toml")
    assert read_result(tmp_path / "out" / "compare.json").recipe_files["mine.toml"] == files[0].read_text()


def test_a_gradient_step_out_of_range_is_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="gradient_steps must be from 1 to 6"):
        compare(micro(), ("deepseek_v3",), tmp_path / "out", RunConsole(), gradient_steps="7")
    assert not (tmp_path / "out").exists()


def losses(result):
    return [(c.recipe, c.seed, c.train_loss, c.val_steps, c.val_loss, c.window_loss) for c in result.curves]


def stop_at(patch, at):
    """Send this process SIGTERM in a step of a comparison, counted over all of its runs."""
    original, launched = Trainer.launch, []

    def launch(self):
        launched.append(self)
        if len(launched) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        original(self)

    patch.setattr(Trainer, "launch", launch)


@pytest.fixture
def stopped_at(monkeypatch):
    return partial(stop_at, monkeypatch)


@pytest.fixture(scope="module")
def stopped_in_its_second_run(text, tmp_path_factory):
    """Without a comparison of gradients, as where a test compares only losses: it takes longer than the steps."""
    folder = tmp_path_factory.mktemp("stopped")
    source, out = shutil.copytree(text, folder / "text"), folder / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 6)
        write_no_report(patch)
        with pytest.raises(Stopped):
            compare(
                micro(data=str(source), steps=4, validate_every=2),
                ("deepseek_v3",),
                out,
                silent_console(),
                gradient_steps="none",
            )
    return source, out


@pytest.fixture
def stopped(stopped_in_its_second_run, text, tmp_path):
    """The source, which a test may change, and the folder of a comparison that was stopped in its second run."""
    source, out = stopped_in_its_second_run
    shutil.rmtree(source, ignore_errors=True)
    return shutil.copytree(text, source), shutil.copytree(out, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "finished", "continued"),
    [
        pytest.param(2, 0, 1, id="first run", marks=pytest.mark.exhaustive),
        pytest.param(4, 1, 0, id="last step of a run", marks=pytest.mark.exhaustive),
        pytest.param(11, 2, 1, id="recipe"),
        pytest.param(12, 3, 0, id="last step", marks=pytest.mark.exhaustive),
    ],
)
def test_a_stopped_comparison_is_resumed_with_the_same_losses(
    compared, text, tmp_path, stopped_at, at, finished, continued
):
    stopped_at(at)
    out, config = tmp_path / "it's here", micro(data=str(text), steps=4, validate_every=2)
    with pytest.raises(Stopped, match=r"stopped after step \d of ") as stopped:
        compare(config, ("deepseek_v3",), out, silent_console())
    assert str(stopped.value).endswith(f"; to continue: octile compare --resume --out {shlex.quote(str(out))}")
    assert stopped.value.exit_code == 143
    screen = silent_console()
    resumed = compare(config, ("deepseek_v3",), out, screen, resume=True)
    shown = screen.console.file.getvalue()
    assert "comparison.json: recipes deepseek_v3, seeds 0, gradient_steps start,middle,end, preset tiny" in shown
    assert shown.count("finished before") == finished
    assert shown.count("resumed at step") == continued
    assert losses(resumed) == losses(compared[0])
    assert resumed.gradients == compared[0].gradients
    assert str(resumed.tokens) == str(compared[0].tokens)


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_gone_begins_again_and_says_so(compared, text, tmp_path, stopped_at):
    stopped_at(2)
    config = micro(data=str(text), steps=4, validate_every=2)
    with pytest.raises(Stopped):
        compare(config, ("deepseek_v3",), tmp_path, silent_console(), gradient_steps="none")
    shutil.rmtree(tmp_path / "runs" / "bf16-seed0" / "checkpoints")
    screen = silent_console()
    resumed = compare(config, ("deepseek_v3",), tmp_path, screen, gradient_steps="none", resume=True)
    assert "bf16-seed0 holds no complete checkpoint: the run begins again" in screen.console.file.getvalue()
    assert losses(resumed) == losses(compared[0])


@pytest.mark.slow
def test_a_resumed_comparison_needs_its_source_no_more(compared, stopped):
    source, out = stopped
    shutil.rmtree(source)
    screen = silent_console()
    resumed = compare(Comparison.read(out).config, ("deepseek_v3",), out, screen, gradient_steps="none", resume=True)
    assert "finished before" in screen.console.file.getvalue()
    assert losses(resumed) == losses(compared[0])


@pytest.mark.slow
def test_other_tokens_than_those_of_a_finished_run_are_refused(stopped):
    source, out = stopped
    shutil.rmtree(out / "data")
    (source / "argparse.txt").unlink()
    with pytest.raises(ValueError, match=r"data are not those that bf16, seed 0, was trained on: bring them back"):
        compare(
            Comparison.read(out).config, ("deepseek_v3",), out, silent_console(), gradient_steps="none", resume=True
        )


@pytest.mark.parametrize("resume", [False, True])
def test_a_signal_before_the_first_run_says_to_start_again(compared, text, tmp_path, monkeypatch, resume):
    def interrupted(*arguments, **options):
        raise Terminated

    monkeypatch.setattr("octile.train.compare.compare.open_tokens", interrupted)
    out, config = tmp_path / "new", micro(data=str(text), steps=4, validate_every=2)
    if resume:
        _, out, _ = compared
        config = Comparison.read(out).config
    message = "start the same command again" + ("" if resume else ", without --resume") + "$"
    with pytest.raises(Stopped, match=message) as stopped:
        compare(config, ("deepseek_v3",), out, silent_console(), resume=resume)
    assert stopped.value.exit_code == 143


def test_a_full_disk_names_the_command_that_continues(text, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "state.json")

    monkeypatch.setattr("octile.train.compare.compare._compare", full)
    out, config = tmp_path / "new", micro(data=str(text), steps=4, validate_every=2)
    with pytest.raises(OSError, match="No space left") as error:
        compare(config, ("deepseek_v3",), out, silent_console())
    assert error.value.__notes__ == [f"to continue: octile compare --resume --out {out}"]


def test_a_finished_comparison_is_only_written_again(compared, monkeypatch):
    result, out, _ = compared
    monkeypatch.setattr(Trainer, "launch", lambda self: pytest.fail("a step was repeated"))
    config = Comparison.read(out).config
    assert losses(compare(config, ("deepseek_v3",), out, silent_console(), resume=True)) == losses(result)
    assert not list(out.glob("runs/*/checkpoints"))


@pytest.mark.slow
def test_a_killed_comparison_continues_at_its_last_checkpoint(compared, text, tmp_path, monkeypatch):
    original = Trainer.launch

    def killed(self):
        if self.strategy.recipe.name != "bf16" and self.steps_done == 3:
            raise KeyboardInterrupt  # no handler runs: nothing is saved
        return original(self)

    monkeypatch.setattr(Trainer, "launch", killed)
    config = micro(data=str(text), steps=4, validate_every=2, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt):
        compare(config, ("deepseek_v3",), tmp_path, silent_console(), gradient_steps="none")
    read = []

    def load(path, check):
        tensors, state = load_checkpoint(path, check)
        read.extend(weakref.ref(t) for name, t in tensors.items() if name.startswith("model."))
        return tensors, state

    def launch(self):
        assert [tensor for tensor in read if tensor() is not None] == []  # the checkpoint's memory is free again
        return original(self)

    monkeypatch.setattr(compared_run, "load_checkpoint", load)
    monkeypatch.setattr(Trainer, "launch", launch)
    screen = silent_console()
    resumed = compare(config, ("deepseek_v3",), tmp_path, screen, gradient_steps="none", resume=True)
    assert read
    assert "resumed at step 2" in screen.console.file.getvalue()
    assert losses(resumed) == losses(compared[0])


@pytest.mark.parametrize(
    ("changes", "others", "message"),
    [
        ({"steps": 5}, {}, "steps is 5 instead of 4"),
        ({}, {"recipes": ("per_tensor",)}, "recipes is .*per_tensor.* instead of .*deepseek_v3"),
        ({}, {"recipes": ()}, "recipes is bf16 instead of deepseek_v3"),
        ({}, {"seeds": (0, 1)}, "seeds is 0, 1 instead of 0"),
        ({"steps": 2}, {"gradient_steps": "1,3"}, "steps is 2 instead of 4, gradient_steps is 1,3 instead of start"),
        ({}, {"gradient_steps": "none"}, "gradient_steps is none instead of start,middle,end"),
    ],
)
def test_a_resumed_comparison_keeps_its_settings(compared, changes, others, message):
    _, out, _ = compared
    config = replace(Comparison.read(out).config, **changes)
    with pytest.raises(ValueError, match=f"a resumed comparison keeps its settings: {message}"):
        compare(config, **{"recipes": ("deepseek_v3",), **others}, out=out, console=silent_console(), resume=True)


@pytest.mark.parametrize(("name", "value"), [("recipes", ["per_tensor"]), ("seeds", [0, 7]), ("gradient_steps", "end")])
def test_an_edited_comparison_is_refused(compared, tmp_path, name, value):
    out = shutil.copytree(compared[1], tmp_path / "edited")
    file = out / "comparison.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(ValueError, match=r"comparison\.json was changed after the comparison began: change it back"):
        Comparison.read(out)


def test_a_comparison_names_no_seed_twice(compared, tmp_path):
    out = shutil.copytree(compared[1], tmp_path / "edited")
    file = out / "comparison.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seeds": [0, 0]}))
    with pytest.raises(ValueError, match=r"comparison\.json is damaged: seeds must differ, but one is there twice"):
        Comparison.read(out)


def test_an_edited_comparison_of_an_earlier_version_is_refused(compared, tmp_path):
    out = shutil.copytree(compared[1], tmp_path / "edited")
    file = out / "comparison.json"
    values = json.loads(file.read_text())
    del values["sha256"]
    file.write_text(json.dumps(values).replace('"lr": 0.003', '"lr": 0.03'))
    with pytest.raises(ValueError, match=r"changed after bf16, seed 0, began: optim\.lr is 0\.03 instead of 0\.003"):
        compare(Comparison.read(out).config, ("deepseek_v3",), out, silent_console(), resume=True)


def test_the_largest_seed_has_no_next_one_for_bf16(tmp_path):
    message = "seed must be below 9,223,372,036,854,775,807, because BF16 is trained with the next seed, too"
    with pytest.raises(ValueError, match=message):
        compare(micro(seed=2**63 - 1), ("deepseek_v3",), tmp_path / "out", silent_console())
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_comparison_cannot_be_resumed(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no comparison to resume"):
        compare(micro(), ("deepseek_v3",), tmp_path, silent_console(), resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipes": "deepseek_v3"}, "recipes must be a list, each text, not 'deepseek_v3'"),
        ({"seeds": ["0"]}, "seeds must be a whole number, not '0'"),
        ({"seeds": [-1]}, "seeds must be at least 0, not -1"),
        ({"gradient_steps": None}, "gradient_steps must be text, not None"),
        ({"recipe_texts": []}, r"recipe_texts must be an object, not \[\]"),
        ({"recipe_texts": {"own.toml": 1}}, r"recipe_texts\.own\.toml must be text, not 1"),
        ({"recipe_texts": {"own.toml": "recipe = 1"}}, r"recipe_texts\.own\.toml must say recipe"),
    ],
)
def test_a_comparison_with_a_wrong_value_is_damaged(tmp_path, changes, message):
    Comparison(micro(), ("deepseek_v3",), (0,), "none", {}).write(tmp_path)
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=f"comparison.json is damaged: {message}"):
        Comparison.read(tmp_path)


def test_a_comparison_that_is_cut_off_is_called_damaged_once(tmp_path):
    file = tmp_path / "comparison.json"
    file.write_text('{"seeds": ')
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))} is damaged: not JSON at byte 10: "):
        Comparison.read(tmp_path)


@pytest.mark.parametrize("name", ["deepseek_v3", "bf16"])
def test_a_recipe_that_is_named_twice_is_refused(tmp_path, name):
    message = f"^recipes must differ, but '{name},per_tensor,{name}' names {name} twice$"
    with pytest.raises(ValueError, match=message):
        compare(micro(), (name, "", "per_tensor", f" {name}"), tmp_path / "out", silent_console())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["2024", "9" * 40])
def test_a_seed_that_is_taken_for_a_number_of_seeds_is_refused(text):
    with pytest.raises(ValueError, match=f"seeds must be at most 1,000, not {text}: name one seed with a comma"):
        parse_seeds(text)


@pytest.mark.parametrize(("seeds", "first"), [((0,), 0), ((3, 4, 5), 3), ((0, 7), 0), ((9,), 0), ((5, 0), 0)])
def test_the_text_of_seeds_is_read_as_these_seeds(seeds, first):
    assert parse_seeds(seeds_text(seeds, first), first) == seeds
