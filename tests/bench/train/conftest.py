"""The text on which the trainers of these tests train, and how their processes start."""

import pytest

from tests.train.conftest import text
from tests.worlds import forked_context

__all__ = ["forked", "text"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of workers where there is no GPU, so that torch is imported once."""
    context = forked_context()
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
