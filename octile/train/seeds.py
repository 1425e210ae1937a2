"""With which seeds a comparison trains: "3" is three of them, "0,7,9" are these.

One seed trains each recipe once and BF16 twice, since without a second run there is no noise to hold a gap against.
"""

from __future__ import annotations


def parse_seeds(text: str, first: int = 0) -> tuple[int, ...]:
    """The seeds that a text names.

    Args:
        text: how many seeds, counted on from `first`; or the seeds, separated by commas.
        first: the first of a count.

    Raises:
        ValueError: text is neither, a seed comes twice, or seeds are named and `first` is too.
    """
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"seeds must be how many (3) or which (0,1,2), not {text!r}")
    numbers = tuple(int(part) for part in parts)
    if len(numbers) > 1 or text.endswith(","):
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"seeds must differ, but {text!r} names one twice")
        if first:
            raise ValueError(f"seeds {text!r} names them already: leave out seed {first}")
        return numbers
    if numbers[0] < 1:
        raise ValueError("seeds must be at least one, not 0; the seed 0 alone is what is taken if you leave it out")
    return tuple(range(first, first + numbers[0]))


def baseline_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Those that BF16 is trained with: the same, and where there is but one, the next one too."""
    return seeds if len(seeds) > 1 else (seeds[0], seeds[0] + 1)
