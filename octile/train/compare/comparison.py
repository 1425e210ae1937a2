"""What a comparison is made of: its seeds, and the settings with which it was begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octile.atomic_files import write_json
from octile.recipe import Recipe
from octile.train.config import COMPARE_RESUMABLE, TrainConfig, differences
from octile.train.run.folder import COMPARISON, why_empty
from octile.validation import (
    MAX_SEED,
    Seed,
    check,
    check_fields,
    from_json,
    quoted,
    read_json,
    take_checksum,
    with_checksum,
)

BASELINE = "bf16"  # the recipe that is always trained
MAX_SEEDS = 1000  # far beyond what a narrow interval needs


def parse_seeds(text: str, first: int = 0) -> tuple[int, ...]:
    """The seeds that a text names: "3" means three seeds, "0,7,9" means these.

    Args:
        text: the number of seeds, counted from `first`; or the seeds, separated by commas.
        first: the first seed of a count.

    Raises:
        ValueError: text is neither, the number is above MAX_SEEDS, a seed occurs twice, or both seeds and `first` are
            given.
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
        raise ValueError("seeds must be at least one, not 0; leave it out to train with the seed 0 alone")
    if numbers[0] > MAX_SEEDS:
        raise ValueError(
            f"seeds must be at most {MAX_SEEDS:,}, not {quoted(numbers[0])}: name one seed with a comma after it"
        )
    return tuple(range(first, first + numbers[0]))


def baseline_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """The seeds of the BF16 runs: the recipes' seeds, and if there is only one, the next one too.

    Raises:
        ValueError: there is no next one.
    """
    if len(seeds) > 1:
        return seeds
    if seeds[0] >= MAX_SEED:
        raise ValueError(f"seed must be below {MAX_SEED:,}, because BF16 is trained with the next seed, too")
    return seeds[0], seeds[0] + 1


def seeds_text(seeds: tuple[int, ...], first: int) -> str:
    """The text from which `parse_seeds` reads these seeds."""
    return str(len(seeds)) if seeds == tuple(range(first, first + len(seeds))) else f"{','.join(map(str, seeds))},"


@dataclass(frozen=True)
class Comparison:
    """What a comparison is made of, as FOLDER/comparison.json stores it.

    Attributes:
        config: the configuration of every run, except for recipe and seed.
        recipes: names of recipes or .toml files.
        seeds: the seeds of every recipe.
        gradient_steps: in the form that `parse_steps` reads.
        recipe_texts: the contents of the recipes' files.

    Raises:
        TypeError, ValueError: a field has another type, a seed is out of range, or a text is not a recipe.
    """

    config: TrainConfig
    recipes: tuple[str, ...]
    seeds: tuple[Seed, ...]
    gradient_steps: str
    recipe_texts: Mapping[str, str]

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("recipes", "seeds"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must differ, but one is there twice")
        for name, text in self.recipe_texts.items():
            check(f"recipe_texts.{name}", text, str)
            Recipe.parse(text, f"recipe_texts.{name}")

    @classmethod
    def read(cls, folder: Path) -> Comparison:
        """Read the comparison that a folder holds.

        Raises:
            FileNotFoundError: it holds none.
            ValueError: its comparison.json is damaged, or was changed after the comparison began.
        """
        path = folder / COMPARISON
        if not path.is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} holds no comparison to resume: there is no {path}{why_empty(folder)}"
            )
        values = read_json(path)
        is_edited = take_checksum(values)
        try:
            stored = from_json(cls, values)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if is_edited:
            raise ValueError(
                f"{path} was changed after the comparison began: change it back, or begin a new one with another --out"
            )
        return stored

    def write(self, folder: Path) -> None:
        """Write comparison.json, which marks the folder as a comparison that can be resumed."""
        write_json(folder / COMPARISON, with_checksum({**asdict(self), "config": self.config.to_values()}))

    def changes(self, requested: Comparison) -> dict[str, tuple[Any, Any]]:
        """What differs in a requested comparison and must not."""
        settings = differences(self.config, requested.config)
        names = ("recipes", "seeds", "gradient_steps")
        other = {name: (getattr(self, name), getattr(requested, name)) for name in names}
        other["recipes"] = self.recipes or (BASELINE,), requested.recipes or (BASELINE,)
        return {name: pair for name, pair in settings.items() if name not in COMPARE_RESUMABLE} | {
            name: (old, new) for name, (old, new) in other.items() if old != new
        }
