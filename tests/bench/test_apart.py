"""Calls in another process."""

import math
import os
import time

import pytest

from octile.bench.apart import apart


def test_the_result_comes_back():
    assert apart(math.hypot, 3, 4, seconds=60) == 5


def test_the_message_of_an_exception_comes_back():
    with pytest.raises(RuntimeError, match="ValueError: math domain error"):
        apart(math.sqrt, -1, seconds=60)


def test_what_never_ends_is_killed():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="has not ended within"):
        apart(time.sleep, 600, seconds=1)
    assert time.monotonic() - start < 60


def test_a_process_that_dies_is_told():
    with pytest.raises(RuntimeError, match="died with exit code 3"):
        apart(os._exit, 3, seconds=60)
