"""Modules that hold a recipe, and how often recipes have changed: what is fused is decided anew after a change."""

from typing import Generic, TypeVar

from octile.recipe import Recipe

R = TypeVar("R", bound=Recipe | None)
_changes = 0


class RecipeHolder(Generic[R]):
    """Mixin for a module with an attribute `recipe`, however it is assigned."""

    _recipe: R

    @property
    def recipe(self) -> R:
        """The formats of this module's GEMMs."""
        return self._recipe

    @recipe.setter
    def recipe(self, recipe: R) -> None:
        global _changes
        self._recipe = recipe
        _changes += 1


def recipe_changes() -> int:
    """Return how often any module's recipe was assigned."""
    return _changes
