"""Where vLLM is found, which of its settings are measured, and how its server is started."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octile.bench.serve.peer.engine_speed import Work
from octile.bench.serve.peer.random_folder import write_random_folder
from octile.bench.serve.peer.vllm import SETTINGS, Launch, Vllm, free_port, server, why_not_loaded
from tests.train.conftest import MICRO

TORCH = "from types import SimpleNamespace\ncuda = SimpleNamespace(is_available=lambda: {})\n"
ALL = ("flashinfer", "the Rust front end")


@pytest.fixture
def torch_that_finds(vllm, tmp_path, monkeypatch):
    """Have another process import a torch that finds a GPU, or none."""

    def make(has_gpu: bool) -> None:
        (tmp_path / "torch.py").write_text(TORCH.format(has_gpu))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    return make


def test_it_is_found_with_its_version_and_packages(torch_that_finds, tmp_path):
    torch_that_finds(has_gpu=True)
    (tmp_path / "flashinfer.py").touch()
    found = Vllm.find(Path(sys.executable))
    assert found == Vllm(Path(sys.executable), "0.0", ("flashinfer",))
    assert found.label(SETTINGS[1]) == "vLLM 0.0, deep_gemm"


def test_a_gpu_that_it_does_not_see_is_refused(torch_that_finds):
    torch_that_finds(has_gpu=False)
    with pytest.raises(ValueError, match=rf"peer_python must .* a GPU; the torch of {sys.executable} finds none"):
        Vllm.find(Path(sys.executable))


def test_an_interpreter_that_cannot_import_it_is_refused(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text("raise ImportError('no libcudart.so')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ImportError, match=r"cannot be imported by .* \(ImportError: no libcudart.so\): peer_python"):
        Vllm.find(Path(sys.executable))


def test_what_is_no_interpreter_is_refused(tmp_path):
    with pytest.raises(ValueError, match=rf"peer_python must be a Python interpreter, which {tmp_path}/python is not"):
        Vllm.find(tmp_path / "python")


def names(settings) -> list[str]:
    return [setting.name for setting in settings]


def test_all_settings_that_it_can_run_are_measured():
    assert names(Vllm(Path("python"), "0.26.0").choose_settings(())) == ["triton", "deep_gemm", "triton+cutlass"]
    assert names(Vllm(Path("python"), "0.26.0", ALL).choose_settings(())) == names(SETTINGS)


def test_settings_can_be_chosen_in_an_order():
    chosen = ["triton+cutlass", "deep_gemm"]
    assert names(Vllm(Path("python"), "0.26.0").choose_settings(chosen)) == chosen


@pytest.mark.parametrize(
    ("packages", "name", "why"),
    [
        (ALL, "marlin", "must be one of triton, deep_gemm, flashinfer, .*triton\\+cutlass, not marlin"),
        ((), "flashinfer", "flashinfer needs flashinfer, which this vLLM lacks"),
        (ALL, "triton+rust", "triton\\+rust is one of the server, not of the engine"),
    ],
)
def test_a_setting_that_cannot_be_measured_is_refused(packages, name, why):
    with pytest.raises(ValueError, match=f"peer_setting {why}"):
        Vllm(Path("python"), "0.26.0", packages).choose_settings([name], "engine")


def test_a_sampler_without_its_package_is_switched_off():
    variable = "VLLM_USE_FLASHINFER_SAMPLER"
    assert Vllm(Path("python"), "0.26.0").environment(SETTINGS[0])[variable] == "0"
    assert variable not in Vllm(Path("python"), "0.26.0", ALL).environment(SETTINGS[0])


def test_the_command_of_a_server():
    command = Vllm(Path("/v/bin/python"), "0.26.0").serve_command(Path("/m"), 8123, SETTINGS[1], Work([], 9), 1152)
    assert command[:5] == ["/v/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "/m"]
    for option, value in (("--port", "8123"), ("--max-num-batched-tokens", "8192"), ("--max-model-len", "1152")):
        assert command[command.index(option) + 1] == value
    assert command[-2:] == ["--moe-backend", "deep_gemm"]


@pytest.mark.parametrize(
    ("sizes", "weights", "why"),
    [
        ({}, "fp8", "its intermediate_size is 96, and vLLM takes FP8 weights of SwiGLU in whole blocks of 128 rows"),
        ({"intermediate_size": 128}, "fp8", "its moe_intermediate_size is 32"),
        ({"intermediate_size": 128, "moe_intermediate_size": 128}, "fp8", None),
        ({}, "bf16", None),
    ],
)
def test_blocks_that_vllm_does_not_load_are_named(tmp_path, sizes, weights, why):
    write_random_folder(tmp_path, replace(MICRO, **sizes), weights)
    found = why_not_loaded(tmp_path)
    assert found is None if why is None else found.startswith(why)


def test_a_server_that_does_not_start_is_reported_with_its_last_lines(tmp_path):
    launch = Launch("a server", [sys.executable, "-c", "raise SystemExit('no GPU')"], {}, tmp_path / "log")
    with (
        pytest.raises(RuntimeError, match="it ended with exit code 1, after:\nno GPU"),
        server(launch, free_port()),
    ):
        pytest.fail("it serves")
