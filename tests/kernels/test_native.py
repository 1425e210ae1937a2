"""Tests of C++ for the CPU: compiled once and cached, and plain torch with a warning where that is not possible."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from octile.kernels import native
from octile.kernels.native import OPTIONS, load


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o700)
    file = tmp_path / "seven.cpp"
    file.write_text('extern "C" int seven() { return 7; }')
    yield file
    load.cache_clear()


def test_a_source_is_compiled(source: Path):
    library = load(source, OPTIONS, "seven runs")
    assert library is not None
    assert library.seven() == 7


def test_it_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch):
    load(source, OPTIONS, "seven runs")
    load.cache_clear()
    monkeypatch.setattr(native, "_build", None)
    assert load(source, OPTIONS, "seven runs") is not None


def test_without_a_compiler_a_warning_says_so_once(source: Path, monkeypatch: pytest.MonkeyPatch, caplog):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert load(source, OPTIONS, "seven runs") is None
    assert load(source, OPTIONS, "seven runs") is None
    (record,) = caplog.records
    assert record.message == "no C++ compiler (c++, g++, clang++) was found: seven runs in plain torch"


def test_a_source_that_does_not_compile_is_reported(source: Path, caplog):
    source.write_text("int seven( {")
    assert load(source, OPTIONS, "seven runs") is None
    (record,) = caplog.records
    assert "could not be compiled or loaded: seven runs in plain torch" in record.message
