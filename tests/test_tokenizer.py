"""Tests of the tokenizer: it is lossless and deterministic, and transformers reads it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.tokenizer import BEGIN, END, Tokenizer

TEXTS = 2 * [
    "def area(width, height):\n    return width * height\n",
    "The area of a field is its width times its height.",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 300)


@pytest.fixture
def folder(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    return tmp_path


@given(text=st.text())
def test_any_unicode_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [BEGIN, f"a{END}b", f"{END}{BEGIN}", "  \t\r\n\n \x00 e\u0301 \u2028 👩‍👩‍👧"])
def test_special_tokens_and_control_characters_survive_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_a_text_are_encoded_as_text(tokenizer):
    assert not {tokenizer.begin, tokenizer.end} & set(tokenizer.encode(f"{BEGIN} text {END}"))


def test_a_batch_encodes_each_text_separately(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


@given(text=st.text())
def test_a_text_has_at_least_its_fewest_tokens(tokenizer, text):
    assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    longest = max(map(len, tokenizer.token_bytes))
    assert tokenizer.fewest_tokens("€" * longest) == 3


def test_nothing_is_said_of_the_tokens_of_a_text_that_is_normalized(tokenizer):
    from tokenizers import normalizers

    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.normalizer = normalizers.Strip()
    assert Tokenizer(backend, tokenizer.config).fewest_tokens(" " * 10_000) == 0


def test_training_merges_frequent_strings(tokenizer):
    assert len(tokenizer.encode(" width height")) < len(" width height") / 2


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    assert Tokenizer.train(TEXTS, 300).fingerprint == tokenizer.fingerprint


def test_the_vocabulary_has_the_requested_size(tokenizer):
    assert tokenizer.vocab_size == 300


def test_the_vocabulary_stays_small_where_nothing_occurs_twice():
    assert Tokenizer.train(["abc"], 300).vocab_size == 258


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"at least 258 \(256 bytes \+ 2\), not 257"):
        Tokenizer.train(TEXTS, 257)


def test_a_loaded_tokenizer_equals_the_saved_one(tokenizer, folder):
    assert Tokenizer.load(folder).fingerprint == tokenizer.fingerprint


def test_begin_and_end_are_found_without_a_config(tokenizer, folder):
    (folder / "tokenizer_config.json").unlink()
    loaded = Tokenizer.load(folder / "tokenizer.json")
    assert (loaded.begin, loaded.end) == (tokenizer.begin, tokenizer.end)


def test_transformers_loads_it_with_a_deepseek_config(tokenizer, folder):
    from transformers import AutoTokenizer

    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    theirs = AutoTokenizer.from_pretrained(str(folder))
    text = "  return area , \n\n\té 😀"
    assert theirs(text)["input_ids"] == [tokenizer.begin, *tokenizer.encode(text)]
    assert theirs.decode(tokenizer.encode(text)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id) == (tokenizer.begin, tokenizer.end)


def test_a_config_may_give_a_token_as_a_dict(tokenizer, folder):
    config = {"bos_token": {"content": BEGIN, "lstrip": False}, "eos_token": {"content": END}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).end == tokenizer.end


def test_one_special_token_is_used_as_begin_and_end(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": END}))
    loaded = Tokenizer.load(folder)
    assert loaded.begin == loaded.end


def test_truncation_and_padding_of_a_given_tokenizer_are_disabled(tokenizer, tmp_path):
    truncating = Tokenizer.train(TEXTS, 300).backend
    truncating.enable_truncation(4)
    truncating.enable_padding(length=8)
    truncating.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        Tokenizer.load(tmp_path)


def test_a_damaged_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer.load(tmp_path)


def test_a_damaged_config_is_refused(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Tokenizer.load(folder)


def test_a_config_that_is_no_object_is_refused(folder):
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must hold a JSON object, not \[\]"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": "</s>"}, "eos_token of .* must be a token of the tokenizer, not '</s>', which it does not have"),
        ({}, "eos_token of .* must be a token of the tokenizer, but is missing"),
        ({"eos_token": "<|end|>", "bos_token": "<s>"}, "bos_token of .*, not '<s>', which it does not have"),
    ],
)
def test_a_tokenizer_without_its_special_tokens_is_refused(folder, config, message):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"tokenizer '{folder}': {message}"):
        Tokenizer.load(folder)


def with_prefix(folder, post_processor, **config):
    """A loaded tokenizer with another post-processor and further fields of its config."""
    file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": post_processor}))
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | config))
    return Tokenizer.load(folder)


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}


@pytest.mark.parametrize("post_processor", [None, BYTE_LEVEL])
def test_a_prompt_begins_with_nothing_if_nothing_says_so(folder, post_processor):
    loaded = with_prefix(folder, post_processor)
    assert loaded.encode_prompt("def") == loaded.encode("def")


def test_add_bos_token_begins_a_prompt(folder):
    loaded = with_prefix(folder, BYTE_LEVEL, add_bos_token=True)
    assert loaded.encode_prompt("def") == [loaded.begin, *loaded.encode("def")]


def test_add_bos_token_without_a_begin_token_adds_nothing(folder):
    loaded = with_prefix(folder, BYTE_LEVEL, add_bos_token=True, bos_token=None)
    assert loaded.encode_prompt("def") == loaded.encode("def")


def test_a_post_processor_begins_a_prompt_with_its_tokens(tokenizer, folder):
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}} for name in (END, BEGIN)]
        + [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": END, "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in ((BEGIN, tokenizer.begin), (END, tokenizer.end))
        },
    }
    assert with_prefix(folder, template).prefix == [tokenizer.end, tokenizer.begin]


@pytest.mark.parametrize("post_processor", [None, BYTE_LEVEL])
def test_an_empty_prompt_is_the_begin_token(folder, post_processor):
    loaded = with_prefix(folder, post_processor)
    assert loaded.encode_prompt("") == [loaded.begin]


def test_a_prompt_has_the_ids_of_transformers(tokenizer, folder):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(folder)("def f")["input_ids"] == tokenizer.encode_prompt("def f")
