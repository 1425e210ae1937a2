"""Tests of the tokens that tokenizer_config.json and added_tokens.json add to a tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from octile.tokenizer import END, Tokenizer

TEXT = "a field of tokens, and a field of others"


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train([TEXT, TEXT], 280)


def write(folder: Path, trained: Tokenizer, decoder: dict[int, Any], added: dict[str, Any] | None = None) -> Path:
    """Save a tokenizer, and name further tokens next to it; their ids count from the first free one."""
    trained.save(folder)
    n = trained.vocab_size
    config = {**trained.config, "added_tokens_decoder": {str(n + i): entry for i, entry in decoder.items()}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps({text: n + i for text, i in added.items()}))
    return folder


def test_a_special_token_of_the_configuration_has_its_id_and_is_text_in_a_text(trained, tmp_path):
    read = Tokenizer.load(write(tmp_path, trained, {0: {"content": "<|im_end|>", "special": True}}))
    assert read.backend.token_to_id("<|im_end|>") == trained.vocab_size
    assert read.decode([trained.vocab_size]) == "<|im_end|>"
    assert read.encode("a<|im_end|>") == trained.encode("a<|im_end|>")


def test_another_token_of_the_configuration_is_found_in_texts(trained, tmp_path):
    read = Tokenizer.load(write(tmp_path, trained, {0: {"content": "field of"}}))
    assert trained.vocab_size in read.encode(TEXT)
    assert read.decode(read.encode(TEXT)) == TEXT


def test_added_tokens_json_adds_tokens(trained, tmp_path):
    read = Tokenizer.load(write(tmp_path, trained, {1: {"content": "field of"}}, {"tokens": 0, "field of": 1}))
    assert {trained.vocab_size, trained.vocab_size + 1} <= set(read.encode(TEXT))


def test_tokens_that_tokenizer_json_has_change_nothing(trained, tmp_path):
    read = Tokenizer.load(write(tmp_path, trained, {trained.end - trained.vocab_size: {"content": END}}))
    assert read.fingerprint == trained.fingerprint


def test_a_tokenizer_with_added_tokens_is_saved_with_them(trained, tmp_path):
    read = Tokenizer.load(write(tmp_path, trained, {0: {"content": "<|im_end|>", "special": True}}))
    read.save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == read.fingerprint


@pytest.mark.parametrize(
    ("decoder", "added", "message"),
    [
        ({5: {"content": "x y"}}, None, r"'x y' must have the id 2\d+, but 2\d+ is its id or the next free one"),
        ({-1: {"content": "x y"}}, None, r"the id 2\d\d of the added token 'x y' is that of '"),
        ({0: {"content": 3}}, None, r"tokenizer_config.json: added_tokens_decoder.2\d\d.content must be text, not 3"),
        ({0: {"special": True}}, None, r"tokenizer_config.json: added_tokens_decoder.2\d\d.content is missing"),
        ({0: "x"}, None, r"added_tokens_decoder must have ids and their tokens, not '2\d\d': 'x'"),
        ({0: {"content": "x y"}}, {"z": 0}, "'z' has the id 2.., but added_tokens_decoder has 'x y' there"),
        ({}, {"z": 0.5}, "added_tokens.json: the id of 'z' must be a whole number, not 2"),
    ],
)
def test_tokens_that_cannot_be_added_are_refused(trained, tmp_path, decoder, added, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.load(write(tmp_path, trained, decoder, added))
