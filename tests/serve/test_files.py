"""The lists of files in the docstrings of the room and of its groups, and the public names."""

import re
from importlib import import_module
from pathlib import Path

import pytest

from octile import serve

GROUPS = ("engine", "runner", "model", "weights", "ranks", "process")


@pytest.mark.parametrize("package", ["octile.serve", *(f"octile.serve.{group}" for group in GROUPS)])
def test_the_list_has_every_file(package):
    room = import_module(package)
    assert room.__doc__ is not None
    assert room.__file__ is not None
    listed = re.findall(r"^ *(\w+(?:\.py|/)) ", room.__doc__, re.MULTILINE)
    folder = Path(room.__file__).parent
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)


@pytest.mark.parametrize("name", serve.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(serve, name).__doc__
