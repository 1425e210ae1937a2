"""Hopper's weights of top-k positions in the emulator: the reference's values, whatever the lists."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_weights
from octile.kernels.cuda.gemm import request
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_weights import sparse_attention_weights
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
T, SCALE, SMS = 320, 0.05, 3


def inputs(rows: int, n_heads: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, rows, and lists of different positions, every third of them absent."""
    generator = torch.Generator().manual_seed(n_heads)
    q, latents = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, n_heads, 576), (T, 576)))
    positions = torch.stack([torch.randperm(T, generator=generator)[:k] for _ in range(rows)]).int()
    positions[:, ::3] = -1
    return q, latents, positions


def lse_of(q: Tensor, latents: Tensor, positions: Tensor) -> Tensor:
    return sparse_attention_with_lse.reference(q.float(), latents.float(), positions, 512, SCALE)[1]


def weights(q: Tensor, latents: Tensor, positions: Tensor, lse: Tensor, seed: int = 0) -> Tensor:
    """Run the kernel on an emulated GPU of few SMs."""
    (rows, n_heads, _), k = q.shape, positions.shape[1]
    made = sparse_weights.plan(rows, n_heads, SMS)
    found = torch.full((rows, made.head_blocks, k), math.nan)
    emulator.run(
        "sparse_weights",
        made.constants,
        grid=made.grid,
        threads=sparse_weights.THREADS,
        shared_bytes=sparse_weights.SHARED,
        arguments=[
            latents, q, lse, positions, found, SCALE, n_heads, rows, k, positions.stride(0), len(latents),
        ],
        headers=made.headers,
        seed=seed,
    )  # fmt: skip
    return found.sum(1) / n_heads


def assert_as_reference(q: Tensor, latents: Tensor, positions: Tensor) -> None:
    lse = lse_of(q, latents, positions)
    expected = sparse_attention_weights.reference(q.float(), latents.float(), positions, lse, 512, SCALE)
    torch.testing.assert_close(weights(q, latents, positions, lse), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@pytest.mark.parametrize(("rows", "n_heads", "k"), [(5, 3, 300), (4, 65, 130), (3, 64, 64), (2, 130, 70)])
def test_weights_are_the_references(rows: int, n_heads: int, k: int):
    assert_as_reference(*inputs(rows, n_heads, k))


@emulated
def test_lists_of_any_length_with_absent_entries_anywhere():
    q, latents, positions = inputs(6, 2, 300)
    positions[0], positions[1, 1:], positions[2, :-1], positions[3, :200] = -1, -1, -1, -1
    positions[4, 64:128], positions[5, 130:] = -1, -1
    assert_as_reference(q, latents, positions)


@emulated
@pytest.mark.parametrize("k", [1, 63, 65, 128, 129])
def test_lists_of_few_entries(k: int):
    q, latents, positions = inputs(2, 2, 130)
    assert_as_reference(q, latents, positions[:, 1 : k + 1])  # of a stride that is not their length


@emulated
def test_positions_outside_of_the_latents_are_absent():
    q, latents, positions = inputs(3, 2, 140)
    lse = lse_of(q, latents, positions)
    outside = positions.clone()
    outside[0, ::3], outside[1, ::3], outside[2, ::3] = -(2**31), T, 2**31 - 1
    assert torch.equal(weights(q, latents, outside, lse), weights(q, latents, positions, lse))


@emulated
def test_rows_outside_the_top_k_are_not_read():
    q, latents, positions = inputs(2, 2, 200)
    lse = lse_of(q, latents, positions)
    before = weights(q, latents, positions, lse)
    others = torch.ones(T, dtype=torch.bool)
    others[positions[positions >= 0].long()] = False
    latents[others] = math.nan
    assert torch.equal(weights(q, latents, positions, lse), before)


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("seed", [1, 2])
def test_bits_do_not_depend_on_the_order_in_which_threads_run(seed: int):
    q, latents, positions = inputs(3, 65, 130)
    lse = lse_of(q, latents, positions)
    assert torch.equal(weights(q, latents, positions, lse, seed), weights(q, latents, positions, lse))


def test_rows_in_fp8_are_not_supported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    q, latents, positions = inputs(2, 2, 64)
    assert sparse_weights.why_unsupported(q, latents, positions, 512) is None
    reason = sparse_weights.why_unsupported(q, latents.view(torch.uint8), positions, 512)
    assert reason == "the latents are torch.uint8, not bfloat16"
