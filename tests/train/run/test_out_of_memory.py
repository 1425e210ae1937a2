"""Tests of what a run says when memory runs out, and of what it measures then."""

import pytest
import torch

from octile.train.run import out_of_memory
from octile.train.run.out_of_memory import explain_out_of_memory
from octile.train.step.passes import Passes
from tests.train.conftest import MICRO, micro
from tests.train.run.test_bad_days import ALLOCATOR

CPU = torch.device("cpu")


def test_other_errors_are_unchanged():
    with pytest.raises(RuntimeError, match="something else"), explain_out_of_memory(micro(), CPU):
        raise RuntimeError("something else")


def test_running_out_of_memory_while_building_the_model_is_explained():
    with (
        pytest.raises(MemoryError, match=r"while the model was built on the cpu: it needs \d\.\d MB"),
        explain_out_of_memory(micro(), CPU),
    ):
        raise RuntimeError(ALLOCATOR)


def test_where_not_even_a_short_sequence_fits_the_model_is_too_large(new_trainer, monkeypatch):
    def fail(self, batch_BS, parts, labels_2=None):
        raise RuntimeError(ALLOCATOR)

    monkeypatch.setattr(Passes, "backward", fail)
    trainer = new_trainer()
    with (
        pytest.raises(MemoryError, match="leave too little memory for a sequence of 16 tokens: choose a smaller model"),
        explain_out_of_memory(trainer.config, CPU, trainer),
    ):
        trainer.step()


def test_memory_per_sequence_is_measured(new_trainer):
    trainer = new_trainer()
    need = out_of_memory._measure(trainer)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    assert need.fixed == 12 * parameters  # weight and gradient in FP32, two moments in BF16
    assert 32 * MICRO.vocab_size * 4 < need.sequence < 10**8  # includes the logits
    trainer.step()
    assert out_of_memory._measure(trainer).fixed == pytest.approx(
        need.fixed, rel=0.01
    )  # now measured, with the step counts
