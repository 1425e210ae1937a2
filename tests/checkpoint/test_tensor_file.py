import errno
import json
import os
import struct
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from octile.checkpoint.tensor_file import DTYPE_NAMES, TensorFile, TensorSpec, writing


def write(path, tensors):
    with writing(path, {n: TensorSpec.of(t.dtype, t.shape) for n, t in tensors.items()}) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)


@pytest.fixture
def every_dtype():
    torch.manual_seed(0)
    tensors = {}
    for dtype, name in DTYPE_NAMES.items():
        bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        tensors[name] = bits.view(dtype).view(2, 3)
    return tensors


def test_safetensors_reads_what_we_write_in_every_dtype(tmp_path, every_dtype, same):
    write(tmp_path / "a.safetensors", every_dtype)
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == every_dtype.keys()
    assert all(same(found[name], every_dtype[name]) for name in found)


def test_we_read_what_safetensors_writes_in_every_dtype(tmp_path, every_dtype, same):
    save_file(every_dtype, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.specs.keys() == every_dtype.keys()
    assert all(same(file.read(name), every_dtype[name]) for name in every_dtype)


@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (2, 0, 3)])
def test_scalars_and_empty_tensors_keep_their_shape(tmp_path, shape):
    write(tmp_path / "a.safetensors", {"x": torch.ones(shape), "y": torch.ones(3)})
    assert TensorFile(tmp_path / "a.safetensors").read("x").equal(torch.ones(shape))


def test_a_tensor_that_is_not_contiguous_is_written_in_its_order(tmp_path):
    x = torch.arange(6.0).view(2, 3).T
    write(tmp_path / "a.safetensors", {"x": x})
    assert TensorFile(tmp_path / "a.safetensors").read("x").equal(x)


def test_rows_are_a_slice(tmp_path):
    x = torch.arange(30).view(10, 3)
    write(tmp_path / "a.safetensors", {"other": torch.ones(5), "x": x})
    assert TensorFile(tmp_path / "a.safetensors").rows("x", 4, 99).equal(x[4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 4), (3, 99), (6, 6)])
def test_columns_are_a_contiguous_slice(tmp_path, dtype, start, stop):
    x = torch.arange(30.0).view(5, 6).to(dtype)
    write(tmp_path / "a.safetensors", {"other": torch.ones(5), "x": x})
    found = TensorFile(tmp_path / "a.safetensors").columns("x", start, stop)
    assert (found.dtype, found.is_contiguous()) == (dtype, True)
    assert found.float().equal(x.float()[:, start:stop])


def test_parts_may_be_written_in_any_order(tmp_path):
    x, y = torch.arange(30).view(10, 3), torch.ones(4)
    with writing(tmp_path / "a", {"x": TensorSpec.of(x.dtype, x.shape), "y": TensorSpec.of(y.dtype, y.shape)}) as out:
        out.write("x", x[6:], row=6)
        out.write("y", y)
        out.write("x", x[:6])
    assert TensorFile(tmp_path / "a").read("x").equal(x)


def write_four_integers(path, data):
    with writing(path, {"x": TensorSpec.of(torch.int64, (4,))}) as out:
        out.write("x", data)


def test_a_file_with_a_missing_part_does_not_appear(tmp_path):
    with pytest.raises(RuntimeError, match="x was announced, but 24 of its bytes"):
        write_four_integers(tmp_path / "a", torch.arange(1))
    assert not list(tmp_path.iterdir())


def test_another_dtype_than_announced_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"x must be I64, not torch\.float32"):
        write_four_integers(tmp_path / "a", torch.ones(4))


def test_more_than_announced_is_refused(tmp_path):
    with pytest.raises(ValueError, match="x must have 32 bytes, not 40"):
        write_four_integers(tmp_path / "a", torch.arange(5))


def test_a_dtype_that_torch_lacks_can_be_read_as_bytes(tmp_path):
    header = json.dumps({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + b"\x01\x02")
    file = TensorFile(tmp_path / "a")
    assert file.read_bytes("x", 0, 2).tolist() == [1, 2]
    with pytest.raises(ValueError, match=r"x in .* is of type F4, which torch does not have"):
        file.read("x")


@given(st.data())
def test_a_truncated_file_is_named_with_both_lengths(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "a.safetensors"
    write(path, {"x": torch.ones(4, 5), "y": torch.ones(3)})
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:cut])
    with pytest.raises(ValueError, match=rf"a\.safetensors is damaged: {cut} bytes found, (at least )?\d+ expected"):
        TensorFile(path)


@given(st.integers(0, 200), st.integers(1, 255))
def test_a_changed_byte_is_read_or_refused_but_never_crashes(tmp_path_factory, index, change):
    path = tmp_path_factory.mktemp("flip") / "a.safetensors"
    write(path, {"x": torch.ones(4, 5), "y": torch.ones(3)})
    changed = bytearray(path.read_bytes())
    changed[index] ^= change
    path.write_bytes(changed)
    with suppress(ValueError):
        file = TensorFile(path)
        for name in file.specs:
            file.read(name)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4.0]},
        {"dtype": "F32", "shape": [1]},
        "x",
    ],
)
def test_a_header_that_makes_no_sense_is_damage(tmp_path, entry):
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match="a is damaged"):
        TensorFile(tmp_path / "a")


def test_notes_are_read_back_here_and_by_safetensors(tmp_path):
    with writing(tmp_path / "t.safetensors", {}, {"about": 'é " {'}):
        pass
    assert TensorFile(tmp_path / "t.safetensors").metadata == {"format": "pt", "about": 'é " {'}
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        assert file.metadata()["about"] == 'é " {'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"preset": "tiny", "steps": 3}', "a header of more than 100,000,000 bytes"),
        (b"\x7fELF\x02\x01\x01\0" + bytes(100), "a header of more than 100,000,000 bytes"),
        (bytes(100), "begins with the byte 0x00 instead of {"),
    ],
    ids=["json", "binary", "zeros"],
)
def test_another_kind_of_file_is_not_said_to_be_damaged(tmp_path, content, reason):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=rf"a is no safetensors file: .*{reason}"):
        TensorFile(tmp_path / "a")


def test_what_stands_in_place_of_a_file_is_named(tmp_path):
    (tmp_path / "pointer").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4976698672\n")
    (tmp_path / "page").write_text("<!DOCTYPE html>\n<html></html>")
    with pytest.raises(ValueError, match="pointer is a Git LFS pointer in place of the file: run git lfs pull"):
        TensorFile(tmp_path / "pointer")
    with pytest.raises(ValueError, match="page is an HTML page in place of the file: download it again"):
        TensorFile(tmp_path / "page")


def test_a_file_that_may_not_be_read_is_not_said_to_be_absent(tmp_path, monkeypatch):
    """root may read every file, so that both refuse it here as they do for other users."""
    path = tmp_path / "model.safetensors"

    def absent(*_, **__):
        raise FileNotFoundError(f"No such file or directory: {path}")

    def denied(self, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr("octile.checkpoint.tensor_file.safe_open", absent)
    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError, match=r"Permission denied: .*model\.safetensors"):
        TensorFile(path)
