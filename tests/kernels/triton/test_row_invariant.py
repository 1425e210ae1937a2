"""The kernel of the row-invariant GEMM against the reference."""

from types import SimpleNamespace

import pytest
import torch

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.triton import row_invariant as kernel
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
def test_rows_are_multiplied_and_do_not_depend_on_each_other(
    dtypes: tuple[torch.dtype, torch.dtype], monkeypatch: pytest.MonkeyPatch
):
    # tiles of one size: the interpreter multiplies others in other orders, which a tensor core does not (tests/gpu)
    monkeypatch.setattr(kernel, "device_properties", lambda _: SimpleNamespace(num_sms=100))
    a, w = torch.randn(70, 2, 100).transpose(0, 1).to(dtypes[0]), torch.randn(2, 33, 100).to(dtypes[1])
    together = kernel.launch(a, w, torch.float32)
    torch.testing.assert_close(together, a.float() @ w.float().mT, rtol=1e-5, atol=1e-4)
    assert torch.equal(kernel.launch(a[:, 66:67], w, torch.float32), together[:, 66:67])


@pytest.mark.parametrize("wide", [2048, 128])
def test_many_rows_have_larger_tiles(wide: int, monkeypatch: pytest.MonkeyPatch):
    hopper = SimpleNamespace(num_sms=2, shared_bytes=SHARED_BYTES)
    monkeypatch.setattr(kernel, "device_properties", lambda _: hopper)
    monkeypatch.setattr(kernel, "WIDE", wide)
    tiles = kernel.ROW_INVARIANT_WIDE if wide == 128 else kernel.ROW_INVARIANT_OF_MANY
    assert kernel.choose_tiles(300, 140, 2, False, hopper) == tiles
    a, w = torch.randn(2, 300, 100).bfloat16(), torch.randn(2, 140, 100).bfloat16()  # tiles that end within the matrix
    torch.testing.assert_close(kernel.launch(a, w, torch.float32), a.float() @ w.float().mT, rtol=1e-5, atol=1e-4)


def test_parts_of_k_have_the_same_bits_in_programs_of_their_own_and_in_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "CHUNK", 64)
    a, w = torch.randn(1, 3, 200), torch.randn(1, 40, 200)
    split = kernel.launch(a, w, torch.bfloat16)
    strided = torch.zeros(3, 2, 50, dtype=torch.bfloat16)
    kernel.launch_out(strided[:, 1:, 5:45].transpose(0, 1), a, w)
    assert torch.equal(strided[:, 1:, 5:45].transpose(0, 1), split)
    monkeypatch.setattr(kernel, "device_properties", lambda _: SimpleNamespace(num_sms=0))
    assert torch.equal(kernel.launch(a, w, torch.bfloat16), split)
