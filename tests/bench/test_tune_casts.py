"""Tests of the search for faster settings of the quantization kernels that need no GPU."""

import pytest
import torch

from octile.bench import tune_casts
from octile.cli import main
from octile.kernels.cuda.quantize import launcher

every_kind = pytest.mark.parametrize("kind", launcher.SETTINGS)


@every_kind
def test_the_chosen_settings_are_the_first_candidate(kind):
    first, *others = tune_casts.candidates(kind)
    assert first == launcher.SETTINGS[kind]
    assert others
    assert first not in others
    assert all(other.keys() == first.keys() for other in others)


@every_kind
def test_a_candidate_is_what_is_launched(kind):
    chosen = launcher.SETTINGS[kind]
    for settings in tune_casts.candidates(kind)[:4]:
        launched = tune_casts.kernel(kind, settings)
        assert {name: launched.constants[name] for name in settings} == settings
    assert launcher.SETTINGS[kind] is chosen


@pytest.fixture
def measured(monkeypatch):
    """measured(seconds): a search whose candidates all fit; the i-th one takes seconds[i]."""

    def search(seconds, result=lambda settings: 0):
        def prepare(kind, x):
            return lambda: (torch.tensor([result(launcher.SETTINGS[kind])]),)

        monkeypatch.setattr(tune_casts, "DEVICE", "cpu")
        monkeypatch.setattr(tune_casts, "SHAPES", ((2, 8), (4, 8)))
        monkeypatch.setattr(tune_casts, "kernel", lambda kind, settings: settings)
        monkeypatch.setattr(tune_casts, "spills", lambda settings: settings["blocks"] == 6)
        monkeypatch.setattr(tune_casts, "prepared", prepare)
        monkeypatch.setattr(tune_casts, "work_seconds", lambda calls, rounds: {c: seconds(int(c)) for c in calls})
        return tune_casts.search("tiles")

    return search


def test_faster_settings_are_named_and_come_first(measured):
    lines = measured(lambda i: 1e-5 if i == 3 else 2e-5).splitlines()
    *settings, small, large, ratio = lines[1].split()
    assert (small, large, ratio) == ("10.0", "10.0", "0.500")
    assert lines[-1] == f"better: {' '.join(settings)}"


def test_settings_that_are_hardly_faster_are_not_chosen(measured):
    assert measured(lambda i: 2e-5 - 1e-9 * i).splitlines()[-1] == "the chosen settings are the fastest"


def test_settings_that_spill_are_left_out(measured):
    assert "blocks=6" not in measured(lambda _: 1e-5)


def test_settings_that_give_other_bits_are_an_error(measured):
    with pytest.raises(
        ArithmeticError, match=r"tiles with rows=\d warps=\d blocks=\d gives other bits than with rows=8"
    ):
        measured(lambda _: 1e-5, result=lambda settings: settings["rows"])


def test_it_needs_a_hopper_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU of sm_90"):
        tune_casts.run()


@pytest.mark.parametrize("option", [["--json", "x.json"], ["--shape", "1,2,3"], ["--minutes", "1"]])
def test_options_of_other_benchmarks_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "tune-casts", *option])
    assert "tune-casts" in capsys.readouterr().err
