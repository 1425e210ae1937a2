"""Tests of comparing recipes with BF16: the gap, the noise band, the bar."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from octile.report import (
    CompareResult,
    Curve,
    format_compare_table,
    save_compare_figure,
    verdict_sentence,
    write_compare_report,
)
from tests.report.conftest import read_page

STEPS, VAL_STEPS = tuple(range(1, 41)), (10, 20, 30, 40)


def curve(recipe: str, final: float, seed: int = 0, **changes) -> Curve:
    """A run whose held-out loss falls to `final`."""
    train = tuple(2.9 + 5.4 * math.exp(-step / 12) for step in STEPS)
    val = tuple(final + 40 / step - 1 for step in VAL_STEPS)
    return replace(Curve(recipe, seed, STEPS, train, VAL_STEPS, val, 6000.0, 130_000_000), **changes)


def compared(*recipes: Curve, **changes) -> CompareResult:
    return CompareResult("tiny", curve("bf16", 3.0), curve("bf16", 3.006, seed=1), recipes, **changes)


def diverged() -> Curve:
    some = {"steps": STEPS[:25], "train_loss": (3.0,) * 25, "val_steps": (10, 20), "val_loss": (6.0, 1e30)}
    return curve("global_scale", 9.0, diverged_at=26, **some)


def printed(result: CompareResult) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(format_compare_table(result))
    return console.file.getvalue()


def test_the_noise_band_is_the_distance_of_two_seeds():
    assert compared().noise_band == pytest.approx(0.002)


def test_the_noise_band_has_no_sign():
    assert replace(compared(), bf16_other_seed=curve("bf16", 2.994, seed=1)).noise_band == pytest.approx(0.002)


def test_the_gap_is_relative_and_signed():
    better = curve("deepseek_v3", 2.997)
    assert compared(better).gap(better) == pytest.approx(-0.001)


def test_the_gap_of_a_run_that_ended_early_is_not_a_number():
    assert math.isnan(compared().gap(diverged()))


def test_the_smoothed_gap_is_the_mean_of_the_last_quarter():
    recipe = curve("deepseek_v3", 3.003)
    sparse = replace(compared(recipe), bf16=curve("bf16", 3.0, val_steps=tuple(range(33, 41)), val_loss=(3.0,) * 8))
    recipe = replace(recipe, val_steps=tuple(range(33, 41)), val_loss=(9.0,) * 6 + (3.006, 3.012))
    assert sparse.smoothed_gap(recipe) == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("final", "verdict"),
    [
        (3.0030, "one pair, within the noise"),
        (3.0069, "one pair, beyond the noise"),
        (2.9880, "one pair, beyond the noise"),
    ],
)
def test_the_verdict_of_one_pair_is_about_the_noise_alone(final, verdict):
    recipe = curve("deepseek_v3", final)
    assert compared(recipe).outcome("deepseek_v3").verdict == verdict


def test_a_run_that_diverged_is_reported_as_diverged():
    outcome = compared(diverged()).outcome("global_scale")
    assert outcome.verdict == "diverged at step 26"
    assert not outcome.within_bar


def test_the_sentence_gives_gap_bar_and_noise():
    assert verdict_sentence(compared(curve("deepseek_v3", 3.003))) == (
        "On held-out text deepseek_v3 ends 0.10% above BF16 after 40 steps."
        " One pair of runs gives no verdict on the bar of 0.25%."
        " Two BF16 runs that differ only in their seed end 0.20% apart."
    )


@pytest.mark.parametrize("final", [3.0, 2.99999, 3.00001])
def test_the_sentence_names_no_side_of_a_gap_that_rounds_to_zero(final):
    sentence = verdict_sentence(compared(curve("deepseek_v3", final), curve("per_tensor", 2.997)))
    assert sentence.startswith(
        "On held-out text deepseek_v3 ends at BF16's loss after 40 steps; per_tensor ends 0.10% below BF16. "
    )


def test_the_sentence_names_every_recipe():
    sentence = verdict_sentence(compared(curve("deepseek_v3", 3.003), curve("per_tensor", 3.012), diverged()))
    assert sentence.startswith(
        "On held-out text deepseek_v3 ends 0.10% above BF16 after 40 steps; per_tensor ends 0.40% above BF16. "
    )
    assert f" {diverged().recipe}: diverged at step " in sentence
    assert sentence.count("Two BF16 runs") == 1


def test_losses_that_were_not_measured_are_reported_as_such():
    blank = {"val_steps": (), "val_loss": ()}
    result = CompareResult("tiny", curve("bf16", 3, **blank), curve("bf16", 3, 1, **blank), (curve("a", 3, **blank),))
    assert "a: not measured." in verdict_sentence(result)
    assert "was not measured" in verdict_sentence(result)


def test_losses_without_steps_are_refused():
    with pytest.raises(ValueError, match="each loss of bf16 needs its step"):
        Curve("bf16", 0, (1, 2), (3.0,), (), (), 1.0)


def test_the_table_contains_every_run():
    table = printed(compared(curve("deepseek_v3", 3.003), diverged()))
    for cell in ("bf16, seed 0", "bf16, seed 1", "3.0060", "+0.20%", "deepseek_v3", "+0.10%", "130 MB", "diverged"):
        assert cell in table


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    result = compared(curve("deepseek_v3", 3.003), curve("per_tensor", 3.3), diverged(), machine="2 CPU cores",
                      config={"steps": 40})  # fmt: skip
    return read_page(write_compare_report(tmp_path_factory.mktemp("compared"), result))


@pytest.mark.slow
def test_the_page_loads_nothing(page):
    assert all(address.startswith(("#", "data:")) for address in page.loads)
    assert not {"script", "link", "iframe", "img"} & set(page.tags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        "bf16, seed 1 +0.20% noise band +0.20% 3.0060 6,000 130 MB",
        "deepseek_v3 +0.10% one pair, within the noise +0.10% 3.0030 6,000 130 MB",
        "per_tensor +10.00% one pair, beyond the noise +10.00% 3.3000",
        "global_scale – diverged at step 26 – –",
    ],
)
def test_the_page_contains_the_numbers(page, row):
    assert row in page.words


def test_labels_stand_at_the_curves(page):
    assert {"deepseek_v3 +0.10%", "global_scale diverged", "bar −0.25%"} <= {
        line.strip() for line in page.text.split("\n")
    }


@pytest.mark.slow
def test_the_same_result_gives_the_same_page(tmp_path):
    result = compared(curve("deepseek_v3", 3.003))
    first = write_compare_report(tmp_path, result).read_bytes()
    assert write_compare_report(tmp_path, result).read_bytes() == first


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "recipes",
    [
        (),
        (curve("own_recipe", 3.0, val_steps=(), val_loss=()),),
        (curve("a", 3.0, train_loss=(math.nan,) * 40, val_loss=(math.nan,) * 4),),
        (curve("a", 3.0, steps=(), train_loss=(), val_steps=(), val_loss=(), diverged_at=1, state_bytes=None),),
    ],
    ids=["no recipe", "not measured", "NaN", "diverged at once"],
)
def test_incomplete_results_get_a_page(tmp_path, recipes):
    assert write_compare_report(tmp_path, compared(*recipes)).exists()


@pytest.mark.slow
def test_a_name_with_html_is_escaped(tmp_path):
    page = read_page(write_compare_report(tmp_path, compared(curve("<script>1</script>", 3.0))))
    assert "script" not in page.tags


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="folder must exist"):
        write_compare_report(tmp_path / "no", compared())


@pytest.mark.slow
def test_the_figure_can_be_saved_as_a_file(tmp_path):
    path = save_compare_figure(compared(curve("deepseek_v3", 3.003)), tmp_path / "compare.png")
    assert path.read_bytes().startswith(b"\x89PNG")
