"""Shared by the tests of memory."""

import pytest


@pytest.fixture
def estimated_once() -> None:
    """Have each check of the memory estimate it: these are the tests of the estimates."""
