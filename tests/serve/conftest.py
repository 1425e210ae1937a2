"""Shared by the tests of serving: a tokenizer of a few hundred tokens."""

import argparse
import inspect

import pytest

from octile.tokenizer import Tokenizer
from tests.train.conftest import MICRO


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(argparse)], MICRO.vocab_size)
