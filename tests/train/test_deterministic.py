"""What deterministic mode sets in the process, and that it is set back."""

import os

import pytest
import torch

from octile.train.deterministic import WORKSPACE_VARIABLE, deterministic
from octile.train.loop import train
from octile.train.trainer import Trainer
from tests.train.conftest import micro
from tests.train.test_loop import quiet

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


def test_inside_torch_and_cublas_are_told(no_workspace: None):
    with deterministic(True):
        assert settings() == (True, False, False, ":4096:8")


def test_a_workspace_of_the_users_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WORKSPACE_VARIABLE, ":16:8")
    with deterministic(True):
        assert os.environ[WORKSPACE_VARIABLE] == ":16:8"
    assert os.environ[WORKSPACE_VARIABLE] == ":16:8"


@pytest.mark.parametrize("asked", [False, True])
def test_after_an_error_all_is_as_it_was(asked: bool, no_workspace: None):
    before = settings()
    with pytest.raises(ZeroDivisionError), deterministic(asked):
        raise ZeroDivisionError
    assert settings() == before


@pytest.mark.parametrize("asked", [False, True])
def test_a_runs_steps_are_made_in_the_mode_that_is_asked(asked: bool, text, tmp_path, monkeypatch):
    seen = []
    step = Trainer.step
    monkeypatch.setattr(
        Trainer, "step", lambda self: (seen.append(torch.are_deterministic_algorithms_enabled()), step(self))[1]
    )
    train(micro(data=str(text), out=tmp_path / "run", deterministic=asked), False, quiet())
    assert seen == [asked] * 6
