"""What the sample of a run on texts begins with; that of examples is tested with them."""

import inspect
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest

from octile.tokenizer import Tokenizer
from octile.train.config import TrainConfig
from octile.train.run.results import sample_prompt


@pytest.fixture(scope="module")
def store() -> SimpleNamespace:
    tokenizer = Tokenizer.train([inspect.getsource(textwrap)], 300)
    tokens = [tokenizer.begin, *tokenizer.encode("A man in a boat began to speak to me.")]
    return SimpleNamespace(tokenizer=tokenizer, val=np.array(tokens, dtype=np.uint16))


@pytest.mark.parametrize("data", ["stdlib", "packages"])
def test_a_run_on_source_text_continues_a_definition(store, data):
    assert sample_prompt(TrainConfig(data=data), store) == "def "


def test_a_run_on_other_texts_continues_the_first_held_out_one(store):
    prompt = sample_prompt(TrainConfig(data="own.txt"), store)
    assert prompt == store.tokenizer.decode(store.val[1:9].tolist()).strip()
    assert "A man in a boat".startswith(prompt)


@pytest.mark.parametrize(
    ("documents", "prompt"),
    [
        (["a", "The next"], "a"),
        (["", "\n \n", "\n\n b\nc"], "b"),
        (["\N{GRINNING FACE}\N{GRINNING FACE}\N{GRINNING FACE}"], "\N{GRINNING FACE}\N{GRINNING FACE}"),
        (["x\N{GRINNING FACE}\N{GRINNING FACE}"], "x\N{GRINNING FACE}"),
        ([""], ""),
    ],
    ids=["a short one", "blank ones", "whole characters", "a cut character", "an empty one"],
)
def test_the_prompt_is_the_first_line_of_a_document_without_a_cut_character(store, documents, prompt):
    tokenizer = store.tokenizer
    tokens = [t for text in documents for t in (tokenizer.begin, *tokenizer.encode(text), tokenizer.end)]
    other = SimpleNamespace(tokenizer=tokenizer, val=np.array(tokens, dtype=np.uint16))
    assert sample_prompt(TrainConfig(data="own.txt"), other) == prompt


def test_a_prompt_that_is_given_is_taken(store):
    assert sample_prompt(TrainConfig(data="own.txt", prompt=""), store) == ""
