"""`import octile` costs nothing, and every public name is there and says what it is."""

import subprocess
import sys
from importlib.resources import files

import pytest

import octile

HEAVY = (
    "torch",
    "numpy",
    "matplotlib",
    "jinja2",
    "tensorboard",
    "triton",
    "transformers",
    "tokenizers",
    "tyro",
    "rich",
)


def loaded_by(statement: str) -> set[str]:
    """The modules that are there after a statement in a fresh interpreter."""
    program = f"import sys; {statement}; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    )


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    return loaded_by("import octile; octile.__version__; dir(octile)")


@pytest.mark.parametrize("module", HEAVY)
def test_importing_octile_does_not_load(loaded, module):
    assert module not in loaded


def test_quantising_loads_no_drawing_and_no_training():
    loaded = loaded_by("import octile; octile.quantize, octile.Recipe, octile.convert")
    late = {"matplotlib", "jinja2", "tensorboard", "transformers", "tokenizers", "octile.report", "octile.train"}
    assert loaded & late == set()


@pytest.mark.parametrize("name", octile.__all__)
def test_every_public_name_is_there_and_documented(name):
    assert getattr(octile, name).__doc__


@pytest.mark.parametrize("room", ["formats", "recipe", "ops", "scaled", "nn", "models", "optim", "checkpoint"])
def test_rooms_are_attributes(room):
    assert getattr(octile, room).__name__ == f"octile.{room}"


def test_public_names_can_be_listed():
    assert set(octile.__all__) <= set(dir(octile))


def test_the_modules_of_nn_are_not_hidden_by_functions():
    for name in ("functional", "linear", "conversion"):
        assert getattr(octile.nn, name).__name__ == f"octile.nn.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'octile' has no attribute 'quantise'"):
        _ = octile.quantise


def test_the_package_says_that_it_is_typed():
    assert files("octile").joinpath("py.typed").is_file()
