"""Tests of specialization: a template and its constants become one source, which becomes one compiled kernel."""

import enum
import re
import tempfile

import pytest
import torch

from octile.kernels.cuda.jit import specialize

SMOKE = """#pragma once
#include "shift.cuh"
#include "ptx.cuh"
#include "shift.cuh"
extern "C" __global__ void smoke(const __grid_constant__ TensorMap map, float* x, int n) {
    if (threadIdx.x < n) x[threadIdx.x] = config::flag ? shift(config::width) : map.opaque[0];
}
"""
HEADERS = {"smoke.cu": SMOKE, "shift.cuh": "#pragma once\n__device__ float shift(int n) {\n    return n + 1;\n}\n"}
CONSTANTS = {"width": 3, "flag": True}


@pytest.fixture(autouse=True)
def private_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Form(enum.IntEnum):
    NT = 2


def test_constants_stand_before_the_template():
    text = specialize.source("smoke", {"width": 128, "low": -1, "flag": False, "form": Form.NT}, HEADERS)
    head = text[: text.index("}  // namespace config")]
    constants = re.findall(r"constexpr (\w+) (\w+) = (.+);", head)
    assert constants == [("int", "width", "128"), ("int", "low", "-1"), ("bool", "flag", "false"), ("int", "form", "2")]


def test_each_include_is_pasted_once():
    text = specialize.source("smoke", CONSTANTS, HEADERS)
    assert text.count("float shift(int n)") == 1
    assert not re.search(r"#include \"", text)  # quoted ones are octile's own; <…> are left to the compiler
    assert "#pragma once" not in text


def test_a_system_include_is_left_to_the_compiler():
    assert "#include <cuda_fp8.h>" in specialize.source("smoke", {}, {"smoke.cu": "#include <cuda_fp8.h>"})


@pytest.mark.parametrize(("file", "line", "old"), [("smoke.cu", 6, "shift(config"), ("shift.cuh", 3, "n + 1")])
def test_an_error_names_the_line_of_its_own_file(file, line, old):
    broken = {**HEADERS, file: HEADERS[file].replace(old, "wrong + " + old)}
    with pytest.raises(RuntimeError, match=rf"generated/{file}\({line}\): error") as raised:
        specialize.compile("smoke", CONSTANTS, headers=broken)
    assert "source saved: " in str(raised.value)


@pytest.mark.parametrize(
    ("constants", "error", "message"),
    [
        ({"width": 1.5}, TypeError, "constant width must be int or bool, not float"),
        ({"width": "3"}, TypeError, "constant width must be int or bool, not str"),
        ({"width": 2**31}, ValueError, "constant width must fit 32 bits"),
        ({"a b": 1}, ValueError, "must be an identifier, not 'a b'"),
    ],
)
def test_an_invalid_constant_is_refused(constants, error, message):
    with pytest.raises(error, match=message):
        specialize.source("smoke", constants, HEADERS)


def test_a_missing_template_is_named():
    with pytest.raises(FileNotFoundError, match=r"nothing\.cu is in none of"):
        specialize.source("nothing", {})


def test_every_constant_and_header_makes_another_kernel(tmp_path):
    first = specialize.compile("smoke", CONSTANTS, headers=HEADERS)
    wider = specialize.compile("smoke", {**CONSTANTS, "width": 4}, headers=HEADERS)
    shifted = {**HEADERS, "shift.cuh": HEADERS["shift.cuh"].replace("n + 1", "n + 2")}
    assert len({first.image, wider.image, specialize.compile("smoke", CONSTANTS, headers=shifted).image}) == 3
    assert len(list((tmp_path / "kernels").glob("*.compiled"))) == 3


def test_a_compiled_kernel_comes_from_the_disk_the_second_time():
    first = specialize.compile("smoke", CONSTANTS, headers=HEADERS)
    assert specialize.compile("smoke", CONSTANTS, headers=HEADERS) == first  # including the seconds that it took


def test_the_other_compiler_makes_another_kernel(monkeypatch, tmp_path):
    specialize.compile("smoke", CONSTANTS, headers=HEADERS)
    monkeypatch.setattr(specialize.compiler, "compiler", lambda: "another")
    specialize.compile("smoke", CONSTANTS, headers=HEADERS)
    assert len(list((tmp_path / "kernels").glob("*.compiled"))) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_loading_needs_a_device_with_an_index(device):
    with pytest.raises(ValueError, match=f"device must be a CUDA device with an index, not '{device}'"):
        specialize.load("smoke", CONSTANTS, torch.device(device), HEADERS)
