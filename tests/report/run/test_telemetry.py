"""Tests of the telemetry on the page of a run."""

import math
import re

import pytest

from octile.report import save_figure, write_run_report
from octile.report.run.metrics import read_run
from octile.report.run.telemetry import caption_telemetry, worst_gemms
from tests.report.conftest import measured_step, read_page, telemetry, training
from tests.report.layout import faults_of_pages

STEPS = [training(step) for step in (1, 2, 3, 4)]


def read(make_run, rows):
    return read_run(make_run(STEPS, telemetry=rows))


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("rows", ["", [telemetry(2, "0", "fprop", quantization_snr_db=None)]], ids=["none", "null"])
def test_a_run_without_figures_of_telemetry_has_no_section_of_it(make_run, rows):
    assert "FP8 errors" not in read_page(write_run_report(make_run(STEPS, telemetry=rows))).words


@pytest.mark.usefixtures("without_figures")
def test_the_page_of_a_run_with_telemetry_has_its_figure_and_its_table(make_run):
    page = read_page(write_run_report(make_run(STEPS, telemetry=[*measured_step(2), *measured_step(4)])))
    assert "Telemetry FP8 errors The worst layer at each of 2 measured steps." in page.words
    table = page.words.split("The worst GEMMs of step 4 ")[1]
    assert table.startswith("Layer GEMM SNR Underflows Saturated amax model.layers.1.mlp.down_proj wgrad 24.8 dB 0.5%")


def test_the_caption_names_the_worst_gemms_of_all_measured_steps(make_run):
    rows = [*measured_step(2), *measured_step(4), telemetry(4, "3.up", "wgrad", "x", saturated=0.25)]
    assert caption_telemetry(read(make_run, rows)) == (
        "The worst layer at each of 2 measured steps. The lowest SNR of a GEMM was 24.5 dB, of wgrad of "
        "model.layers.1.mlp.down_proj at step 2. At most 0.5% of an operand's nonzero values became zero, of dy in "
        "wgrad of model.layers.1.mlp.down_proj at step 2. At most 0.25% of an operand's nonzero values saturated, of x "
        "in wgrad of model.layers.3.up at step 4."
    )


def test_the_caption_of_one_measured_step_says_what_was_not_lost(make_run):
    rows = [telemetry(3, "0", "fprop", "x"), telemetry(3, "0", "fprop", quantization_snr_db=31.0)]
    assert caption_telemetry(read(make_run, rows)) == (
        "The worst layer at step 3. The lowest SNR of a GEMM was 31.0 dB, of fprop of model.layers.0. "
        "No value became zero. No value saturated."
    )


def test_the_table_has_the_worst_gemms_by_each_error_of_the_last_measured_step(make_run):
    rows = [telemetry(2, "9", "fprop", quantization_snr_db=1.0)]
    rows += [telemetry(4, f"{n}", "fprop", quantization_snr_db=20.0 + n) for n in range(9)]
    rows += [telemetry(4, "7", "fprop", "x", underflows=3.0), telemetry(4, "7", "fprop", "w", underflows=0.5)]
    rows += [telemetry(4, "8", "fprop", "w", saturated=0.125, cur_amax=0.25)]
    found = worst_gemms(read(make_run, rows))
    assert found.step == 4
    assert [(row[0].removeprefix("model.layers."), *row[2:]) for row in found.rows] == [
        ("0", "20.0 dB", "–", "–", "–"),
        ("1", "21.0 dB", "–", "–", "–"),
        ("2", "22.0 dB", "–", "–", "–"),
        ("3", "23.0 dB", "–", "–", "–"),
        ("7", "27.0 dB", "3%", "0%", "1"),
        ("8", "28.0 dB", "0%", "0.12%", "0.25"),
    ]


def test_of_two_rows_of_an_operand_the_later_is_used(make_run):
    rows = [telemetry(step, "0", "wgrad", "dy", underflows=lost) for step, lost in ((4, 9.0), (2, 1.0), (4, 2.0))]
    assert [(row["step"], row["underflows%"]) for row in read(make_run, rows).telemetry] == [(2, 1.0), (4, 2.0)]


NOTHING = {"cur_amax": None, "underflows": None, "saturated": None}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("rows", "panels"),
    [
        pytest.param([*measured_step(2), *measured_step(4)], 3, marks=pytest.mark.slow),
        pytest.param([*measured_step(2), telemetry(4, "0", "fprop", "w", saturated=0.1)], 4, marks=pytest.mark.slow),
        ([telemetry(3, "0", "fprop", "x", cur_amax=0.0)], 1),
        pytest.param([telemetry(3, "0", "fprop", quantization_snr_db=30.0)], 1, marks=pytest.mark.slow),
        pytest.param([telemetry(3, "0", "fprop", "x", **NOTHING), *measured_step(4)], 3, marks=pytest.mark.slow),
        pytest.param(
            [telemetry(step, "0", "fprop", "x", cur_amax=10.0**step) for step in range(-6, 9)],
            2,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no saturated", "saturated", "zeros", "one GEMM", "null", "wide"],
)
def test_the_texts_of_the_figure_do_not_touch(make_run, monkeypatch, rows, panels):
    from octile.report.run import page as run_page

    monkeypatch.setattr(run_page, "FIGURES", {"telemetry": run_page.FIGURES["telemetry"]})
    found = faults_of_pages(monkeypatch)
    page = write_run_report(make_run(STEPS, telemetry=rows)).read_text()
    assert found == []
    titles = ("lowest SNR", "most underflows", "most saturated", "largest magnitude")
    on_desk = page.split('class="on-desk"')[1].split("</svg>")[0]
    assert sum(title in on_desk for title in titles) == panels


@pytest.mark.slow
def test_the_figure_can_be_saved_and_is_refused_without_telemetry(make_run, tmp_path):
    run = make_run(STEPS, telemetry=measured_step(2))
    assert save_figure(run, "telemetry", tmp_path / "a.svg").stat().st_size
    (run / "telemetry.jsonl").unlink()
    with pytest.raises(ValueError, match=r"recorded no quantization_snr_db or underflows%.*'telemetry'"):
        save_figure(run, "telemetry", tmp_path / "a.svg")


def test_a_statistic_that_is_not_finite_is_not_drawn(make_run):
    rows = [telemetry(2, "0", "fprop", quantization_snr_db=math.nan), *measured_step(4)]
    assert re.search(r"SNR of a GEMM was 24\.\d dB", caption_telemetry(read(make_run, rows)))
