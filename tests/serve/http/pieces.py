"""Texts that come in pieces."""

from itertools import pairwise

from hypothesis import strategies


def split(text: str, cuts: list[int]) -> list[str]:
    """A text, cut at some positions."""
    at = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(at)]


def texts_of(*fragments: str) -> strategies.SearchStrategy[str]:
    """Texts of given fragments, which come often, and of parts of them."""
    parts = [fragment[:size] for fragment in fragments for size in (1, len(fragment) // 2, len(fragment) - 1)]
    some = strategies.sampled_from([*fragments, *fragments, *parts, "a", "\n", " ", "é"])
    return strategies.lists(some, max_size=12).map("".join)


CUTS = strategies.lists(strategies.integers(0, 200), max_size=12)
