"""Public names of a package that are imported when they are first used, so that the package itself is imported fast."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module


def attach(
    package: str, names: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package, as the package lazy_loader does.

    Args:
        package: the package's `__name__`.
        names: the public names of each of its modules, by the module's name in the package.
        modules: modules of the package that are attributes of it, too, without being public names.
    """
    module_of = {name: f"{package}.{module}" for module, public in names.items() for name in public}
    public = sorted(module_of)

    def getattr_(name: str) -> object:
        if name in module_of:
            return getattr(import_module(module_of[name]), name)
        if name in modules:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def dir_() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public, *modules})

    return getattr_, dir_, public
