"""The lab's pages: whole in one file, every picture with its sentence, figures as a person writes them."""

from types import SimpleNamespace

import numpy as np
import pytest

from octile.formats import E4M3, E5M2, INT8
from octile.lab.formats import facts, positive_values
from octile.lab.pages import write_formats_page
from octile.lab.real_tensors import real_tensors
from octile.report import lab_accumulate, lab_formats
from octile.report.figures import drawing
from octile.report.lab_page import Section, Table, power, write_lab_page
from octile.report.lab_real import Int8AgainstE4M3, say_int8, shortened
from octile.report.svg import make_chart
from tests.report.conftest import read_page


@pytest.fixture(scope="module")
def tensors():
    return real_tensors(None)


@pytest.fixture(scope="module")
def page(tensors, tmp_path_factory):
    return read_page(write_formats_page(tmp_path_factory.mktemp("lab") / "deep" / "formats.html", tensors))


def test_a_page_needs_no_network(page):
    assert all(address.startswith("#") for address in page.loads)


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
    "INT8 against E4M3, by size",
    "What INT8 flushes to zero",
)


@pytest.mark.parametrize("title", PICTURES)
def test_every_picture_is_there_with_a_sentence(page, title):
    assert title in page.words
    sentence = page.words.split(title + " ", 1)[1].split(". ")[0]
    assert len(sentence) > 40


def test_every_picture_is_drawn_for_desk_and_telephone(page):
    pictures = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(pictures) == 2 * len(PICTURES)
    assert all(attributes.get("aria-label") for attributes in pictures)


def test_the_page_says_where_its_tensors_come_from(page):
    assert "Real tensors here come from an untrained model of the preset tiny, on random tokens." in page.words


def test_the_table_has_the_figures(page):
    for text in ("448", "57,344", "2⁻⁹", "2⁻¹²⁶", "3.40e38", "25.0%"):
        assert text in page.words


def test_sentences_carry_the_figures():
    rows = [vars(facts(fmt)) for fmt in (E4M3, E5M2, INT8)]
    values = {fmt.name: positive_values(fmt) for fmt in (E4M3, E5M2, INT8)}
    below = {name: sum(v < v_all[-1] / 16 for v in v_all) for name, v_all in values.items()}
    said = lab_formats.say_number_line(values)
    assert f"E4M3 has {below['e4m3']} values, E5M2 {below['e5m2']} and INT8 {below['int8']}" in said
    assert "E4M3 8, E5M2 4" in lab_formats.say_log_line(rows)


def test_the_lost_update_says_where_each_weight_arrives():
    weights = {"fp32": np.array([1.0, 2.0]), "fp16": np.array([1.0, 1.5]), "bf16": np.array([1.0, 1.0])}
    said = lab_formats.say_lost_update(weights, 0.5, {"bf16": 2.0**-7})
    assert "1 + 0.007812" in said
    assert "it arrives at 1.5" in said


def test_int8s_sentence_names_the_octave_where_e4m3_becomes_better():
    errors = {"e4m3": np.array([0.03, 0.03, 0.03]), "int8": np.array([0.01, 0.02, 0.2])}
    pairs = {"a": (0.0, 0.1)}
    said = say_int8(Int8AgainstE4M3("a", np.ones(3) / 3, errors, pairs, {"a": (31.0, 43.0)}))
    assert "better from 2 octaves below the largest on" in said
    assert "INT8's SNR is 43.0 dB and E4M3's 31.0 dB" in said


@pytest.mark.parametrize(
    ("value", "text"),
    [(448.0, "448"), (57344.0, "57,344"), (2.0**-9, "2⁻⁹"), (1.0, "1"), (2.0**127, "2¹²⁷"), (3.4028235e38, "3.40e38")],
)
def test_powers(value, text):
    assert power(value) == text


def test_layers_are_named_without_what_all_share():
    assert shortened(["model.layers.0.mlp.up_proj"]) == ["0 · mlp.up_proj"]


def row(k, data, promote_every, worst):
    return SimpleNamespace(k=k, data=data, promote_every=promote_every, error=worst / 3, worst=worst, bias=-worst / 4)


ROWS = [
    *(row(k, data, None, 2.0**-16 * k) for data in ("normal", "positive") for k in (256, 4096)),
    *(row(k, data, 128, 6e-4) for data in ("normal", "positive") for k in (256, 4096)),
]


def test_the_accumulation_sentence_is_about_4096():
    said = lab_accumulate.say_accumulate(ROWS, "sm_90")
    assert said.startswith(
        "On sm_90, K = 4,096: sums of both signs are off by up to 0.060% when promoted every 128 and"
    )
    assert "6.2% when never promoted" in said


@pytest.mark.parametrize("interval", [None, 128])
def test_the_accumulation_sentence_with_one_interval_speaks_of_no_other(interval):
    said = lab_accumulate.say_accumulate([r for r in ROWS if r.promote_every == interval], "sm_90")
    assert ("never promoted" in said) == (interval is None)
    assert ("every 128" in said) == (interval == 128)


def test_the_short_table_has_a_column_an_interval():
    table = lab_accumulate.short_table(ROWS)
    assert table.columns == ("worst error, promoted", "K", "never", "every 128")
    assert table.rows[1] == ("both signs, N(0, 1)", "4,096", "6.2%", "0.060%")


@pytest.mark.parametrize(
    ("value", "text"), [(0.0203, "2.0%"), (0.00007, "0.0070%"), (0.14, "14%"), (0.0, "0.000000%"), (-0.07, "-7.0%")]
)
def test_shares(value, text):
    assert lab_accumulate.share(value) == text


def test_a_line_of_zeros_can_be_drawn():
    with drawing(400, 300) as figure:
        lab_accumulate.draw_accumulate(figure, [row(256, "normal", 32, 0.0), row(512, "normal", 32, 0.0)])


def test_a_page_of_sections(tmp_path):
    chart = make_chart("A picture", "See this.", lambda figure: None, (200, 100))
    sections = [Section("One", [chart]), Section("Two", table=Table(("a", "b"), [("<x>", "1")]), note="A note.")]
    page = read_page(write_lab_page(tmp_path / "page.html", "Title", "Lead.", sections, ["Beware."]))
    for words in ("Title", "Lead.", "Beware.", "One", "A picture See this.", "Two", "<x>", "A note."):
        assert words in page.words
