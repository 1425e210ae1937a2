"""Replacement of the module `deep_gemm` by octile's functions, for code that imports it and cannot be changed."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


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

    module = ModuleType("deep_gemm", "octile's functions under DeepGEMM's names")
    module.__path__ = [] if package is None else [str(package)]
    for name in ours.__all__:
        setattr(module, name, getattr(ours, name))
    for name in [n for n in sys.modules if n.startswith("deep_gemm.")]:
        del sys.modules[name]
    sys.modules["deep_gemm"] = module
    sys.modules["deep_gemm._C"] = ours  # DeepGEMM's Python imports its compiled functions from here
    if package is None:
        sys.modules["deep_gemm.utils"] = ours.utils
    else:
        module.utils = import_module("deep_gemm.utils")  # type: ignore[attr-defined]
    return module
