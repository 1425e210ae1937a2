"""Shared by the tests of serving: a tokenizer of a few hundred tokens, and the folder of a model."""

import argparse
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from octile.tokenizer import Tokenizer
from tests.serve.models import save_untrained
from tests.train.conftest import MICRO
from tests.worlds import forked_context


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(argparse)], MICRO.vocab_size)


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory) -> Path:
    """The folder of a model that is not trained, as `octile serve` reads it."""
    return save_untrained(MICRO, tokenizer, tmp_path_factory.mktemp("served") / "micro")


@pytest.fixture(scope="module")
def forked_processes() -> Iterator[None]:
    """Fork what a server starts where there is no GPU, so that torch and FastAPI are imported once."""
    context = forked_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("multiprocessing.get_context", lambda method: context)
        yield
