"""Tests of the limits of an engine."""

import pytest

from octile.serve.config import EngineConfig


def test_a_step_of_fewer_tokens_than_its_batch_is_refused():
    with pytest.raises(ValueError, match=r"max_step_tokens must be at least .* = 96, not 95"):
        EngineConfig(max_batch=32, n_drafts=2, max_step_tokens=95)


@pytest.mark.parametrize("window", [4, 12])
def test_a_window_that_is_no_multiple_of_8_is_refused(window):
    with pytest.raises(ValueError, match=f"expert_window must be a multiple of 8, not {window}"):
        EngineConfig(expert_window=window)
