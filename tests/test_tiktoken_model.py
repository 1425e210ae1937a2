"""Tests of Moonshot's tiktoken.model: ids are those of byte-pair encoding by ranks, written out here once more."""

import base64
import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from octile.tiktoken_model import PATTERN
from octile.tokenizer import Tokenizer

TEXT = (
    """The quick brown fox's tail: I'LL go, don't WE'VE 1234567 of them?\n\n  \t x  y\r\n
def f(x):\n        return x + 1  # ===== ____ -----
你好世界，中文English混合 北京市 Pascal 漢字かなカナ ヽ々〆 한국어 텍스트
Привет, мир! Ελληνικά ǅ ʰ עברית العَرَبِيَّة हिन्दी में ไทย é e\u0301 ﬁ ſ 'ſ K’s ½ ١٢٣
👩‍👩‍👧 👍🏽 🇩🇪 \u200b\u00a0\u3000x \u2028\u2029 \x00\x01"""
    + 37 * " "
    + "a"
    + 9 * "ab"
    + 17 * "\n"
)
WORDS = regex.compile("(?V1)" + "|".join(PATTERN))
N_MERGED = 500
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(256 + N_MERGED): {"content": "[BOS]", "special": True},
        str(257 + N_MERGED): {"content": "[EOS]", "special": True},
        str(300 + N_MERGED): {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
    },
}


def make_ranks() -> dict[bytes, int]:
    """The bytes, and parts of the words of the text in a drawn order."""
    words = [word.encode() for word in WORDS.findall(TEXT)]
    parts = {word[i:j] for word in words for i in range(len(word)) for j in range(i + 2, min(i + 9, len(word) + 1))}
    drawn = random.Random(0).sample(sorted(parts), N_MERGED)
    return {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *drawn])}


RANKS = make_ranks()


def reference_ids(text: str) -> list[int]:
    """The ids of a text: in each word the leftmost pair of the lowest rank is merged, as long as there is one."""
    ids = []
    for word in WORDS.findall(text):
        parts = [word.encode()] if word.encode() in RANKS else [bytes([byte]) for byte in word.encode()]
        while pairs := [(RANKS[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]:
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


def write(folder: Path, lines: Sequence[bytes] | None = None, **config: object) -> Path:
    """Write a folder with a tokenizer like Kimi-K2's, and return it."""
    found = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_bytes(b"\n".join(found if lines is None else lines) + b"\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.load(write(tmp_path_factory.mktemp("kimi")))


def test_the_ids_of_a_multilingual_text_are_those_of_the_ranks(tokenizer):
    assert tokenizer.encode(TEXT) == reference_ids(TEXT)


@given(text=st.text(st.sampled_from(sorted({*TEXT, *" \n\r\t'sSlL1aA"})), max_size=30))
def test_the_ids_of_any_text_are_those_of_the_ranks(tokenizer, text):
    assert tokenizer.encode(text) == reference_ids(text)


@given(text=st.text())
def test_any_text_survives_encoding(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_bytes_of_tokens_are_known(tokenizer):
    assert tokenizer.token_bytes[: len(RANKS)] == list(RANKS)


def test_special_tokens_have_their_ids_and_the_others_reserved_names(tokenizer):
    ids = [256 + N_MERGED, 257 + N_MERGED, 258 + N_MERGED, 300 + N_MERGED, 511 + N_MERGED]
    names = ["[BOS]", "[EOS]", f"<|reserved_token_{ids[2]}|>", "<|im_end|>", f"<|reserved_token_{ids[4]}|>"]
    assert [tokenizer.backend.id_to_token(token) for token in ids] == names
    assert (tokenizer.begin, tokenizer.end, tokenizer.vocab_size) == (ids[0], ids[1], 512 + N_MERGED)


def test_special_tokens_in_a_text_are_encoded_as_text(tokenizer):
    assert tokenizer.encode("[BOS]<|im_end|>") == reference_ids("[BOS]<|im_end|>")


def test_a_saved_tokenizer_is_read_with_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert again.fingerprint == tokenizer.fingerprint


def test_code_in_the_folder_is_read_for_its_pattern_and_not_run(tmp_path):
    code = "\n".join(f'r"""{part}"""' for part in PATTERN)
    (write(tmp_path) / "tokenization_kimi.py").write_text(f"raise SystemExit\n{code}")
    assert Tokenizer.load(tmp_path).encode("你好a") == reference_ids("你好a")


def test_another_pattern_is_refused(tmp_path):
    (write(tmp_path) / "tokenization_kimi.py").write_text(r"pattern = r'\p{L}+'")
    with pytest.raises(ValueError, match=r"tokenization_kimi\.py has another pattern than Kimi-K2's, without \[\\p"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenization_qwen.QWenTokenizer", None])
def test_the_tokenizer_of_another_class_is_refused(tmp_path, name):
    write(tmp_path, auto_map={"AutoTokenizer": [name, None]})
    with pytest.raises(
        ValueError, match=r"tiktoken\.model: its pattern is known if auto_map .* but it names '?(tok|No)"
    ):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["tokenization_moonshot.TikTokenTokenizer", "moonshotai/Kimi-K2--tokenization_kimi.TikTokenTokenizer"]
)
def test_the_other_names_of_the_class_are_known(tmp_path, name):
    write(tmp_path, auto_map={"AutoTokenizer": name})
    assert Tokenizer.load(tmp_path).encode("a") == [RANKS[b"a"]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([b"YQ== 0", b"YQ"], "line 2 is no token in base64 and its rank"),
        ([b"YQ== 0", b"Y 1"], "line 2 is no token in base64 and its rank"),
        ([b"YQ== 0", b"Yg== 2"], "the ranks of its 2 tokens are not 0, 1, 2, …"),
        ([b"YQ== 0", b"Yg== 1"], "the byte 0x00 is no token"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, lines, message):
    write(tmp_path, lines)
    with pytest.raises(ValueError, match=f"tiktoken.model is damaged: {message}"):
        Tokenizer.load(tmp_path)
