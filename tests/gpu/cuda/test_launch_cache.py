"""The launch cache on a GPU: cached launches give the same bits, from any thread and on any stream."""

import threading

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import launch_cache, request
from octile.ops.grouped import grouped_matmul_nt
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.quantize import quantize

TILE, BLOCK = (1, 128), (128, 128)
Operand = tuple[Tensor, Tensor, tuple[int, int]]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the product kernel does not run here: {reason}")


def _operand(shape: tuple[int, ...], block: tuple[int, int], seed: int) -> Operand:
    generator = torch.Generator("cuda").manual_seed(seed)
    return *quantize(torch.randn(shape, generator=generator, device="cuda"), *block, "e4m3", False), block


def test_other_operands_with_the_same_key_are_multiplied():
    w = _operand((256, 512), BLOCK, 0)
    for seed in range(1, 6):
        a = _operand((70, 512), TILE, seed)
        out = torch.empty(70, 256, device="cuda")
        matmul_nt_out(out, *a, *w, False)
        assert torch.equal(out, matmul_nt(*a, *w, torch.float32))
        assert torch.equal(matmul_nt(*a, *w, torch.float32), out)


def test_operands_at_any_address_give_the_same_bits():
    (data, scale, block), w = _operand((70, 512), TILE, 1), _operand((256, 512), BLOCK, 0)
    expected = matmul_nt(data, scale, block, *w, torch.float32)
    for past in (0, 16, 1, 16, 0, 4):
        moved = torch.empty(past + data.numel(), dtype=torch.uint8, device="cuda")[past:].view(data.dtype)
        moved = moved.view(data.shape).copy_(data)
        assert torch.equal(matmul_nt(moved, scale, block, *w, torch.float32), expected)
        assert torch.equal(matmul_nt(data, scale.contiguous(), block, *w, torch.float32), expected)


def test_invalid_operands_with_another_key_are_still_refused():
    a, w = _operand((70, 512), TILE, 1), _operand((256, 512), BLOCK, 0)
    for _ in range(2):
        matmul_nt(*a, *w, torch.float32)
        with pytest.raises(ValueError, match="a's scale must be"):
            matmul_nt(a[0], a[1][:-1], TILE, *w, torch.float32)
        with pytest.raises(ValueError, match="but its scale on cpu"):
            matmul_nt(a[0], a[1].cpu(), TILE, *w, torch.float32)


@pytest.mark.parametrize("rows", [3, 300], ids=["split along K, with a workspace", "not split"])
def test_threads_on_their_own_streams_do_not_disturb_one_another(rows: int):
    w = _operand((256, 8192), BLOCK, 0)
    inputs = [_operand((rows, 8192), TILE, seed) for seed in range(1, 5)]
    expected = [matmul_nt(*a, *w, torch.float32) for a in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outs = [matmul_nt(*inputs[number], *w, torch.float32) for _ in range(200)]
            torch.cuda.current_stream().synchronize()
            wrong.extend(number for out in outs if not torch.equal(out, expected[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_an_evicted_gemm_is_launched_again(monkeypatch):
    monkeypatch.setattr(launch_cache, "_prepared", type(launch_cache._prepared)(2))
    w, offs = _operand((2, 256, 512), BLOCK, 0), torch.tensor([20, 60], dtype=torch.int32, device="cuda")
    inputs = [_operand((rows, 512), TILE, rows) for rows in (60, 61, 62, 63, 64, 65)]
    first = [grouped_matmul_nt(*a, *w, offs, torch.bfloat16) for a in inputs]
    for a, expected in zip(inputs, first, strict=True):
        assert torch.equal(grouped_matmul_nt(*a, *w, offs, torch.bfloat16), expected)
