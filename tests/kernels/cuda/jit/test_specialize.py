"""Tests of specialization: a template and its constants become one source, which becomes one compiled kernel."""

import enum
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.specialize import PlannedKernel
from octile.kernels.planning import NotLaunched, recorded_kernels

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


GPU, SECONDS = torch.device("cuda", 0), 10


class Loaded:
    """A kernel that is loaded on no GPU."""

    def __init__(self, name, image, device):
        self.name, self.image, self.device = name, image, device


class Compiler:
    """A compiler that counts what it compiles, and waits or fails if that is asked for."""

    def __init__(self):
        self.compiled, self.begun, self.may_end = [], threading.Event(), threading.Event()
        self.may_end.set()
        self.errors = []

    def __call__(self, name, text, architecture):
        self.compiled.append(name)
        self.begun.set()
        assert self.may_end.wait(SECONDS)
        if self.errors:
            raise self.errors.pop()
        return specialize.Cubin(name.encode(), 1, 0, 0, 0, 0.0, "fake", "")


@pytest.fixture
def fake_compiler(monkeypatch) -> Compiler:
    driver = pytest.importorskip("octile.kernels.cuda.jit.driver")
    fake = Compiler()
    monkeypatch.setattr(driver, "Kernel", Loaded)
    monkeypatch.setattr(specialize, "_loaded", {})
    monkeypatch.setattr(specialize, "_ahead", {})
    monkeypatch.setattr(specialize, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(specialize.compiler, "compile", fake)
    monkeypatch.setattr(specialize.compiler, "compiler", lambda: "fake")
    return fake


def load(name="smoke"):
    return specialize.load(name, CONSTANTS, GPU, {**HEADERS, f"{name}.cu": SMOKE})


def planned(name="smoke"):
    return PlannedKernel(name, CONSTANTS, {**HEADERS, f"{name}.cu": SMOKE})


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_a_kernel_that_is_being_compiled_is_waited_for(fake_compiler, pool):
    fake_compiler.may_end.clear()
    planned().compile_ahead(pool, GPU)
    assert fake_compiler.begun.wait(SECONDS)
    with ThreadPoolExecutor(1) as launching:
        loading = launching.submit(load)
        fake_compiler.may_end.set()
        assert loading.result(SECONDS).image == b"smoke"
    assert fake_compiler.compiled == ["smoke"]


def test_a_kernel_is_compiled_once_if_two_threads_load_it(fake_compiler):
    with ThreadPoolExecutor(2) as launching:
        first, second = launching.map(lambda _: load(), range(2))
    assert first is second
    assert fake_compiler.compiled == ["smoke"]


def test_a_kernel_that_waits_for_a_thread_is_compiled_by_its_launch(fake_compiler, pool):
    may_end = threading.Event()
    pool.submit(may_end.wait, SECONDS)
    future = planned().compile_ahead(pool, GPU)
    assert load().image == b"smoke"
    may_end.set()
    assert future.cancelled()
    assert fake_compiler.compiled == ["smoke"]


def test_an_error_ahead_is_dropped(fake_compiler, pool):
    fake_compiler.errors.append(RuntimeError("ahead"))
    future = planned().compile_ahead(pool, GPU)
    assert str(future.exception(SECONDS)) == "ahead"
    assert load().image == b"smoke"


def test_an_error_of_a_launch_is_raised(fake_compiler, pool):
    fake_compiler.errors += [RuntimeError("at the launch"), RuntimeError("ahead")]
    planned().compile_ahead(pool, GPU)
    with pytest.raises(RuntimeError, match="at the launch"):
        load()


def test_different_kernels_are_loaded_at_the_same_time(fake_compiler):
    fake_compiler.may_end.clear()
    with ThreadPoolExecutor(1) as launching:
        loading = launching.submit(load)
        assert fake_compiler.begun.wait(SECONDS)
        threading.Timer(0.05, fake_compiler.may_end.set).start()
        assert load("other").image == b"other"
        loading.result(SECONDS)


def test_a_kernel_planned_twice_is_compiled_once(fake_compiler, pool):
    assert planned().compile_ahead(pool, GPU) is planned().compile_ahead(pool, GPU)


def test_on_meta_a_kernel_is_recorded_and_not_loaded():
    with recorded_kernels() as kernels, pytest.raises(NotLaunched):
        specialize.load("smoke", CONSTANTS, torch.device("meta"), HEADERS)
    assert list(kernels.values()) == [PlannedKernel("smoke", CONSTANTS, HEADERS)]


def test_on_meta_nothing_is_loaded_without_a_record():
    with pytest.raises(ValueError, match="smoke cannot be launched on the meta device"):
        specialize.load("smoke", CONSTANTS, torch.device("meta"), HEADERS)
