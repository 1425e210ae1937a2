"""Shared by the tests of tools: load the scripts of tools/ from their files."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "tools"


@pytest.fixture
def script(monkeypatch):
    """script(name): the module tools/NAME.py."""

    def load(name):
        specification = importlib.util.spec_from_file_location(f"octile_tools_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(specification)
        monkeypatch.setitem(sys.modules, module.__name__, module)  # its dataclasses look for it there
        specification.loader.exec_module(module)
        return module

    return load
