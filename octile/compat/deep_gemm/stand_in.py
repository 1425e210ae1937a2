"""Puts octile in DeepGEMM's place, for code that says `import deep_gemm` and cannot be changed."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def install(source: Path | str | None = None) -> ModuleType:
    """From now on `import deep_gemm` in this process gives octile's functions.

    Args:
        source: a checkout of DeepGEMM. Its own `deep_gemm.utils` and `deep_gemm.testing`, which are Python, are then
            imported from there, and call octile's functions; that is how its tests run. Otherwise `deep_gemm.utils` is
            octile's and there is no `deep_gemm.testing`.

    Raises:
        RuntimeError: DeepGEMM itself has been imported already.
        FileNotFoundError: source is no checkout.
    """
    ours = import_module("octile.compat.deep_gemm")
    there = sys.modules.get("deep_gemm")
    if there is not None and getattr(there, "fp8_gemm_nt", None) is not ours.fp8_gemm_nt:
        raise RuntimeError("deep_gemm has been imported already: install octile's functions before")
    package = None if source is None else Path(source) / "deep_gemm"
    if package is not None and not (package / "utils").is_dir():
        raise FileNotFoundError(f"{package} has no folder utils: source must be a checkout of DeepGEMM")

    module = ModuleType("deep_gemm", "octile's functions under DeepGEMM's names")
    module.__path__ = [] if package is None else [str(package)]
    for name in ours.__all__:
        setattr(module, name, getattr(ours, name))
    for name in [n for n in sys.modules if n.startswith("deep_gemm.")]:
        del sys.modules[name]
    sys.modules["deep_gemm"] = module
    sys.modules["deep_gemm._C"] = ours  # where DeepGEMM's Python looks for its compiled functions
    if package is None:
        sys.modules["deep_gemm.utils"] = ours.utils
    else:
        module.utils = import_module("deep_gemm.utils")  # type: ignore[attr-defined]
    return module
