"""Tests of public names that are imported late."""

import sys
from types import ModuleType

import pytest

from octile.lazy import attach


@pytest.fixture
def package(monkeypatch):
    """A package with the names `attach` gives it: `square` of its module `inner`, and the module `inner` itself."""
    outer, inner = ModuleType("outer"), ModuleType("outer.inner")
    inner.square = lambda x: x * x
    outer.__path__ = []
    outer.__getattr__, outer.__dir__, outer.__all__ = attach("outer", {"inner": ("square",)}, modules=("inner",))
    monkeypatch.setitem(sys.modules, "outer", outer)
    monkeypatch.setitem(sys.modules, "outer.inner", inner)
    return outer


def test_a_name_is_that_of_its_module(package):
    assert package.square(3) == 9


def test_a_module_is_an_attribute_and_no_public_name(package):
    assert package.inner is sys.modules["outer.inner"]
    assert package.__all__ == ["square"]


def test_the_names_are_listed_with_those_that_the_package_has(package):
    assert {"square", "inner", "__all__"} <= set(dir(package))


def test_another_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=r"module 'outer' has no attribute 'cube'$"):
        _ = package.cube
