"""Subclasses of other libraries' modules, made at run time: a module that gets one stays the same object.

Parameters, hooks, `state_dict`, `isinstance` and the class's own methods stay. The subclass has the name of its class,
since libraries look for it, and its objects can be copied and pickled.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


class MadeClass:
    """Mixin of the classes that are made here, which pickle and `copy` cannot find by their names.

    Attributes:
        made_by: the function that makes the class, and its arguments.
    """

    made_by: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if "made_by" not in vars(type(self)):  # a class that another library has derived from it
            return reduced
        return _new, self.made_by, *reduced[2:]


def _new(maker: Callable[..., type[nn.Module]], *arguments: Any) -> nn.Module:
    cls = maker(*arguments)
    return cls.__new__(cls)


def make_subclass(
    cls: type[nn.Module], bases: tuple[type, ...], attributes: Mapping[str, Any], *made_by: Any
) -> type[nn.Module]:
    """Make a subclass of the same name.

    Args:
        cls: the class.
        bases: classes whose methods precede those of cls, the first a `MadeClass`.
        attributes: attributes of the new class.
        made_by: the function that makes it, at each call the same one, and its arguments.
    """
    copied = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (*bases, cls), {**attributes, "made_by": made_by, **copied})
