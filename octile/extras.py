"""Optional dependencies: a missing package is reported with the extra of octile that installs it.

`pip install octile` installs what `octile.nn`, `octile.quantize`, `octile.load` and `octile.save` need. Everything else
imports its packages late, after a call of `require`.
"""

from importlib.util import find_spec

EXTRAS = {  # extra: the part of octile that needs it, as the subject of an error message
    "train": "octile's training and command line need",
    "report": "octile's reports need",
    "lab": "octile's numerics lab needs",
    "serve": "octile's server needs",
    "test": "octile's tests and the tools that send requests need",
    "tensorboard": "log tensorboard needs",
    "wandb": "log wandb needs",
    "mlflow": "log mlflow needs",
    "cuda": "octile's CUDA and Triton kernels need",
}


def require(*modules: str, extra: str) -> None:
    """Check that modules can be found, without importing them.

    Args:
        modules: names of modules, as in an import statement.
        extra: the extra in octile's pyproject.toml that installs them, a key of `EXTRAS`.

    Raises:
        ImportError: a module is not installed. The message names the missing modules and the extra.
    """
    missing = [module for module in modules if not _is_installed(module)]
    if missing:
        raise ImportError(f'{EXTRAS[extra]} {", ".join(missing)}: pip install "octile[{extra}]"', name=missing[0])


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is missing; a module without a spec
        return False
