"""Compile the C++ tensor core model once, into a cache of these tests' own."""

from collections.abc import Iterator

import pytest

from octile.kernels.native import load
from octile.lab.tensor_core import native


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Store the compiled form in a cache of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTILE_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        load.cache_clear()
        native.load()
        yield
