"""Tags in a text that comes in pieces: what may still become one is not shown yet."""

from __future__ import annotations


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
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size], False, text[-size:]
    return text, False, ""
