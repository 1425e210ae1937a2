"""Tests of what `octile doctor` prints about a machine."""

import os
import pkgutil
import subprocess
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import octile.ops
from octile.bench import doctor
from octile.bench.doctor import examine, show
from octile.kernels import backends, flash_attn_4
from octile.kernels.backends import (
    ATTENTION,
    COMPILED_ON_CPU,
    GEMMS_ON_CPU,
    HOPPER_OR_TORCH,
    ONLY_TORCH,
    OPERATORS,
    ROW_INVARIANT,
    TORCH_ON_CPU,
    TRITON_ON_HOPPER,
    WITH_HOPPER,
)
from octile.kernels.cuda.gemm import request

for module in pkgutil.iter_modules(octile.ops.__path__, "octile.ops."):
    import_module(module.name)  # they register the operators


def test_every_operator_is_listed():
    names = [n.removeprefix("octile::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("octile::")]
    registered = {name.partition(".")[0] for name in names}
    assert registered == set(OPERATORS)


@pytest.fixture
def pretend(monkeypatch):
    """pretend(capability, *missing): a GPU of that compute capability, or none, and packages that are not installed.

    flash-attn-4 is installed if `with_flash_attn_4` is true.
    """

    def simulate(capability, *missing, with_flash_attn_4=False):
        def version(package):
            if not with_flash_attn_4:
                raise PackageNotFoundError(package)
            return "4.0.0"

        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: int(capability is not None))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        for module in (doctor, backends, request):
            monkeypatch.setattr(module, "find_spec", lambda name: None if name in missing else True)
        monkeypatch.setattr(flash_attn_4, "version", version)
        clear()

    def clear():
        request.why_not_on.cache_clear()
        flash_attn_4.why_not_on.cache_clear()

    yield simulate
    clear()


def kernels():
    """operator → its kernel."""
    return {row["operator"].removeprefix("octile::"): row["kernel"] for row in examine()["operators"]}


@pytest.mark.parametrize("multiplies", [False, True], ids=["no AVX512-BF16", "AVX512-BF16"])
def test_without_a_gpu_what_has_a_kernel_is_compiled_and_the_rest_is_the_reference(pretend, monkeypatch, multiplies):
    pretend(None)
    monkeypatch.setattr(backends.cpu, "can_multiply", lambda: multiplies)
    compiled = (*COMPILED_ON_CPU, *ATTENTION, ROW_INVARIANT, *(GEMMS_ON_CPU if multiplies else ()))
    expected = dict.fromkeys(OPERATORS, "reference (torch, CPU)") | dict.fromkeys(TORCH_ON_CPU, "torch")
    assert kernels() == expected | dict.fromkeys(compiled, "C++")


def test_without_a_gpu_and_a_compiler_every_operator_is_the_reference_or_torchs(pretend, monkeypatch):
    pretend(None)
    monkeypatch.setattr(backends.cpu, "library", lambda: None)
    expected = dict.fromkeys(OPERATORS, "reference (torch, CPU)") | dict.fromkeys(TORCH_ON_CPU, "torch")
    assert kernels() == expected


def test_the_operators_with_a_kernel_for_the_cpu_are_named():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = [name for name in OPERATORS if hasattr(torch.ops.octile, name)]
    assert {name for name in registered if has_kernel(f"octile::{name}", "CPU")} == {
        *ATTENTION,
        *COMPILED_ON_CPU,
        ROW_INVARIANT,
        *GEMMS_ON_CPU,
        *TORCH_ON_CPU,
    }


@pytest.mark.parametrize("machine", [[(7, 5)], [(9, 0), "triton"]], ids=["old GPU", "no Triton"])
def test_doctor_reports_that_no_kernel_can_run(pretend, machine):
    pretend(*machine)
    assert kernels() == dict.fromkeys(OPERATORS, "none")


def test_on_a_gpu_every_operator_has_a_kernel(pretend):
    pretend((8, 9))
    assert kernels() == dict.fromkeys(OPERATORS, "Triton") | dict.fromkeys((*ONLY_TORCH, *HOPPER_OR_TORCH), "torch")


def test_on_hopper_gemms_and_quantization_use_cuda_kernels(pretend):
    pretend((9, 0))
    own = {name for name, kernel in kernels().items() if kernel == "CUDA C++"}
    assert own == {*WITH_HOPPER, *HOPPER_OR_TORCH} - {*TRITON_ON_HOPPER}
    assert {"matmul_nt", "grouped_wgrad_out", "quantize", "dequantize", "requantize_transposed", "gate"} < own
    assert kernels()["packed_matmul_nt"] == "Triton"


def test_on_hopper_without_bindings_gemms_and_quantization_run_in_triton(pretend):
    pretend((9, 0), "cuda.bindings")
    assert set(kernels().values()) == {"Triton", "torch"}
    why = {row["operator"]: row["why"] for row in examine()["operators"]}
    assert "cuda-bindings and NVRTC are not installed" in why["octile::matmul_nt"]


def test_every_operator_is_in_one_list():
    assert len(OPERATORS) == len(set(OPERATORS))


def test_gpus_without_fp8_tensor_cores_are_named(pretend):
    pretend((8, 0))
    why = {row["operator"]: row["why"] for row in examine()["operators"]}
    assert "sm_80 has no FP8 tensor cores" in why["octile::matmul_nt"]


def reasons() -> dict[str, str]:
    return {row["operator"].removeprefix("octile::"): row["why"] for row in examine()["operators"]}


def test_on_hopper_a_reason_says_which_calls_have_another_kernel(pretend):
    pretend((9, 0))
    why = reasons()
    few, many = "up to 256 experts and 256 tokens", "8, 16, … 64 experts and at least 2048 tokens"
    assert why["gate"] == f"for {few}, and {many}; Triton's for others"
    assert why["top_keys"] == "for up to 4096 keys; torch computes others"
    assert why["adamw"] == "its only kernel on GPUs, for sm_80 and later"


ATTENTION_OF_TRAINING = ("attention", "attention_backward")
OF_PACKED = ("packed_attention", "packed_attention_backward")


def test_on_hopper_flash_attn_4_is_named_where_it_is_installed(pretend, monkeypatch):
    pretend((9, 0), with_flash_attn_4=True)
    monkeypatch.setattr(flash_attn_4, "load", lambda: None)
    assert {kernels()[name] for name in ATTENTION_OF_TRAINING} == {"flash-attn-4"}
    assert {reasons()[name] for name in ATTENTION_OF_TRAINING} == {
        "for causal attention in BF16 with 192/128 or 128 channels and at least 1024 tokens in MLA and MHA "
        "layers, except in deterministic mode; for others cuDNN or FlashAttention, as torch's own attention chooses"
    }


def test_flash_attn_4_is_named_for_prompts_and_packed_texts(pretend, monkeypatch):
    pretend((9, 0), with_flash_attn_4=True)
    monkeypatch.setattr(flash_attn_4, "load", lambda: None)
    assert {kernels()[name] for name in ("ragged_attention", *OF_PACKED)} == {"flash-attn-4"}
    assert reasons()["ragged_attention"] == (
        "for up to 256 prompts in BF16 with 192/128 channels and at least 1024 rows together; for others a kernel for "
        "texts of any lengths, and cuDNN's where all texts have the same multiple of 1,024 rows"
    )
    assert {reasons()[name] for name in OF_PACKED} == {
        "for up to 256 packed texts (in every sequence as many as in that with the most) in BF16 with 192/128 or 128 "
        "channels, at least 1024 rows, and 256 a text on average, except in deterministic mode; for others kernels "
        "that add in a fixed order"
    }


def test_prompts_and_packed_texts_have_kernels_of_triton_without_flash_attn_4(pretend):
    pretend((9, 0))
    assert {kernels()[name] for name in ("ragged_attention", *OF_PACKED)} == {"Triton"}
    assert {reasons()[name] for name in OF_PACKED} == {
        "kernels that add in a fixed order; flash-attn-4 is not used: it is not installed: pip install "
        '"octile[flash-attn-4]"'
    }


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        ((9, 0), 'it is not installed: pip install "octile[flash-attn-4]"'),
        ((8, 9), "it was measured on Hopper (sm_90) only"),
    ],
)
def test_why_flash_attn_4_is_not_used_is_reported(pretend, capability, reason):
    pretend(capability)
    assert {kernels()[name] for name in ATTENTION_OF_TRAINING} == {"torch"}
    assert {reasons()[name] for name in ATTENTION_OF_TRAINING} == {
        f"cuDNN or FlashAttention, as torch's own attention chooses; flash-attn-4 is not used: {reason}"
    }


def test_flash_attn_4_that_cannot_be_imported_is_reported(pretend, monkeypatch):
    pretend((9, 0), with_flash_attn_4=True)

    def fail():
        raise ImportError("flash-attn-4 4.0.0 is installed, but cannot be imported")

    monkeypatch.setattr(flash_attn_4, "load", fail)
    assert {kernels()[name] for name in ATTENTION_OF_TRAINING} == {"none"}
    assert {reasons()[name] for name in ATTENTION_OF_TRAINING} == {
        "flash-attn-4 4.0.0 is installed, but cannot be imported"
    }


def test_a_reason_is_that_of_its_operator(pretend):
    pretend((8, 9))
    why = reasons()
    assert "promotes to FP32" in why["matmul_nt"]
    assert "FP32" not in why["quantize"] + why["adamw"]
    assert why["quantize"].endswith("Hopper's are not used: they are written for Hopper (sm_90)")


def test_without_a_compiler_the_operators_that_it_compiles_say_so(pretend, monkeypatch):
    pretend(None)
    monkeypatch.setattr(backends.cpu, "library", lambda: None)
    named = {name for name, why in reasons().items() if "a C++ compiler is missing" in why}
    assert named == {*COMPILED_ON_CPU, *ATTENTION, ROW_INVARIANT, *GEMMS_ON_CPU}


def test_a_processor_that_does_not_multiply_bf16_is_the_reason_of_gemms(pretend, monkeypatch):
    pretend(None)
    monkeypatch.setattr(backends.cpu, "can_multiply", lambda: False)
    assert {name for name, why in reasons().items() if "AVX512-BF16" in why} == set(GEMMS_ON_CPU)


def test_each_reason_is_printed_with_its_operators(monkeypatch, capsys):
    rows = [
        {"operator": f"octile::{name}", "kernel": "C++", "why": why} for name, why in zip("abc", "xyx", strict=True)
    ]
    show(examine() | {"operators": rows}, as_json=False)
    shown = capsys.readouterr().out
    assert "1. C++: x\n2. C++: y\n" in shown
    table = [line.split() for line in shown[shown.index("octile::a") - 4 : shown.index("1. C++")].splitlines()]
    assert [(row[1], row[5]) for row in table if len(row) > 5] == [
        ("octile::a", "1"),
        ("octile::b", "2"),
        ("octile::c", "1"),
    ]


def test_more_threads_than_cores_is_advised_against(monkeypatch):
    monkeypatch.setattr("octile.kernels.cpu.count_cores", lambda: 0)
    assert "set OMP_NUM_THREADS" in examine()["advice"][-1]


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert examine()["machine"]["cores"] == os.cpu_count()


def test_the_output_is_readable(capsys):
    show(examine(), as_json=False)
    assert "octile::matmul_nt" in capsys.readouterr().out


def test_without_a_gpu_the_output_says_what_dispatch_uses(pretend, capsys):
    pretend(None)
    show(examine(), as_json=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert "dispatch to experts on other ranks: all_to_all_single over gloo" in shown
    assert "dispatch across nodes: all_to_all_single over gloo" in shown
    assert "there is no GPU" in shown
    assert "links between GPUs" not in shown


def test_the_links_between_gpus_are_a_table(capsys):
    links = [{"first": 0, "second": 1, "link": "NVLink", "can_access": True}]
    show(examine() | {"links": links, "dispatch": "kernels"}, as_json=False)
    shown = capsys.readouterr().out
    (row,) = [line for line in shown[shown.index("links between GPUs") :].splitlines() if "0 and 1" in line]
    assert "NVLink" in row
    assert "yes" in row
    assert "dispatch to experts on other ranks: kernels" in shown


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """A folder of caches with two compiled kernels and one token store."""
    folder = tmp_path / "all caches"
    (folder / "tokens" / "0123").mkdir(parents=True)
    sizes = {"a.compiled": 300, "b.compiled": 700, "tokens/0123/train.npy": 2000, "tokens/0123.lock": 0}
    for name, size in sizes.items():
        (folder / name).write_bytes(bytes(size))
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(folder))
    return folder


def test_the_caches_have_their_place_and_size(caches):
    found = [(row["cache"], row["folder"], row["entries"], row["bytes"]) for row in examine()["caches"]]
    assert found == [("compiled kernels", str(caches), 2, 1000), ("tokens", str(caches / "tokens"), 1, 2000)]


def test_the_command_that_is_printed_empties_a_cache(caches, capsys):
    show(examine(), as_json=False)
    shown = capsys.readouterr().out
    assert f"cache of compiled kernels, {caches}: 1 kB in 2 items; to empty it: rm '{caches}'/*.compiled\n" in shown
    assert f"cache of tokens, {caches}/tokens: 2 kB in 1 item; to empty it: rm -r '{caches}/tokens'\n" in shown
    for cache in examine()["caches"]:
        subprocess.run(cache["to_empty"], shell=True, check=True)
    assert [(cache["entries"], cache["bytes"]) for cache in examine()["caches"]] == [(0, 0), (0, 0)]


def test_an_empty_cache_needs_no_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))
    show(examine(), as_json=False)
    assert f"cache of tokens, {tmp_path}/tokens: 0 B in 0 items\n" in capsys.readouterr().out


def test_a_user_without_a_home_has_no_caches(monkeypatch):
    for name in ("OCTILE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def fail(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert examine()["caches"] == []


def test_names_are_whole_on_a_narrow_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    show(examine(), as_json=False)
    shown = capsys.readouterr().out
    assert "…" not in shown[shown.index("operators") :]


@pytest.fixture
def with_kernels():
    rows = [
        {"kernel": "quantize", "case": "quantize 1×128", "registers": 40, "shared_bytes": 0},
        {"kernel": "product", "case": "x · wᵀ", "registers": 168, "shared_bytes": 2, "spill_bytes": 7, "warnings": ""},
    ]
    return examine() | {"kernels": {"architecture": "sm_90", "compilers": ["Triton 3", "nvrtc 13"], "rows": rows}}


def test_kernels_in_triton_and_in_cuda_are_in_one_table(monkeypatch, capsys, with_kernels):
    monkeypatch.setenv("COLUMNS", "200")
    show(with_kernels, as_json=False)
    shown = capsys.readouterr().out
    table = [line.split() for line in shown[shown.index("kernels") :].splitlines() if "│" in line]
    assert [line[1] for line in table] == ["quantize", "product"]
    assert "7" in table[1]


def test_the_table_of_kernels_names_architecture_and_compilers(capsys, with_kernels):
    show(with_kernels, as_json=False)
    shown = capsys.readouterr().out
    assert "compiled for sm_90" in shown
    assert "by Triton 3, nvrtc 13" in shown


@pytest.fixture
def compilers_used(monkeypatch):
    """Have no CUDA kernel compiled, and return the compilers that were asked."""
    from octile.kernels.cuda import compile_all
    from octile.kernels.cuda.jit import compiler

    asked = []

    def fake(kernels, advance):
        asked.append(os.environ[compiler.SETTING])
        advance(len(kernels))
        return [compile_all.CompiledKernel("product", "a", 168, 0, 0, 100, float(len(asked)), "")]

    monkeypatch.setattr(compile_all, "specializations", lambda: ["product"])
    monkeypatch.setattr(compile_all, "compile_concurrently", fake)
    monkeypatch.setattr(compiler, "compiler", lambda: os.environ[compiler.SETTING])
    monkeypatch.delenv(compiler.SETTING, raising=False)
    return asked


def test_both_compilers_are_timed(compilers_used):
    (row,), compilers = doctor._compile_cuda(is_quiet=True)
    assert (row["nvrtc_seconds"], row["nvcc_seconds"]) == (1.0, 2.0)
    assert compilers == compilers_used == ["nvrtc", "nvcc"]
    assert "OCTILE_CUDA_COMPILER" not in os.environ


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "JSON"])
def test_a_terminal_shows_what_is_compiled_but_for_json(compilers_used, monkeypatch, capsys, options):
    from octile import cli
    from octile.kernels.triton import compile_all

    def compile_none(architecture, advance):
        advance(len(compile_all.cases()))
        return []

    monkeypatch.setattr(compile_all, "compile_all", compile_none)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    cli.main(["doctor", "--compile", "sm_90", *options])
    shown = capsys.readouterr().err
    for what in ("Triton kernels", "CUDA C++ kernels, nvrtc", "CUDA C++ kernels, nvcc"):
        assert (f"compiling {what}" in shown) == (options == [])


def test_without_nvcc_only_nvrtc_is_timed(compilers_used, monkeypatch):
    from octile.kernels.cuda.jit import compiler

    def find():
        if os.environ[compiler.SETTING] == "nvcc":
            raise FileNotFoundError("no nvcc")
        return "nvrtc"

    monkeypatch.setattr(compiler, "compiler", find)
    (row,), compilers = doctor._compile_cuda(is_quiet=True)
    assert row["nvrtc_seconds"] == 1.0
    assert "nvcc_seconds" not in row
    assert compilers == ["nvrtc"]


@pytest.mark.parametrize("where", ["message", "help"])
def test_the_architectures_are_the_same_wherever_they_are_named(where, capsys):
    from octile import cli
    from octile.kernels.triton.compile_all import ARCHITECTURES

    with pytest.raises(SystemExit) if where == "message" else nullcontext():
        cli.main(["doctor", "--compile", "sm_12"] if where == "message" else ["doctor", "--help"])
    captured = capsys.readouterr()
    words = (captured.out + captured.err).replace(",", " ").replace(";", " ").split()
    assert [word for word in words if word.startswith("sm_")][: len(ARCHITECTURES)] == list(ARCHITECTURES)
