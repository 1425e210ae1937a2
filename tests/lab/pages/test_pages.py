"""Tests of the lab's pages: one file, a caption for every figure, and values as people write them."""

from types import SimpleNamespace

import numpy as np
import pytest

from octile.formats import E4M3, E5M2, INT8
from octile.lab.formats import facts, positive_values
from octile.lab.pages import accumulate, formats, formats_figures
from octile.lab.pages.figures import short_names
from octile.lab.pages.formats import write_formats_page
from octile.lab.pages.page import Section, power, write_lab_page
from octile.lab.pages.real_tensors_figures import (
    Gradients,
    Int8AgainstE4M3,
    describe_flushed,
    describe_int8,
    describe_underflow,
    draw_int8,
)
from octile.lab.real_tensors import real_tensors
from octile.report.style import PHONE, drawing
from octile.report.svg import make_chart
from octile.report.table import Table
from tests.report.conftest import leave_empty, read_page
from tests.report.layout import faults, faults_of_pages, signed_zeros


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A page, and the faults of its figures."""
    path = tmp_path_factory.mktemp("lab") / "deep" / "formats.html"
    with pytest.MonkeyPatch.context() as patch:
        found = faults_of_pages(patch)
        return read_page(write_formats_page(path, real_tensors(None))), found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page with empty figures, which are most of the work."""
    with pytest.MonkeyPatch.context() as patch:
        leave_empty(patch, formats)
        return read_page(write_formats_page(tmp_path_factory.mktemp("lab") / "formats.html", real_tensors(None)))


@pytest.mark.slow
def test_a_page_needs_no_network(drawn):
    assert all(address.startswith("#") for address in drawn[0].loads)


PICTURES = (
    "Range",
    "The number line of a tile",
    "The number line in doublings",
    "The gap to the next value",
    "Relative error against magnitude",
    "Memory, scales included",
    "Between 1 and 2",
    "The lost update",
    "FP16's underflow, and loss scaling",
    "INT8 vs. E4M3, by magnitude",
    "What INT8 flushes to zero",
)


@pytest.mark.parametrize("title", PICTURES)
def test_every_figure_has_a_caption(page, title):
    assert title in page.words
    sentence = page.words.split(title + " ", 1)[1].split(". ")[0]
    assert len(sentence) > 40


@pytest.mark.slow
def test_every_figure_is_drawn_for_wide_and_narrow_screens(drawn):
    pictures = [attributes for tag, attributes in drawn[0].elements if tag == "svg"]
    assert len(pictures) == 2 * len(PICTURES)
    assert all(attributes.get("aria-label") for attributes in pictures)


@pytest.mark.slow
def test_the_texts_of_figures_do_not_touch(drawn):
    assert drawn[1] == []


@pytest.mark.slow
def test_the_number_of_ticks_follows_the_width(monkeypatch):
    share = np.full(24, 1 / 24)
    errors = {"e4m3": np.linspace(0, 1, 24), "int8": np.linspace(0, 1, 24)}
    data = Int8AgainstE4M3("a", share, errors, {"a": (0.0, 0.1)}, {"a": (30.0, 40.0)})
    with drawing(PHONE, 400) as figure:
        draw_int8(figure, data)
        assert faults(figure) == []


def test_the_page_says_what_snr_is(page):
    assert "SNR is the signal-to-noise ratio in dB" in page.words


def test_zeros_have_no_sign(page):
    assert signed_zeros(page.words) == []


def test_the_page_names_the_source_of_its_tensors(page):
    assert "Activations and gradients come from an untrained model of the preset tiny, on random tokens." in page.words


def test_the_table_has_the_values(page):
    for text in ("448", "57,344", "2⁻⁹", "2⁻¹²⁶", "3.40e38", "25.0%", "E2M1", "12.5%"):
        assert text in page.words


def test_captions_contain_the_values():
    rows = [vars(facts(fmt)) for fmt in (E4M3, E5M2, INT8)]
    values = {fmt.name: positive_values(fmt) for fmt in (E4M3, E5M2, INT8)}
    below = {name: sum(v < v_all[-1] / 16 for v in v_all) for name, v_all in values.items()}
    caption = formats_figures.describe_number_line(values)
    assert f"E4M3 has {below['e4m3']}, E5M2 has {below['e5m2']}, INT8 has {below['int8']}." in caption
    assert "E4M3 has 8 and E5M2 4." in formats_figures.describe_log_line(rows)


def test_the_lost_update_caption_names_the_final_weights():
    weights = {"fp32": np.array([1.0, 2.0]), "fp16": np.array([1.0, 1.5]), "bf16": np.array([1.0, 1.0])}
    caption = formats_figures.describe_lost_update(weights, 0.5, {"bf16": 2.0**-7})
    assert "1 + 2⁻⁷" in caption
    assert "reaches 1.5; FP32 reaches 2" in caption


def int8_against_e4m3(e4m3, int8, snr_db=(31.0, 43.0)):
    errors = {"e4m3": np.array(e4m3), "int8": np.array(int8)}
    return describe_int8(Int8AgainstE4M3("a", np.ones(len(e4m3)), errors, {"a": (0.0, 0.1)}, {"a": snr_db}))


def test_the_int8_caption_names_where_e4m3_becomes_better_and_where_int8_is_all_zeros():
    caption = int8_against_e4m3([0.03, 0.03, 0.03, np.nan, 0.03], [0.01, 0.02, 0.2, np.nan, 1.0])
    assert "INT8 is better for some values less than 2 octaves below the largest of their tile" in caption
    assert "From 4 octaves below the largest on, all values become zero in INT8." in caption
    assert "the SNR is 43.0 dB for INT8 and 31.0 dB for E4M3, since the SNR is dominated by large values." in caption


def test_the_int8_caption_when_int8_is_better():
    caption = int8_against_e4m3([0.03, 0.03, 0.2], [0.01, 0.02, 0.03])
    assert caption.startswith(
        "The input of a. INT8 is at least as good as E4M3 for values of every magnitude. Over all"
    )
    assert "become zero" not in caption
    assert caption.endswith("and 31.0 dB for E4M3.")


def test_the_int8_caption_when_e4m3_is_better_throughout():
    caption = int8_against_e4m3([0.01, 0.01, 1.0], [0.02, 1.0, 1.0], (43.0, 31.0))
    assert "E4M3 is at least as good as INT8 for values of every magnitude. From 1 octave below" in caption
    assert caption.endswith("the SNR is 31.0 dB for INT8 and 43.0 dB for E4M3.")


def test_the_int8_caption_names_a_size_at_which_int8_is_better_again():
    caption = int8_against_e4m3([0.03, 0.03, 0.05, 0.03], [0.01, 0.2, 0.04, 0.2])
    assert "less than 3 octaves below the largest of their tile" in caption


@pytest.mark.parametrize(
    ("flushed", "words"),
    [
        (
            {"a.down_proj": (0.001, 0.2), "a.up_proj": (0.0, 0.01), "b.experts.down": (0.0, 0.1)},
            "On average, 15.0% of the inputs of down",
        ),
        (
            {"a.down_proj": (0.001, 0.01), "a.up_proj": (0.0, 0.3)},
            "(SwiGLU outputs) become zero in INT8, and 30.0% of the others",
        ),
    ],
)
def test_values_flushed_by_int8_are_reported_for_down_projections_and_others(flushed, words):
    caption = describe_flushed(Int8AgainstE4M3("a", np.ones(1), {}, flushed, {}))
    worst = max(pair[1] for pair in flushed.values())
    assert f"up to {worst:.1%} of a layer's input" in caption
    assert words in caption


def test_without_other_layers_nothing_is_compared():
    caption = describe_flushed(Int8AgainstE4M3("a", np.ones(1), {}, {"a.down_proj": (0.0, 0.5)}, {}))
    assert "n average" not in caption


@pytest.mark.parametrize(
    ("in_tiles", "words"), [(0.0, "1×128 tiles, 0.00% become zero"), (0.75, "1×128 tiles, 75.00% become zero")]
)
def test_the_loss_of_gradients_in_tiles_is_reported(in_tiles, words):
    data = Gradients("a", np.zeros(1), np.ones(1), 2.0**16, 0.9, 0.01, 0.002, in_tiles)
    caption = describe_underflow(data)
    assert "In FP16, 90.0% of the gradients of a become zero" in caption
    assert "where 1.00% become zero. 0.2% overflow." in caption
    assert words in caption


@pytest.mark.parametrize(
    ("value", "text"),
    [(448.0, "448"), (57344.0, "57,344"), (2.0**-9, "2⁻⁹"), (1.0, "1"), (2.0**127, "2¹²⁷"), (3.4028235e38, "3.40e38")],
)
def test_powers(value, text):
    assert power(value) == text


def test_layer_names_omit_their_common_parts():
    assert short_names(["model.layers.0.mlp.up_proj"]) == ["0 · mlp.up_proj"]


def row(k, data, promote_every, worst):
    return SimpleNamespace(k=k, data=data, promote_every=promote_every, error=worst / 3, worst=worst, bias=-worst / 4)


ROWS = [
    *(row(k, data, None, 2.0**-16 * k) for data in ("normal", "positive") for k in (256, 4096)),
    *(row(k, data, 128, 6e-4) for data in ("normal", "positive") for k in (256, 4096)),
]


def test_the_accumulation_caption_is_about_k_4096():
    caption = accumulate.describe_errors(ROWS, "sm_90")
    assert caption.startswith(
        "On sm_90, K = 4,096: the worst error of sums of both signs is 0.060% with promotion every 128 and"
    )
    assert "6.2% without promotion" in caption


@pytest.mark.parametrize("interval", [None, 128])
def test_the_accumulation_caption_with_one_interval_names_no_other(interval):
    caption = accumulate.describe_errors([r for r in ROWS if r.promote_every == interval], "sm_90")
    assert ("without promotion" in caption) == (interval is None)
    assert ("every 128" in caption) == (interval == 128)


def test_the_caption_describes_how_the_accumulation_error_grows():
    caption = accumulate.describe_errors(ROWS, "sm_90")
    both = "the worst error of sums of both signs stays the same with promotion every 128 and grows 16-fold without"
    assert f"From K = 256 to 4,096 {both} promotion; that of sums of one sign stays" in caption
    assert caption.endswith(
        "With promotion it does not grow, because the tensor core sums only one interval at a time."
    )


def test_a_growing_error_with_promotion_is_reported():
    grows = [row(k, "normal", 128, k * 1e-5) for k in (256, 1024, 2048)]
    falls = [row(k, "normal", None, 1 / k) for k in (256, 1024, 2048)]
    caption = accumulate.describe_errors([*grows, *falls], "sm_90")
    assert "grows 8-fold with promotion every 128 and falls by 88% without promotion" in caption
    assert "does not grow" not in caption


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [
        (0.0, 0.0, "stays 0"),
        (0.0, 0.02, "goes from 0 to 2.0%"),
        (0.02, 0.021, "stays the same"),
        (0.02, 0.01, "falls by 50%"),
        (0.02, 0.03, "grows by 50%"),
        (0.02, 0.06, "grows 3-fold"),
        (0.02, 0.0, "falls by 100%"),
    ],
)
def test_descriptions_of_trends(begin, end, words):
    rows = [row(256, "positive", 64, begin), row(512, "positive", 64, end)]
    assert f"the worst error of sums of one sign {words} with promotion every 64" in accumulate.describe_errors(
        rows, "sm_90"
    )


def test_one_length_has_no_trend():
    assert "From K" not in accumulate.describe_errors([row(256, "normal", 64, 0.01)], "sm_90")


def test_the_short_table_has_one_column_per_interval():
    table = accumulate.short_table(ROWS)
    assert table.columns == ("worst error, promoted", "K", "never", "every 128")
    assert table.rows[1] == ("both signs, N(0, 1)", "4,096", "6.2%", "0.060%")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0203, "2.0%"), (0.00007, "0.0070%"), (0.14, "14%"), (0.0, "0%"), (-0.07, "-7.0%")]
)
def test_shares(value, text):
    assert accumulate.share(value) == text


def test_a_line_of_zeros_can_be_drawn():
    with drawing(400, 300) as figure:
        accumulate.draw_errors(figure, [row(256, "normal", 32, 0.0), row(512, "normal", 32, 0.0)])


def test_a_page_of_sections(tmp_path):
    chart = make_chart("A picture", "See this.", lambda figure: None, (200, 100))
    sections = [Section("One", [chart]), Section("Two", table=Table(("a", "b"), [("<x>", "1")]), note="A note.")]
    page = read_page(write_lab_page(tmp_path / "page.html", "Title", "Lead.", sections, ["Beware."]))
    for words in ("Title", "Lead.", "Beware.", "One", "A picture See this.", "Two", "<x>", "A note."):
        assert words in page.words
