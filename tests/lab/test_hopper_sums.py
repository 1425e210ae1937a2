"""Operators with Hopper's sums. `octile lab recompute` compares them with what a GPU has recorded."""

import pytest
import torch
from torch import Tensor

from octile.lab import hopper_sums
from octile.lab.tensor_core import tensor_core_matmul
from octile.ops.absorbed_attention import PART
from octile.ops.gate import gate
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from octile.ops.row_invariant import row_invariant_matmul_nt, row_invariant_matmul_nt_out

SCALE = 0.1
LATENT, ROPE, HEADS = 96, 32, 4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_short_row_is_summed_in_one_chain_and_a_long_one_in_parts():
    a, b = normal(2, 5, 1200), normal(2, 7, 1200, seed=1)
    found = hopper_sums.multiply(a, b)
    parts = [tensor_core_matmul(a[1][:, i : i + 512], b[1][:, i : i + 512]) for i in (0, 512, 1024)]
    assert torch.equal(found[1], parts[0] + parts[1] + parts[2])
    assert torch.equal(hopper_sums.multiply(a[..., :512], b[..., :512])[1], parts[0])
    torch.testing.assert_close(found.double(), a.double() @ b.double().mT, rtol=1e-4, atol=1e-3)


def test_many_columns_are_summed_in_one_chain():
    a, b = normal(1, 2, 1024), normal(1, 2048, 1024, seed=1)
    assert torch.equal(hopper_sums.multiply(a, b)[0], tensor_core_matmul(a[0], b[0]))


def cache_of(n: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """Return a cache, and its pages in another order."""
    cache = normal(5, 64, LATENT + ROPE, seed=seed)
    return cache, torch.tensor([3, 0, 4, 1], dtype=torch.int32)[: -(-n // 64)]


@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_attention_is_close_to_the_reference(n: int):
    cache, pages = cache_of(n)
    q, lengths = normal(n, HEADS, LATENT + ROPE, seed=3), torch.arange(1, n + 1, dtype=torch.int32)
    arguments = q, cache, pages.expand(n, -1), lengths, LATENT, SCALE
    o, lse = hopper_sums.attend(*arguments)
    expected_o, expected_lse = paged_attention_with_lse(*arguments, 512, 1)
    assert o.dtype == torch.bfloat16
    torch.testing.assert_close(o, expected_o, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


def test_a_row_of_attention_does_not_depend_on_others():
    cache, pages = cache_of(150)
    q, lengths = (
        normal(8, HEADS, LATENT + ROPE, seed=3),
        torch.tensor([150, 1, 0, 64, 65, 20, 128, 3], dtype=torch.int32),
    )
    o, lse = hopper_sums.attend(q, cache, pages.expand(8, -1), lengths, LATENT, SCALE)
    for row in range(8):
        own = slice(row, row + 1)
        alone = hopper_sums.attend(q[own], cache, pages[None], lengths[own], LATENT, SCALE)
        assert torch.equal(alone[0], o[own])
        assert torch.equal(alone[1], lse[own])
    assert not o[2].any()
    assert (lse[2] == float("-inf")).all()


def test_the_gate_chooses_by_the_summed_logits_for_any_dtype_of_the_weight():
    x, weight = normal(6, 256), normal(16, 256, seed=1)
    settings = None, 4, 4, 2, 2, "sigmoid", True, 2.5
    weights, experts, logits = hopper_sums.choose_experts(x, weight.float(), *settings)
    assert torch.equal(logits, hopper_sums.multiply(x[None], weight[None])[0])
    for found, expected in zip(
        hopper_sums.choose_experts(x, weight, *settings), (weights, experts, logits), strict=True
    ):
        assert torch.equal(found, expected)
    own_weights, own_experts, own_logits = gate(x, weight, *settings, True)
    assert torch.equal(own_experts, experts)
    torch.testing.assert_close((own_weights, own_logits), (weights, logits), rtol=1e-4, atol=1e-4)


def test_compute_replaces_what_it_models_and_calls_the_rest():
    a, b = normal(1, 3, 64), normal(1, 4, 64, seed=1)
    expected = hopper_sums.multiply(a, b)
    assert torch.equal(hopper_sums.compute(row_invariant_matmul_nt.overload, (a, b, torch.float32), {}), expected)
    out = torch.empty(1, 3, 4, dtype=torch.bfloat16)
    assert hopper_sums.compute(row_invariant_matmul_nt_out.overload, (out, a, b), {}) is None
    assert torch.equal(out, expected.bfloat16())
    wide = a.float(), b.float(), torch.float32
    found = hopper_sums.compute(row_invariant_matmul_nt.overload, wide, {})
    assert torch.equal(found, row_invariant_matmul_nt(*wide))
    x, weight = normal(3, 64), normal(8, 64, seed=1)
    gating = x, weight, None, 2, 1, 1, 1, "softmax", False, 1.0
    of_gate = hopper_sums.compute(gate.overload, (*gating, True), {})[2]
    assert torch.equal(of_gate, hopper_sums.choose_experts(*gating)[2])
    assert torch.equal(hopper_sums.compute(gate.overload, gating, {})[2], gate(*gating)[2])


@pytest.mark.parametrize("part", [PART, 64])
def test_attention_in_parts_of_another_size_is_that_of_this_machine(part: int):
    cache, pages = cache_of(100)
    q, lengths = normal(2, HEADS, LATENT + ROPE, seed=3), torch.tensor([100, 70], dtype=torch.int32)
    arguments = q, cache, pages.expand(2, -1), lengths, LATENT, SCALE, part, 1
    found = hopper_sums.compute(paged_attention.overload, arguments, {})
    modeled, own = hopper_sums.attend(*arguments[:6])[0], paged_attention(*arguments)
    assert torch.equal(found, modeled if part == PART else own)
    assert not torch.equal(modeled, own)
