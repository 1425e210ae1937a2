"""Tests of what deterministic mode sets in the process, and that it restores the settings afterwards."""

import os

import pytest
import torch

from octile.train.loop import train
from octile.train.run.deterministic import WORKSPACE_VARIABLE, deterministic
from octile.train.trainer import Trainer
from tests.train.conftest import micro, silent_console

Settings = tuple[bool, bool, bool, str | None]


def settings() -> Settings:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        os.environ.get(WORKSPACE_VARIABLE),
    )


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE_VARIABLE, raising=False)


def test_torch_and_cublas_are_set_to_deterministic(no_workspace: None):
    with deterministic(True):
        assert settings() == (True, False, False, ":4096:8")


def test_a_workspace_that_the_user_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":16:8")
    with deterministic(True):
        assert os.environ[WORKSPACE_VARIABLE] == ":16:8"
    assert os.environ[WORKSPACE_VARIABLE] == ":16:8"


@pytest.mark.parametrize("requested", [False, True])
def test_settings_are_restored_after_an_error(requested: bool, no_workspace: None):
    before = settings()
    with pytest.raises(ZeroDivisionError), deterministic(requested):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.slow
@pytest.mark.parametrize("requested", [False, True])
def test_a_run_trains_in_the_requested_mode(requested: bool, text, tmp_path, monkeypatch):
    seen = []
    launch = Trainer.launch
    monkeypatch.setattr(
        Trainer, "launch", lambda self: (seen.append(torch.are_deterministic_algorithms_enabled()), launch(self))[1]
    )
    train(micro(data=str(text), out=tmp_path / "run", deterministic=requested), False, silent_console())
    assert seen == [requested] * 6
