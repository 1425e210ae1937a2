"""Which kernels a cast is given to, on a GPU of each kind."""

import pytest
import torch

from octile.kernels import backends
from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.quantize import launcher

E4M3 = torch.float8_e4m3fn
CALLS = {  # of backends, with arguments that Hopper's own kernels take
    "quantize": lambda x: backends.quantize(x, 1, 128, E4M3, False),
    "quantize_with_scale": lambda x: backends.quantize_with_scale(x, torch.ones(1), E4M3),
    "dequantize": lambda x: backends.dequantize(x.to(E4M3), torch.ones(len(x), 1), 1, 128, torch.float32),
    "rows_and_columns": lambda x: backends.quantize_rows_and_columns(x, E4M3, False),
    "requantize": lambda x: backends.requantize_transposed(
        x.to(E4M3), torch.ones(4, 8)[:, : len(x)].mT, E4M3, True, None
    ),
    "quantize_and_transpose": lambda x: backends.quantize_and_transpose(x, E4M3, False),
    "swiglu": lambda x: backends.swiglu_quantize(x, x, E4M3, False, None),
    "swiglu_backward": lambda x: backends.swiglu_backward_quantize(x, x, x, None, None, None, E4M3, False, E4M3, True),
    "rms_norm": lambda x: backends.rms_norm_quantize(x, torch.ones(x.shape[1]), 1e-6, E4M3, False, False),
}


class Chosen(Exception):
    pass


@pytest.fixture
def chosen(monkeypatch):
    """Each of Hopper's casts says its name instead of being launched."""

    def named(name):
        def raising(*_):
            raise Chosen(name)

        return raising

    for name in CALLS:
        monkeypatch.setattr(launcher, name, named(name))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", CALLS)
def test_hopper_has_its_own(name, monkeypatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    with pytest.raises(Chosen, match=name):
        CALLS[name](torch.zeros(5, 128))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("block", [(1, 64), (16, 16), (5, 128)])
def test_other_blocks_are_tritons(block, monkeypatch):
    pytest.importorskip("triton")
    from octile.kernels.triton import quantize

    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    monkeypatch.setattr(quantize, "launch", lambda *_: "Triton")
    assert backends.quantize(torch.zeros(5, 128), *block, E4M3, False) == "Triton"


@pytest.mark.usefixtures("chosen")
def test_elsewhere_and_where_it_lies_otherwise_it_is_tritons(monkeypatch):
    pytest.importorskip("triton")
    from octile.kernels.triton import quantize

    monkeypatch.setattr(quantize, "launch", lambda *_: "Triton")
    assert CALLS["quantize"](torch.zeros(5, 128)) == "Triton"
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    assert CALLS["quantize"](torch.zeros(5, 130)) == "Triton"
