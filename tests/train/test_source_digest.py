"""Tests of the digest by which ranks find out that they run different code."""

from pathlib import Path

import pytest

import octile
from octile.train.source_digest import source_digest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the place of octile."""
    for name, text in {"__init__.py": "", "ops/gemm.py": "x = 1\n", "kernels/gemm.cu": "int x;\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(octile, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_the_same_source_has_the_same_digest(package):
    before = source_digest()
    (package / "ops" / "gemm.cpython-311.pyc").write_bytes(b"compiled")
    assert source_digest() == before


@pytest.mark.parametrize("name", ["ops/gemm.py", "kernels/gemm.cu"])
def test_another_content_has_another_digest(package, name):
    before = source_digest()
    (package / name).write_text("y = 2\n")
    assert source_digest() != before


def test_another_name_has_another_digest(package):
    before = source_digest()
    (package / "ops" / "gemm.py").rename(package / "ops" / "gemms.py")
    assert source_digest() != before


def test_the_digest_of_named_files_depends_on_them_alone(package):
    before = source_digest(["ops/gemm.py"])
    (package / "kernels" / "gemm.cu").write_text("int y;\n")
    assert source_digest(["ops/gemm.py"]) == before
    (package / "ops" / "gemm.py").write_text("y = 2\n")
    assert source_digest(["ops/gemm.py"]) != before
