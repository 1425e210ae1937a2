"""Shared by the tests of examples: load the files of examples/ as modules."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example() -> Callable[[str], ModuleType]:
    """example(name): examples/name.py, imported."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"octile_example_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
