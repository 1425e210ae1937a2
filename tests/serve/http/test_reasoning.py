"""A text is divided into a thought and an answer."""

import pytest
from hypothesis import given
from hypothesis.strategies import booleans

from octile.serve.http.reasoning import ReasoningParser, Thinking
from tests.serve.http.pieces import CUTS, split, texts_of


def parsed(*pieces: str, is_inside: bool = False) -> Thinking:
    parser = ReasoningParser(is_inside)
    parts = [*map(parser.push, pieces), parser.end()]
    return Thinking("".join(part.reasoning for part in parts), "".join(part.content for part in parts))


@pytest.mark.parametrize(
    ("text", "is_inside", "thinking"),
    [
        ("<think>why</think>because", False, Thinking("why", "because")),
        ("<think>\nwhy\n</think>\n\nbecause", False, Thinking("\nwhy\n", "\n\nbecause")),
        ("\n<think>why</think>because", False, Thinking("why", "because")),
        ("why</think>because", True, Thinking("why", "because")),
        ("<think>why</think>because", True, Thinking("why", "because")),
        ("why", True, Thinking("why", "")),
        ("<think>why </thin", False, Thinking("why </thin", "")),
        ("</think>because", True, Thinking("", "because")),
        ("because", False, Thinking("", "because")),
        ("the tag <think> begins one", False, Thinking("", "the tag <think> begins one")),
        ("why</think>because</think><think>", True, Thinking("why", "because</think><think>")),
        ("why <think> again</think>because", True, Thinking("why <think> again", "because")),
        ("\n<thi", False, Thinking("", "\n<thi")),
        (" <thi", True, Thinking(" <thi", "")),
        ("", True, Thinking()),
    ],
)
def test_a_text_is_divided_into_a_thought_and_an_answer(text, is_inside, thinking):
    assert parsed(text, is_inside=is_inside) == thinking


@given(text=texts_of("<think>", "</think>"), cuts=CUTS, is_inside=booleans())
def test_pieces_are_divided_as_the_whole_text(text, cuts, is_inside):
    assert parsed(*split(text, cuts), is_inside=is_inside) == parsed(text, is_inside=is_inside)


@given(text=texts_of("<think>", "</think>"), is_inside=booleans())
def test_what_cannot_become_a_tag_is_shown_at_once(text, is_inside):
    parser = ReasoningParser(is_inside)
    parser.push("a" if is_inside else "<think>")
    parser.push(text)
    assert len("".join(parser.end())) < len("</think>")
