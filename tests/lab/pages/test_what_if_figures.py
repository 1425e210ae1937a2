"""Tests of the figures of what-if, hardware and preflight: captions written from the data, and unusual data."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from octile.lab.pages import hardware_figures, outliers_figures, preflight, what_if_figures
from octile.lab.pages.figures import Heat, draw_heat
from octile.lab.pages.hardware_figures import Change, SnrCurve
from octile.lab.pages.outliers_figures import Map
from octile.lab.pages.preflight import Predicted
from octile.lab.pages.what_if_figures import QuantizationLoss, SumLoss
from octile.report.style import PHONE, WIDE, drawing
from tests.report.layout import faults

LOSSES = [
    QuantizationLoss("e4m3", "1x128", "up", 32.0, 8.25),
    QuantizationLoss("e4m3", "1x128", "down", 12.0, 8.25),
    QuantizationLoss("int8", "tensor", "up", 30.0, 8.0),
    QuantizationLoss("int8", "tensor", "down", 20.0, 8.0),
    QuantizationLoss("e5m6", "row", "float32", 50.0, 12.1),
]


def test_the_best_and_the_worst_8_bit_quantization_are_named():
    caption = what_if_figures.describe_quantization(LOSSES, 7)
    assert "averaged over 7 GEMMs" in caption
    assert "is E4M3 1×128 with power of two, up with 32.0 dB, and the worst is" in caption
    assert "E4M3 1×128 with power of two, down with 12.0 dB" in caption


def test_the_cost_of_rounding_down_is_the_mean_over_variants():
    assert (
        "down instead of up costs 15 dB on average, since the largest values"
        in what_if_figures.describe_quantization(LOSSES, 7)
    )


def test_rounding_down_without_harm_is_not_reported():
    other_way = [replace(LOSSES[0], snr_db=12.0), replace(LOSSES[1], snr_db=32.0)]
    caption = what_if_figures.describe_quantization(other_way, 7)
    assert "down instead of up gains 20 dB on average." in caption
    assert "saturate" not in caption


@pytest.mark.parametrize(("snr", "warned"), [(30.0, False), (36.5, True)])
def test_a_warning_is_shown_where_int8_ranks_first(snr, warned):
    caption = what_if_figures.describe_quantization([*LOSSES, QuantizationLoss("int8", "row", "float32", snr, 8.0)], 7)
    assert ("The best INT8 dot is 4.5 dB above the best E4M3 dot" in caption) == warned
    assert ("SNR is dominated by large values" in caption) == warned


@pytest.mark.parametrize(
    ("snr", "verdict"), [(60.0, "less error than"), (31.0, "about as much error as"), (20.0, "more error than")]
)
def test_accumulation_error_is_compared_with_quantization_error(snr, verdict):
    sums = [SumLoss("sm_90, never", {"fprop": snr, "wgrad": None}), SumLoss("sm_90, every 32", {"fprop": 90.0})]
    caption = what_if_figures.describe_sums(sums, "E4M3", 30.0, 4096)
    assert f"sm_90, never, with {snr:.0f} dB in fprop; it causes {verdict} quantization" in caption
    assert "4,096 products" in caption


def test_accumulation_without_error():
    assert "all sums" not in what_if_figures.describe_sums([SumLoss("a", {"fprop": 50.0})], "E4M3", 30.0, 4)
    assert "all sums of these GEMMs are exact" in what_if_figures.describe_sums(
        [SumLoss("a", {"fprop": None})], "E4M3", 30.0, 4
    )


HEAT = Heat(["model.layers.0.up", "model.layers.1.up"], ["fprop", "wgrad"], [[30.0, None], [25.0, 35.0]])


def test_the_worst_and_the_best_gemm_are_named():
    caption = what_if_figures.describe_heat(HEAT, "so")
    assert "The lowest is in fprop of 1 · up (25.0 dB), the highest in wgrad of 1 · up (35.0 dB)" in caption


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([[30.0, 32.0], [25.0, 20.0]], "by −1.5 dB on average; 1 · up loses most (−5.0 dB)"),
        ([[30.0, 32.0], [25.0, 26.0]], "by +1.5 dB on average; 1 · up gains least (+1.0 dB)"),
    ],
)
def test_changes_of_layers_between_steps(cells, words):
    heat = Heat(HEAT.rows, ["step 1", "step 9"], cells)
    assert words in what_if_figures.describe_steps(heat, "fprop", "so")


def test_layers_with_one_step_have_no_change():
    heat = Heat(HEAT.rows, ["step 1", "step 9"], [[30.0, None], [None, 26.0]])
    assert "changes" not in what_if_figures.describe_steps(heat, "fprop", "so")


def test_the_worst_cell_is_the_deepest():
    with drawing(400, 200) as figure:
        draw_heat(figure, HEAT, "SNR")
        alpha = {round(p.get_x() + 0.48): {} for p in figure.axes[0].patches}
        for p in figure.axes[0].patches:
            alpha[round(p.get_x() + 0.48)][round(p.get_y() + 0.45)] = p.get_alpha()
    assert alpha[0][1] > alpha[0][0] > alpha[1][1]
    assert 0 not in alpha[1]  # there is no figure


def shades(heat):
    """The colors of a heat map's cells by their text, and the texts of its legend."""
    with drawing(400, 200) as figure:
        draw_heat(figure, heat, "SNR")
        cells, key = figure.axes
        colors = {text.get_text(): patch.get_alpha() for text, patch in zip(cells.texts, cells.patches, strict=True)}
        return colors, [label.get_text() for label in key.get_xticklabels()]


def test_a_color_means_the_same_snr_in_every_heat_map():
    narrow, _ = shades(Heat(["a"], ["fprop", "wgrad"], [[30.0, 30.1]]))
    wide, _ = shades(Heat(["a"], ["fprop", "wgrad"], [[30.0, 5.0]]))
    assert narrow["30.0"] == wide["30.0"]
    assert abs(narrow["30.0"] - narrow["30.1"]) < 0.01


def test_a_heat_map_has_a_legend_with_the_ends_of_its_scale():
    colors, legend = shades(Heat(["a"], ["1", "2", "3", "4"], [[-3.0, 10.0, 40.0, 60.0]]))
    assert legend == ["≤ 10 dB", "25 dB", "≥ 40 dB"]
    assert colors["-3.0"] == colors["10.0"] > colors["40.0"] == colors["60.0"]


def test_the_texts_of_a_heat_map_do_not_touch_on_a_telephone():
    heat = Heat(["model.layers.10.mlp.shared_experts.down_proj"], ["fprop", "dgrad", "wgrad"], [[30.0, 25.0, 28.0]])
    with drawing(PHONE, heat.height) as figure:
        draw_heat(figure, heat, "SNR")
        assert faults(figure) == []


SIZE = np.ones((4, 6))
SIZE[0, 2], SIZE[3, 2], SIZE[3, 5] = 500.0, 300.0, 2.0


def test_the_position_of_the_largest_value_is_reported():
    caption = outliers_figures.describe_map(Map("up", SIZE, ["first token", ".", "newline", "other tokens"], 100.0))
    assert "500 times the median, in channel 2 of token 0 (first token)" in caption
    assert "Channel 2 holds 100% of the 2 dots" in caption


def without(kind, massive, output, others):
    names = ("INT8, one scale a tensor", "E4M3, tiles of 1×128")
    return SimpleNamespace(
        kind=kind, tokens=4, massive=massive, output=output, others=dict(zip(names, others, strict=True))
    )


def test_layers_without_outliers_are_reported():
    rows = [without("first token", 3, 0.2, (0.5, 1.0)), without("all tokens", 3, 0.25, (0.4, 1.0))]
    caption = outliers_figures.describe_removal(rows, 100.0)
    assert "first token: 3 in 4" in caption
    assert "keep 40% of their error with INT8, one scale a tensor, and 100% with E4M3, tiles of 1×128" in caption
    assert "output changes by 25%, so the outliers carry much of the information." in caption
    assert "a tile confines an outlier to its own token" in caption


def test_harmless_outliers_are_not_blamed():
    rows = [without("first token", 3, 0.001, (0.99, 0.5)), without("all tokens", 3, 0.002, (0.99, 0.5))]
    caption = outliers_figures.describe_removal(rows, 100.0)
    assert caption.endswith("and 50% with E4M3, tiles of 1×128. The layer's output changes by 0%.")


def test_an_input_without_outliers_is_reported():
    assert "No value is 100 times" in outliers_figures.describe_removal(
        [without("all tokens", 0, 0.0, (1.0, 1.0))], 100.0
    )


CURVE = SnrCurve([13, 14, 15], [60.0, 68.0, 76.0], 70.0, 30.0, 1024)


def test_the_number_of_bits_that_matches_promotion():
    caption = hardware_figures.describe_bits(CURVE)
    assert "13 fraction bits the sums have 60 dB, and the next bit adds 8 dB" in caption
    assert "15 bits would match promotion every 128." in caption
    assert "Quantization alone has 30 dB; a much higher SNR of the sums has no benefit." in caption


def test_quantization_without_loss_is_not_mentioned():
    assert "Quantization" not in hardware_figures.describe_bits(replace(CURVE, cast_db=None))


@pytest.mark.parametrize("quantization", [None, 30.0])
def test_the_curve_is_drawn_with_or_without_quantization_error(quantization):
    with drawing(380, 300) as figure:
        hardware_figures.draw_bits(figure, SnrCurve([13, 14], [None, 68.0], None, quantization, 4))
        assert len(figure.axes[0].lines) == (1 if quantization is None else 2)


def test_the_largest_saving_of_memory_traffic_is_named():
    rows = [
        Change("a", "HBM", 100, 60, None),
        Change("b", "HBM", 100, 30, None),
        Change("c", "core", 900, 1, (30.0, 29.5)),
    ]
    assert "“b” saves most: memory traffic falls from 100 B to 30 B" in hardware_figures.describe_bytes(rows, "HBM")
    assert "c −0.50 dB" in hardware_figures.describe_errors(rows[2:])


def predicted(snr=10.0, measured=12.0, excepted=True):
    return Predicted("model.layers.0.e.3", "model.layers.0.e", "wgrad", snr, measured, "x", 0.25, excepted)


def test_the_riskiest_gemm_is_named():
    caption = preflight.describe_risk([predicted(), predicted(30.0, None, False)], "deepseek_v3", 20.0)
    assert "1 of 2 GEMMs is below 20 dB; 1 is advised to stay in BF16." in caption
    assert "wgrad of 0 · e.3, 10.0 dB, caused by the quantization of x, where 25% of the values become zero" in caption


def test_exceptions_for_the_sake_of_another_gemm_are_distinguished():
    caption = preflight.describe_risk([predicted(), predicted(30.0)], "deepseek_v3", 20.0)
    assert "1 of 2 GEMMs is below 20 dB; 2 are advised to stay in BF16 (the two weights of experts share" in caption


def test_a_terminal_shows_no_caption_of_a_picture():
    rows = [predicted(10.0, 13.0), predicted(20.0, 16.0)]
    risk = preflight.describe_risk(rows, "deepseek_v3", 20.0, is_caption=False)
    check = preflight.describe_check(rows, 20.0, is_caption=False)
    assert risk.startswith("Predicted SNR in dB under deepseek_v3, with equal weight for every channel. 1 of 2")
    assert " The RMS difference is " in check
    assert not [word for word in ("orange", "legend", "dotted") if word in risk + check]
    captions = preflight.describe_risk(rows, "deepseek_v3", 20.0) + preflight.describe_check(rows, 20.0)
    assert all(word in captions for word in ("orange", "legend", "dotted"))


def test_batches_that_disagree_make_the_advice_unsure():
    rows = [replace(predicted(), batches=4, batches_below=1), replace(predicted(30.0), batches=4)]
    assert "In 1 GEMM the batches disagree" in preflight.describe_risk(rows, "deepseek_v3", 20.0)


def test_batches_that_agree_are_reported():
    rows = [replace(predicted(), batches=4, batches_below=4), replace(predicted(30.0), batches=4)]
    assert "All 4 batches agree in every GEMM." in preflight.describe_risk(rows, "deepseek_v3", 20.0)


def test_without_a_risk_there_are_no_exceptions():
    assert "None is below 20 dB" in preflight.describe_risk([predicted(30.0, None, False)], "deepseek_v3", 20.0)
    assert "Every GEMM is exact" in preflight.describe_risk([], "deepseek_v3", 20.0)


def test_the_error_of_predictions_is_reported():
    caption = preflight.describe_check([predicted(10.0, 13.0), predicted(20.0, 16.0), predicted(5.0, None)], 20.0)
    assert "Measured SNR of 2 GEMMs" in caption
    assert "Of 1 GEMM predicted below 20 dB, 1 was measured below it; of the others, 1 was." in caption
    assert "1 GEMM did not run in the real step, the lowest predicted at 5.0 dB" in caption
    assert "the RMS difference is 3.5 dB" in caption  # √((9 + 16) / 2)


def test_no_gemm_below_the_bound_is_said_in_words():
    caption = preflight.describe_check([predicted(30.0, 31.0), predicted(25.0, 22.0)], 20.0)
    assert "No GEMM was predicted below 20 dB, and none was measured below it." in caption
    assert "0 GEMMs" not in caption


def test_the_risk_of_an_expert_is_in_the_row_of_its_layer():
    assert preflight.heat_of([predicted()]) == Heat(["model.layers.0.e"], ["wgrad"], [[10.0]])


@pytest.mark.one_case
@pytest.mark.parametrize("width", [PHONE, WIDE])
@pytest.mark.parametrize("lowest", [19.5, 5.0, -60.0, 30.0])
def test_the_label_of_the_band_is_within_it_and_off_the_dotted_line(width, lowest):
    with drawing(width, 440) as figure:
        preflight.draw_check(figure, [predicted(lowest, lowest), predicted(45.0, 45.0)], 20.0)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        (label,) = (text.get_window_extent() for text in axes.texts)
        (band,) = (patch.get_window_extent() for patch in axes.patches)
        corners = axes.transData.inverted().transform([(label.x0, label.y0), (label.x1, label.y0)])
    assert band.x0 < label.x0 < label.x1 < band.x1
    assert band.y0 < label.y0 < label.y1 < band.y1
    assert all(y > x for x, y in corners)  # the line is y = x
