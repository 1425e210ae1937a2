"""Tests of the page's sections on intervals, tokens and gradients."""

import gzip
import math
from dataclasses import replace

import pytest

from octile.report import read_result, write_compare_report
from octile.report.compare import outcome_figure
from octile.report.compare.curves_figure import draw_compare
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.report.compare.outcome_figure import caption_outcomes
from octile.report.style import PHONE, WIDE, drawing
from octile.report.svg import to_svg
from tests.report.compare.test_compare import compared, curve
from tests.report.compare.test_file import EXPERIMENT, complete_result
from tests.report.conftest import draw_no_figures, read_page
from tests.report.layout import faults, faults_of_pages, signed_zeros


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A page, and the faults of its figures."""
    with pytest.MonkeyPatch.context() as patch:
        found = faults_of_pages(patch)
        return read_page(write_compare_report(tmp_path_factory.mktemp("page"), complete_result())), found


@pytest.fixture(scope="module")
def page(drawn):
    return drawn[0]


@pytest.fixture(scope="module")
def uneven_page(tmp_path_factory):
    """The page of runs of an uneven speed, without figures."""
    uneven = curve("deepseek_v3", 3.003, speed_quartiles=(1.0, 3.0))
    folder = tmp_path_factory.mktemp("uneven")
    with pytest.MonkeyPatch.context() as patch:
        draw_no_figures(patch)
        return read_page(write_compare_report(folder, replace(complete_result(), recipes=(uneven,))))


@pytest.mark.parametrize(
    "words",
    [
        "one seed",
        "there is no interval over seeds",
        "Of 30 tokens that occur 10 times or more, 1 (3.3%) lie more than two standard errors above BF16",
        "␣the 12 +0.100 ± 0.020 −0.100 ± 0.030",
        "lm_head.weight 8.1° 0.9900 1.200",
        "At step 1 the angle of the whole gradient is 8.1° (cosine 0.9900), the largest is 8.1° in head",
        "upper over lower quartile",
    ],
)
def test_the_page_contains_the_measurements(uneven_page, words):
    assert words in uneven_page.words


@pytest.mark.slow
def test_the_passage_is_colored_by_the_loss_of_each_token(page):
    tokens = [(a["title"], a["style"]) for tag, a in page.elements if tag == "span" and "title" in a]
    assert [title for title, _ in tokens] == ["+0.25 nats", "−0.50 nats"]
    assert ("vermilion" in tokens[0][1], "blue" in tokens[1][1]) == (True, True)
    assert "↵" in page.text


@pytest.mark.usefixtures("without_figures")
def test_a_token_with_html_is_escaped(tmp_path):
    result = complete_result()
    tokens = replace(result.tokens[0], passage=(("<script>", 0.1), ("\x00", 0.0)))
    page = read_page(write_compare_report(tmp_path, replace(result, tokens=(tokens,))))
    assert "script" not in page.tags
    assert "<script>" in page.words


@pytest.mark.usefixtures("without_figures")
def test_non_finite_gradients_give_a_page(tmp_path):
    check = GradientCheck("deepseek_v3", 0, 3, (WeightGradient("lm_head.weight", math.nan, math.nan, 1.0),))
    page = read_page(write_compare_report(tmp_path, replace(complete_result(), gradients=(check,))))
    assert "No gradient of deepseek_v3 at step 3 was finite" in page.words


@pytest.mark.usefixtures("without_figures")
def test_the_page_shows_the_text_of_recipe_files(tmp_path):
    page = read_page(
        write_compare_report(tmp_path, replace(complete_result(), recipe_files={"mine.toml": 'recipe = "<b>"'}))
    )
    assert 'Content of mine.toml recipe = "<b>"' in page.words


@pytest.mark.parametrize(("windows", "said"), [((3.0, 3.01) * 4, True), ((), False)])
def test_the_caption_mentions_intervals_only_where_they_are_drawn(windows, said):
    result = compared(curve("deepseek_v3", 3.003, window_loss=windows))
    result = replace(result, bf16=replace(result.bf16, window_loss=windows))
    assert ("thin line" in caption_outcomes(result)) == said


@pytest.mark.slow
def test_the_texts_of_figures_do_not_touch(drawn):
    assert drawn[1] == []


@pytest.mark.slow
def test_the_texts_of_a_recorded_comparison_s_figures_do_not_touch(tmp_path, monkeypatch):
    (tmp_path / "compare.json").write_bytes(gzip.decompress(EXPERIMENT.read_bytes()))
    found = faults_of_pages(monkeypatch)
    write_compare_report(tmp_path, read_result(tmp_path / "compare.json"))
    assert found == []


@pytest.mark.slow
def test_a_wide_name_of_a_token_leaves_room_for_the_axis_label(tmp_path, monkeypatch):
    found, result = faults_of_pages(monkeypatch), complete_result()
    wide = replace(result.tokens[0].worst[0], name=30 * "W", count=1_000_000)
    tokens = replace(result.tokens[0], worst=(wide, *result.tokens[0].worst[1:]))
    write_compare_report(tmp_path, replace(result, tokens=(tokens,)))
    assert found == []


@pytest.mark.slow
def test_zeros_have_no_sign(tmp_path):
    equal = curve("deepseek_v3", 2.99999)
    page = read_page(write_compare_report(tmp_path, replace(complete_result(), recipes=(equal,))))
    assert signed_zeros(page.words) == []


@pytest.mark.slow
def test_a_figure_without_points_is_not_drawn(tmp_path):
    result = complete_result()
    check = GradientCheck("deepseek_v3", 0, 3, (WeightGradient("lm_head.weight", math.nan, math.nan, 1.0),))
    rare = replace(result.tokens[0], tokens=0, worst=(), best=())
    page = read_page(write_compare_report(tmp_path, replace(result, gradients=(check,), tokens=(rare,))))
    assert "Angle of" not in page.words
    assert "Tokens under" not in page.words
    assert "worst token" not in page.words


def test_one_worst_token_is_in_the_singular(page):
    assert "The worst token in numbers" in page.words


def test_every_plus_minus_is_explained(page):
    assert page.words.count("mean ± standard error") == 2  # by position, by frequency
    assert page.words.count("(nats, ± standard error)") == 2


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_names_of_outcomes_do_not_touch_dots_and_ticks(width):
    result = compared(curve("a_recipe_with_a_long_name", 2.7), curve("b", 2.9))
    with drawing(width, outcome_figure.height(result)) as figure:
        outcome_figure.draw_outcomes(figure, result)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        names = [text.get_window_extent() for text in axes.texts]
        drawn = [line.get_window_extent() for line in axes.lines if line.get_zorder() > 0]  # but the bars and zero
    assert len(drawn) >= 4
    assert not any(name.overlaps(box) for name in names for box in drawn)


@pytest.mark.parametrize("width", [PHONE, WIDE])
def test_lines_do_not_run_through_the_names_of_outcomes(width):
    result = compared(curve("a_recipe_with_a_long_name", 3.003))
    with drawing(width, outcome_figure.height(result)) as figure:
        outcome_figure.draw_outcomes(figure, result)
        svg = to_svg(figure, "outcomes", "")
        (axes,) = figure.axes
        behind = [line.get_zorder() for line in axes.lines if len(set(line.get_xdata())) == 1]
    assert svg.count("fill: var(--paper)") == len(axes.texts) == 2  # the page's color, also in the dark
    assert min(text.get_zorder() for text in axes.texts) > max(behind)


@pytest.mark.one_case
@pytest.mark.parametrize("width", [PHONE, WIDE])
@pytest.mark.parametrize("recipes", [1, 15, 40])
def test_the_labels_of_many_curves_stay_beside_the_axes(width, recipes):
    result = compared(*(curve(f"recipe{n}", 3.002 + n / 10_000) for n in range(recipes)))
    with drawing(width, 560) as figure:
        draw_compare(figure, result)
        assert faults(figure) == []
        for axes in figure.axes:
            boxes = [text.get_window_extent() for text in axes.texts]
            half = max(box.height for box in boxes) / 2 + 1
            assert all(axes.bbox.y0 - half <= box.y0 and box.y1 <= axes.bbox.y1 + half for box in boxes)
    assert len(boxes) == recipes + 3


@pytest.mark.slow
def test_a_label_that_has_room_stays_at_its_line():
    result = compared(*(curve(f"recipe{n}", 3.002 + n / 10_000) for n in range(12)))
    with drawing(WIDE, 560) as figure:
        draw_compare(figure, result)
        figure.draw_without_rendering()
        axes = figure.axes[1]
        (label,) = (text.get_window_extent() for text in axes.texts if text.get_text() == "bar −0.25%")
        line = axes.transData.transform((0, -0.25))[1]
    assert (label.y0 + label.y1) / 2 == pytest.approx(line, abs=2)
