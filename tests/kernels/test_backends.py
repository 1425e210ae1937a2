"""Tests of backend selection: which kernel a quantization runs on each kind of GPU."""

import pytest
import torch

from octile.kernels import backends
from octile.kernels.cuda.gemm import request
from octile.kernels.memory_layout import new_scale

E4M3 = torch.float8_e4m3fn
CALLS = {  # of the operators that quantize, with arguments that Hopper's own kernels support
    "quantize": lambda x: (x, 1, 128, E4M3, False),
    "quantize_with_scale": lambda x: (x, torch.ones(1), E4M3),
    "dequantize": lambda x: (x.to(E4M3), torch.ones(len(x), 1), 1, 128, torch.float32),
    "quantize_rows_and_columns": lambda x: (x, E4M3, False, None),
    "quantize_joined_rows_and_columns": lambda x: ([x, x], E4M3, False),
    "requantize_transposed": lambda x: (x.to(E4M3), new_scale(x, 1, 128).fill_(1.0), E4M3, False, None, None, False),
    "quantize_and_transpose": lambda x: (x, E4M3, False),
    "quantize_transposed": lambda x: (x, E4M3, False),
    "quantize_joined": lambda x: ([x, x], E4M3, False, True, True),
    "quantize_matrices": lambda x: ([[x], [x, x]], E4M3, False, True, True),
    "swiglu_quantize": lambda x: (x, x, E4M3, False, None),
    "swiglu_quantize_and_save": lambda x: (x, x, E4M3, False, E4M3, False, None),
    "swiglu_backward_quantize": lambda x: (x, x, x, None, None, None, E4M3, False, E4M3, True, None, False),
    "rms_norm": lambda x: (x, torch.ones(x.shape[1]), 1e-6),
    "rms_norm_quantize": lambda x: (x, torch.ones(x.shape[1]), 1e-6, E4M3, False, False),
}


class Chosen(Exception):
    pass


@pytest.fixture
def chosen(monkeypatch):
    """Each of Hopper's kernels raises its operator's name instead of being launched."""

    def named(name):
        def raising(*_):
            raise Chosen(name)

        return raising

    for name in CALLS:
        monkeypatch.setitem(backends.TABLE, name, backends.TABLE[name]._replace(hopper=named(name)))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", CALLS)
def test_hopper_gets_the_cuda_kernel(name, monkeypatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    with pytest.raises(Chosen, match=f"^{name}$"):
        backends.run(name, *CALLS[name](torch.zeros(5, 1024)))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("block", [(1, 64), (16, 16), (5, 128)])
def test_other_blocks_get_the_triton_kernel(block, monkeypatch):
    pytest.importorskip("triton")
    from octile.kernels.triton import quantize

    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    monkeypatch.setattr(quantize, "launch", lambda *_: "Triton")
    assert backends.run("quantize", torch.zeros(5, 128), *block, E4M3, False) == "Triton"


@pytest.mark.usefixtures("chosen")
def test_other_gpus_and_other_layouts_get_the_triton_kernel(monkeypatch):
    pytest.importorskip("triton")
    from octile.kernels.triton import quantize

    monkeypatch.setattr(quantize, "launch", lambda *_: "Triton")
    assert backends.run("quantize", *CALLS["quantize"](torch.zeros(5, 128))) == "Triton"
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    assert backends.run("quantize", *CALLS["quantize"](torch.zeros(5, 130))) == "Triton"


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize(("columns", "values"), [(512, False), (256, True)])
def test_the_norm_of_narrow_rows_gets_the_triton_kernel(columns: int, values: bool, monkeypatch):
    pytest.importorskip("triton")
    from octile.kernels.triton import norm

    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    monkeypatch.setattr(norm, "launch", lambda *_: "Triton")
    wider = columns + 8
    assert backends.run("rms_norm_quantize", *_norm(columns, values)) == "Triton"
    with pytest.raises(Chosen):
        backends.run("rms_norm_quantize", *_norm(wider, values))


def _norm(columns: int, values: bool) -> tuple[object, ...]:
    return torch.zeros(5, columns), torch.ones(columns), 1e-6, E4M3, False, values


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)])
def test_gemms_in_blocks_of_32_are_said_to_be_emulated(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(request, "why_not_on", lambda _: None if capability == (9, 0) else "another GPU")
    monkeypatch.setattr(backends, "find_spec", lambda _: True)
    assert "GEMMs in blocks of 32 (mxfp8)" in backends.choices()["matmul_nt"][1]
    assert "emulated in FP16" in backends.choices()["matmul_nt"][1]
