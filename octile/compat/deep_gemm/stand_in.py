"""Replacement of the module `deep_gemm` by octile's functions, for code that imports it and cannot be changed."""

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType


class _Names(Loader):
    """The loader of the replacement, which gives it the names of a module."""

    def __init__(self, names_of: ModuleType) -> None:
        self.names_of = names_of

    def exec_module(self, module: ModuleType) -> None:
        for name in self.names_of.__all__:
            setattr(module, name, getattr(self.names_of, name))


def install(source: Path | str | None = None) -> ModuleType:
    """Make `import deep_gemm` in this process import octile's functions.

    Args:
        source: a checkout of DeepGEMM, or None. With a checkout, its `deep_gemm.utils` and `deep_gemm.testing`, which
            are Python, are imported from there and call octile's functions, as its tests need it. Without one,
            `deep_gemm.utils` is octile's and there is no `deep_gemm.testing`.

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

    loader = _Names(ours)
    spec = ModuleSpec("deep_gemm", loader, origin=ours.__file__, is_package=True)
    spec.submodule_search_locations = [] if package is None else [str(package)]
    module = module_from_spec(spec)
    module.__doc__ = "octile's functions under DeepGEMM's names"
    loader.exec_module(module)
    for name in [n for n in sys.modules if n.startswith("deep_gemm.")]:
        del sys.modules[name]
    sys.modules["deep_gemm"] = module
    sys.modules["deep_gemm._C"] = ours  # DeepGEMM's Python imports its compiled functions from here
    if package is None:
        for name in ("utils", "utils.layout", "utils.math"):
            sys.modules[f"deep_gemm.{name}"] = import_module(f"{ours.__name__}.{name}")
    else:
        module.utils = import_module("deep_gemm.utils")  # type: ignore[attr-defined]
    return module
