"""What of a text that comes in pieces may still become a stop string or a tag."""

from __future__ import annotations


def overlap(text: str, searched: str) -> int:
    """Return the length of the longest end of a text with which the searched string begins, but is not complete."""
    return next((n for n in range(min(len(searched) - 1, len(text)), 0, -1) if text.endswith(searched[:n])), 0)
