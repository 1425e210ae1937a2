"""Tests of the text of growing tokens: characters and stop strings across the boundaries of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from octile.serve.engine.text import MARK, MAX_PENDING, TextStream
from octile.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["bytes", "decoder"])
def of_kind(request, tokenizer):
    """The tokenizer, and the same with a decoder that does more than concatenate bytes."""
    if request.param == "bytes":
        return tokenizer
    other = Tokenizer(type(tokenizer.backend).from_str(tokenizer.backend.to_str()), tokenizer.config)
    other.backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\u0000", "")])
    assert other.token_bytes is None
    return other


def pieces(tokenizer, tokens, stop=()):
    stream = TextStream(tokenizer, stop)
    return [stream.add(token) for token in tokens] + [stream.end()]


@given(tokens=st.lists(st.integers(0, 330), max_size=30))
def test_the_pieces_concatenate_to_the_decoded_tokens(tokenizer, tokens):
    """Tokens from 320 on are those of a model whose vocabulary is larger than the tokenizer's."""
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.fixture(scope="module")
def sentence_pieces() -> Tokenizer:
    """A tokenizer whose decoder strips the first space of a text, and makes bytes of tokens such as <0xE2>."""
    bytes_of_euro = [f"<0x{byte:02X}>" for byte in "\N{EURO SIGN}".encode()]
    texts = ["<s>", "</s>", *bytes_of_euro, "\u2581", "\u2581a", "b"]
    backend = Backend(models.WordLevel({text: i for i, text in enumerate(texts)}, "b"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@given(parts=st.lists(st.sampled_from([(0,), (1,), (2, 3, 4), (5,), (6,), (7,), (8,)]), max_size=12))
def test_pieces_concatenate_whatever_the_decoder_reads_before_a_token(sentence_pieces, parts):
    """Bytes that are no character may be as many replacement characters as the decoder pleases."""
    tokens = [token for part in parts for token in part]
    assert "".join(pieces(sentence_pieces, tokens)) == sentence_pieces.decode(tokens)


@pytest.mark.parametrize("repeated", [2, 5, 6, 99], ids=["byte", "space", "word", "no text"])
def test_a_long_text_is_not_decoded_again_for_each_token(sentence_pieces, monkeypatch, repeated):
    lengths = []
    decode = sentence_pieces.decode
    monkeypatch.setattr(sentence_pieces, "decode", lambda tokens: lengths.append(len(tokens)) or decode(tokens))
    found = "".join(pieces(sentence_pieces, [6, *[repeated] * 100]))
    assert max(lengths) <= 2 * MAX_PENDING + 1
    assert len(found) == {2: 101, 5: 101, 6: 201, 99: 1}[repeated]


def test_a_character_appears_when_its_last_byte_does(of_kind):
    tokens = of_kind.encode("\N{GRINNING FACE}!")
    assert len(tokens) == 5
    assert pieces(of_kind, tokens) == ["", "", "", "\N{GRINNING FACE}", "!", ""]


def test_bytes_that_are_no_character_appear_at_the_end(of_kind):
    tokens = of_kind.encode("a\N{GRINNING FACE}")[:-1]
    assert "".join(pieces(of_kind, tokens)) == "a\N{REPLACEMENT CHARACTER}"


@given(text=st.text("abc", max_size=20), stop=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop_string(tokenizer, text, stop):
    shown = "".join(pieces(tokenizer, [token for c in text for token in tokenizer.encode(c)], stop))
    # of two stop strings the one that is complete first ends the text, as tokens are single characters here
    ends = [text.index(s) + len(s) for s in stop if s in text]
    before = text[: min(ends)] if ends else text
    found = [before.index(s) for s in stop if s in before]
    assert shown == (text[: min(found)] if found else text)


@pytest.mark.parametrize("stop", [("lf", "el"), ("el", "lf")])
def test_of_two_stop_strings_in_one_token_the_earlier_one_ends_the_text(of_kind, stop):
    (token,) = of_kind.encode("self")
    assert pieces(of_kind, [token], stop) == ["s", ""]


def test_a_stop_string_across_tokens_is_never_shown(of_kind):
    tokens = [token for c in "one<end>two" for token in of_kind.encode(c)]
    stream = TextStream(of_kind, ["<end>"])
    shown = [stream.add(token) for token in tokens[:8]]
    assert (shown, stream.is_stopped) == (["o", "n", "e", "", "", "", "", ""], True)


def test_what_only_began_like_a_stop_string_is_shown(of_kind):
    tokens = [token for c in "a<en>" for token in of_kind.encode(c)]
    assert pieces(of_kind, tokens, ["<end>"]) == ["a", "", "", "", "<en>", ""]


def test_a_text_that_ends_like_a_stop_string_is_shown(of_kind):
    tokens = [token for c in "a<en" for token in of_kind.encode(c)]
    assert pieces(of_kind, tokens, ["<end>"])[-1] == "<en"


def test_special_tokens_add_nothing_where_they_are_skipped(of_kind):
    tokens = [*of_kind.encode("a"), of_kind.end, *of_kind.encode("b"), of_kind.begin]
    shown = TextStream(of_kind, (), skip_special_tokens=True)
    assert [shown.add(token) for token in tokens] + [shown.end()] == ["a", "", "b", "", ""]
    assert "".join(pieces(of_kind, tokens)) == "a<|end|>b<|begin|>"


def test_special_tokens_that_are_shown_are_not_skipped_and_marked(of_kind):
    stream = TextStream(of_kind, (), skip_special_tokens=True, shown_tokens=(of_kind.end,))
    mark = MARK if of_kind.token_bytes is not None else ""
    assert [stream.add(token) for token in (of_kind.begin, of_kind.end)] == ["", f"{mark}<|end|>"]


def test_text_that_spells_a_shown_token_is_not_marked(tokenizer):
    stream = TextStream(tokenizer, shown_tokens=(tokenizer.end,))
    spelled = [token for c in "<|end|>" for token in tokenizer.encode(c)]
    assert "".join(map(stream.add, spelled)) == "<|end|>"


@pytest.mark.parametrize(("stop", "shown"), [("a<|e", ""), ("|end|>b", f"a{MARK}<"), ("zz", f"a{MARK}<|end|>bz")])
def test_stop_strings_do_not_see_marks(tokenizer, stop, shown):
    stream = TextStream(tokenizer, (stop,), shown_tokens=(tokenizer.end,))
    tokens = [*tokenizer.encode("a"), tokenizer.end, *tokenizer.encode("b"), *tokenizer.encode("z")]
    assert "".join([*map(stream.add, tokens), stream.end()]) == shown


def test_a_stop_string_that_may_not_end_the_text_yet_is_shown(of_kind):
    stream = TextStream(of_kind, ("ab",))
    text = [stream.add(token, may_stop=i > 3) for i, token in enumerate(t for c in "abxabx" for t in of_kind.encode(c))]
    assert ("".join(text), stream.is_stopped) == ("abx", True)
