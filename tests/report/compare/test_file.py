"""Tests of compare.json: it is read as written, older files are read, and other content is refused."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from octile.report import read_result, write_compare_report
from octile.report.compare.file import write_result
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.report.compare.tables import outcome_rows
from octile.report.compare.token_differences import Group, TokenDifferences
from tests.report.compare.test_compare import compared, curve, diverged

EXPERIMENT = Path(__file__).parents[3] / "experiments" / "tiny" / "compare.json.gz"


def complete_result():
    group = Group("␣the", 12, 0.1, 0.02, -0.1, 0.03)
    groups = ((group,),) * 4
    tokens = TokenDifferences("deepseek_v3", 0.01, 30, 1, 2, 3, 4, *groups, passage=((" the", 0.25), ("\n", -0.5)))
    check = GradientCheck("deepseek_v3", 0, 1, (WeightGradient("lm_head.weight", 0.99, 1.5, 1.25),))
    ours = curve("deepseek_v3", 3.003, window_loss=(3.0, 3.01), speed_quartiles=(1.0, 2.0), yardstick_s=0.002)
    more = (curve("bf16", 3.1, seed=2),)
    return compared(ours, diverged(), bf16_more_seeds=more, tokens=(tokens,), gradients=(check,), config={"steps": 40},
                    nudge=((20, 0.003), (40, 0.002)),
                    recipe_files={"mine.toml": 'recipe = "deepseek_v3"'})  # fmt: skip


def test_a_written_result_is_read(tmp_path):
    write_result(tmp_path / "compare.json", complete_result(), {"cpu": "some"})
    assert read_result(tmp_path / "compare.json") == complete_result()


@pytest.mark.usefixtures("without_figures")
def test_the_page_can_be_written_from_the_file(tmp_path):
    page = write_compare_report(tmp_path, complete_result()).read_text()
    write_result(tmp_path / "compare.json", complete_result(), {})
    assert write_compare_report(tmp_path, read_result(tmp_path / "compare.json")).read_text() == page


def test_the_file_contains_the_outcomes(tmp_path):
    write_result(tmp_path / "compare.json", complete_result(), {"cpu": "some"})
    found = json.loads((tmp_path / "compare.json").read_text())
    ours, broken = found["outcome"]
    assert (ours["recipe"], ours["verdict"], ours["within_bar"]) == ("deepseek_v3", "one pair, within the noise", True)
    assert ours["gap"] == pytest.approx(0.001)
    assert (broken["gap"], broken["diverged_at"]) == (None, 26)
    assert found["measured_on"] == {"cpu": "some"}


def test_a_non_finite_loss_is_null_and_read_as_nan(tmp_path):
    broken = curve("a", 3.0, val_loss=(3.0, math.inf, math.nan, 3.0))
    write_result(tmp_path / "compare.json", compared(broken), {})
    text = (tmp_path / "compare.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    losses = read_result(tmp_path / "compare.json").recipes[0].val_loss
    assert [math.isnan(loss) for loss in losses] == [False, True, True, False]


def test_an_unknown_speed_is_null_in_the_file_and_a_dash_on_the_page(tmp_path):
    result = compared(curve("a", 3.0, tokens_per_s=math.nan))
    write_result(tmp_path / "compare.json", result, {})
    read = read_result(tmp_path / "compare.json")
    assert math.isnan(read.recipes[0].tokens_per_s)
    assert [row["speed"] for row in outcome_rows(read)] == ["6,000", "6,000", "–"]


@pytest.mark.slow
def test_a_file_of_an_earlier_version_is_read(tmp_path):
    content = json.loads(gzip.decompress(EXPERIMENT.read_bytes()))
    for name in ("bf16_more_seeds", "gradients", "measured_on", "outcome", "recipe_files", "tokens"):
        del content[name]
    for run in (content["bf16"], content["bf16_other_seed"], *content["recipes"]):
        for name in ("speed_quartiles", "window_loss", "yardstick_s"):
            del run[name]
    (tmp_path / "old.json").write_text(json.dumps(content))
    old = read_result(tmp_path / "old.json")
    assert old.outcome("deepseek_v3").gap == pytest.approx(0.00105, abs=5e-5)
    assert (old.tokens, old.gradients, old.bf16_more_seeds) == ((), (), ())
    assert write_compare_report(tmp_path, old).exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"bf16": 3}', '{"bf16": {"recipe": "bf16"}}', '{"preset": "tiny"}'])
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=r"compare\.json is not a comparison that octile compare wrote"):
        read_result(tmp_path / "compare.json")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_result(tmp_path / "compare.json")


def test_a_number_instead_of_a_curve_is_refused(tmp_path):
    write_result(tmp_path / "compare.json", replace(complete_result(), recipes=()), {})
    found = json.loads((tmp_path / "compare.json").read_text())
    (tmp_path / "compare.json").write_text(json.dumps({**found, "recipes": [4]}))
    with pytest.raises(ValueError, match="is not a comparison"):
        read_result(tmp_path / "compare.json")
