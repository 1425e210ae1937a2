"""The text on which the trainers of these tests train."""

from tests.train.conftest import text

__all__ = ["text"]
