"""Hopper's backward pass of sparse latent attention on a GPU: gradients, bits, and replays of a graph."""

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_mla_backward as kernel
from octile.kernels.cuda.gemm import request
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from octile.ops.sparse_attention_weights import sparse_attention_weights

T, SCALE = 3000, 0.05


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


def inputs(rows: int, n_heads: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient, queries, rows, and lists: of all entries, of none, of few, with absent entries anywhere."""
    generator = torch.Generator("cuda").manual_seed(n_heads)
    do, q, latents = (
        torch.randn(*shape, generator=generator, device="cuda").bfloat16()
        for shape in ((rows, n_heads, 512), (rows, n_heads, 576), (T, 576))
    )
    positions = torch.rand(rows, T, generator=generator, device="cuda").topk(k).indices.int()
    for row, absent in enumerate((slice(0), slice(None), slice(3, None), slice(0, -3), slice(None, None, 3))):
        positions[row, absent] = -1
    return do, q, latents, positions


def gradients(do: Tensor, q: Tensor, latents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    o, lse = sparse_attention_with_lse(q, latents, positions, 512, SCALE)
    return sparse_attention_backward(do, q, latents, positions, o, lse, 512, SCALE)


def dense_gradients(do: Tensor, q: Tensor, latents: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """Gradients by autograd through dense attention in float64, a few queries at a time."""
    dlatents, dq = torch.zeros_like(latents, dtype=torch.float64), []
    for part in torch.arange(len(q), device="cuda").split(8):
        wide = [t.double().requires_grad_() for t in (q[part], latents)]
        mask = torch.zeros(len(part), T + 1, dtype=torch.bool, device="cuda")
        mask = mask.scatter_(1, positions[part].where(positions[part] >= 0, T).long(), True)[:, None, :T]
        scores = (SCALE * wide[0] @ wide[1].mT).masked_fill(~mask, -torch.inf)
        weights = scores.masked_fill(~mask.any(-1, keepdim=True), 0.0).softmax(-1) * mask
        gradient = torch.autograd.grad(weights @ wide[1][:, :512], wide, do[part].double())
        dq.append(gradient[0])
        dlatents += gradient[1]
    return torch.cat(dq), dlatents


def assert_near(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    # BF16 rounds o, p, ds, what a query adds to a row, and dq, by 2⁻⁹ of themselves each
    for ours, theirs in zip(found, exact, strict=True):
        assert not ours.isnan().any()
        assert (ours.double() - theirs).norm() <= 2**-7 * theirs.norm()
        assert ((ours.double() - theirs).abs() <= 2**-6 * theirs.abs() + 2**-6 * theirs.abs().max()).all()


@pytest.mark.parametrize(("rows", "n_heads", "k"), [(7, 1, 70), (9, 16, 2048), (40, 64, 1000), (5, 100, 2048)])
def test_gradients_are_those_of_dense_attention(rows: int, n_heads: int, k: int):
    given = inputs(rows, n_heads, k)
    assert_near(gradients(*given), dense_gradients(*given))


def test_blocks_of_queries_add_to_the_same_rows(monkeypatch: pytest.MonkeyPatch):
    given = inputs(150, 128, 300)
    exact = dense_gradients(*given)
    assert_near(gradients(*given), exact)
    monkeypatch.setattr(kernel, "MAX_PARTIAL_BYTES", 70 * 300 * 2304)
    assert kernel.queries_at_once(150, 2, 300, 132) == 66
    assert_near(gradients(*given), exact)


def test_bits_are_the_same_every_time():
    given = inputs(200, 128, 2048)
    first = gradients(*given)
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(gradients(*given), first, strict=True))


def test_tensors_of_any_strides_are_taken():
    do, q, latents, positions = inputs(20, 64, 300)
    strided = tuple(t.mT.contiguous().mT for t in (do, q, latents, positions))
    before = gradients(do, q, latents, positions)
    assert all(torch.equal(a, b) for a, b in zip(gradients(*strided), before, strict=True))


def test_a_graph_reads_the_positions_at_its_replay():
    do, q, latents, positions = inputs(30, 64, 300)
    gradients(do, q, latents, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(do, q, latents, positions)
    for shift in (1, 3):
        positions.copy_(positions.roll(shift, 0))
        graph.replay()
        expected = gradients(do, q, latents, positions)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("rows", "n_heads", "k"), [(7, 1, 70), (300, 128, 2048), (5, 100, 1000)])
def test_weights_are_those_of_the_softmax(rows: int, n_heads: int, k: int):
    _, q, latents, positions = inputs(rows, n_heads, k)
    _, lse = sparse_attention_with_lse(q, latents, positions, 512, SCALE)
    found = sparse_attention_weights(q, latents, positions, lse, 512, SCALE)
    wide = sparse_attention_with_lse(q.float(), latents.float(), positions, 512, SCALE)[1]  # by torch
    torch.testing.assert_close(lse, wide, rtol=1e-5, atol=1e-5)
    expected = sparse_attention_weights(q.float(), latents.float(), positions, wide, 512, SCALE)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)
    first = sparse_attention_weights(q, latents, positions, lse, 512, SCALE)
    assert torch.equal(found, first)
