"""Replacement of the module `deep_gemm` by octile's functions, for code that imports it and cannot be changed."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class StandIn(MetaPathFinder, Loader):
    """Finds and loads the module `deep_gemm` with the names of octile's.

    Args:
        ours: octile's module.
        package: the folder of DeepGEMM's Python, if its `utils` are used.
    """

    def __init__(self, ours: ModuleType, package: Path | None) -> None:
        self.ours, self.package = ours, package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a package whose file is octile's."""
        if name != "deep_gemm":
            return None
        spec = ModuleSpec(name, self, origin=self.ours.__file__, is_package=True)
        spec.has_location = True
        spec.submodule_search_locations = [] if self.package is None else [str(self.package)]
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Give the module octile's functions."""
        module.__doc__ = "octile's functions under DeepGEMM's names"
        left_out = {"install"} if self.package is None else {"install", "testing", "utils"}
        for name in {*self.ours.__all__, "__getattr__"} - left_out:
            setattr(module, name, getattr(self.ours, name))


def install(source: Path | str | None = None) -> ModuleType:
    """Make `import deep_gemm` in this process import octile's functions.

    Args:
        source: a checkout of DeepGEMM, or None. With a checkout, its `deep_gemm.utils` and `deep_gemm.testing`, which
            are Python, are imported from there and call octile's functions, as its tests need it. Without one, both are
            octile's.

    Raises:
        RuntimeError: DeepGEMM itself has been imported already.
        FileNotFoundError: source is not a checkout of DeepGEMM.
    """
    ours = import_module("octile.compat.deep_gemm")
    imported = sys.modules.get("deep_gemm")
    if imported is not None and getattr(imported, "fp8_gemm_nt", None) is not ours.fp8_gemm_nt:
        raise RuntimeError("deep_gemm has been imported already: install octile's functions before")
    package = None if source is None else Path(source) / "deep_gemm"
    if package is not None and not (package / "utils").is_dir():
        raise FileNotFoundError(f"{package} has no folder utils: source must be a checkout of DeepGEMM")

    for name in [n for n in sys.modules if n == "deep_gemm" or n.startswith("deep_gemm.")]:
        del sys.modules[name]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, StandIn)]
    sys.meta_path.insert(0, StandIn(ours, package))
    sys.modules["deep_gemm._C"] = ours  # DeepGEMM's Python imports its compiled functions from here
    module = import_module("deep_gemm")
    if package is None:
        for name in ("testing", "utils", "utils.layout", "utils.math"):
            sys.modules[f"deep_gemm.{name}"] = import_module(f"{ours.__name__}.{name}")
    else:
        import_module("deep_gemm.utils")
    return module
