"""The page of a run of reinforcement learning."""

import pytest

from octile.report.rl import CURVES, render_rl_report

SUMMARY = {
    "first_reward": 0.25,
    "last_reward": 0.875,
    "last_steps": 3,
    "tokens": 1234,
    "seconds": 65.0,
    "different_log_probs": 0,
}


def steps(delta: float = 0.0):
    names = dict.fromkeys((*CURVES, "accuracy", "format"), 0.5)
    return [{"step": n, "reward": n / 4, **names, "delta_largest": delta} for n in range(1, 4)]


@pytest.fixture(scope="module")
def page() -> str:
    text = {"prompt": "1 + 1 =", "completion": " <think> \x1b[31m", "answer": "2", "reward": 0.1}
    return render_rl_report("octile rl · run", steps(), [{"step": 1, "texts": [text]}], SUMMARY, {"lr": 1e-4})


@pytest.mark.slow
def test_it_has_all_curves_facts_and_settings(page):
    for curve in CURVES.values():
        assert f"<b>{curve.title}</b>" in page
    assert "<b>Reward</b> The reward was 0.250 in step 1 and 0.750 in step 3." in page
    assert "0.875" in page
    assert "<td>lr</td><td>0.0001</td>" in page


def test_it_escapes_texts(page):
    assert "<b>1 + 1 =</b> &lt;think&gt; " in page
    assert "\x1b" not in page


@pytest.mark.slow
def test_it_says_whether_all_bits_are_equal(page):
    assert "All log-probabilities have the same bits in engine and trainer, in all steps." in page
    other = render_rl_report("run", steps(0.125), [], SUMMARY, {})
    assert "The largest difference of a log-probability in engine and trainer was 0.125 in step 1" in other


@pytest.mark.slow
def test_it_has_no_curve_of_what_was_not_measured():
    lines = [{name: value for name, value in line.items() if name not in ("kl", "format")} for line in steps()]
    page = render_rl_report("run", lines, [], SUMMARY, {})
    assert "KL divergence" not in page


@pytest.mark.slow
def test_the_same_run_has_the_same_page(page):
    first, second = (render_rl_report("run", steps(), [], SUMMARY, {}) for _ in range(2))
    assert first == second
