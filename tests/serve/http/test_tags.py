"""Tags in a text that comes in pieces."""

import pytest

from octile.serve.http.tags import split_tag


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("one<end>two<end>", ("one", True, "two<end>")),
        ("one", ("one", False, "")),
        ("one<en", ("one", False, "<en")),
        ("one<e<", ("one<e", False, "<")),
        ("<end", ("", False, "<end")),
        ("<end >", ("<end >", False, "")),
        ("", ("", False, "")),
    ],
)
def test_a_text_is_split_at_a_tag_or_before_what_may_become_one(text, parts):
    assert split_tag(text, "<end>") == parts
