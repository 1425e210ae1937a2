"""Tests of the deadline for a GPU, with events of no GPU."""

import math
from types import SimpleNamespace

import pytest

from octile.parallel.gpu_events import wait_for
from octile.parallel.ranks import RanksTimeoutError


def test_a_gpu_that_waits_for_another_rank_is_not_waited_for_forever():
    with pytest.raises(RanksTimeoutError, match=r"timed out after 0\.01 s for the GPU to finish a step"):
        wait_for(SimpleNamespace(query=lambda: False), 0.01)


@pytest.mark.parametrize("timeout", [60, math.inf])
def test_a_gpu_that_finishes_in_time_is_waited_for(timeout):
    looks, waited = iter([False, True]), []
    wait_for(SimpleNamespace(query=lambda: next(looks), synchronize=lambda: waited.append(True)), timeout)
    assert waited == [True]
