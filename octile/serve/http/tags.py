"""Tags in a text that comes in pieces: what may still become one is not shown yet."""

from __future__ import annotations

from octile.serve.engine.text import overlap


def split_tag(text: str, tag: str) -> tuple[str, bool, str]:
    """Split a text at a tag.

    Args:
        text: what has come.
        tag: what is looked for.

    Returns:
        The text before the tag; whether the tag is there; and the text behind it. Without the tag, the end of the text
        that may be its beginning comes last.
    """
    before, found, after = text.partition(tag)
    if found:
        return before, True, after
    shown = len(text) - overlap(text, tag)
    return text[:shown], False, text[shown:]
