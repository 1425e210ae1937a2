"""Tests of calls in a subprocess."""

import math
import os
import time

import pytest

from octile.bench.subprocess_call import call_in_subprocess


def test_the_result_comes_back():
    assert call_in_subprocess(math.hypot, 3, 4, seconds=60) == 5


def test_the_message_of_an_exception_comes_back():
    with pytest.raises(RuntimeError, match="ValueError: math domain error"):
        call_in_subprocess(math.sqrt, -1, seconds=60)


@pytest.mark.slow
def test_a_call_that_never_ends_is_killed():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="has not ended within"):
        call_in_subprocess(time.sleep, 600, seconds=1)
    assert time.monotonic() - start < 60


def test_a_process_that_dies_is_reported():
    with pytest.raises(RuntimeError, match="died with exit code 3"):
        call_in_subprocess(os._exit, 3, seconds=60)
