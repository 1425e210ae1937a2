"""Tests of how FlashMLA gets octile's operands, on a CPU: a module in its place computes by octile's operators."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.bench import flash_mla
from octile.ops.latent_cache import PAGE
from octile.ops.paged_attention import paged_attention
from octile.ops.sparse_attention import sparse_attention
from tests.ops.paged_caches import filled_cache

SCALE = 0.05


def sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int) -> tuple[Tensor]:
    """kv: [T, 1, W]. indices: [S, 1, K]."""
    return (sparse_attention(q, kv[:, 0], indices[:, 0], d_v, sm_scale),)


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    schedule: str,
    num_splits: None,
    softmax_scale: float,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor]:
    """q: [T, n, H, W]. k_cache: [P, 64, 1, ·]. indices: [T, n, K]."""
    assert (schedule, num_splits, causal) == ("schedule", None, False)
    rows, cache = q.flatten(0, 1), k_cache[:, :, 0]
    if indices is None:
        o = paged_attention(rows, cache, block_table, cache_seqlens, head_dim_v, softmax_scale)
    else:
        assert is_fp8_kvcache
        o = sparse_attention(rows, cache.flatten(0, 1), indices.flatten(0, 1), head_dim_v, softmax_scale)
    return (o.view(*q.shape[:3], head_dim_v),)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(
        flash_mla_sparse_fwd=sparse_fwd,
        flash_mla_with_kvcache=with_kvcache,
        get_mla_metadata=lambda: ("schedule", None),
    )
    monkeypatch.setitem(sys.modules, "flash_mla", found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def chosen(rows: int, most: int, k: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.stack([torch.randperm(most, generator=generator)[:k] for _ in range(rows)]).int()


def prefill() -> tuple[Callable[[], Tensor], dict[str, Any]]:
    q, latents, positions = drawn(3, 64, 576), drawn(200, 576), chosen(3, 200, 64)

    def ours() -> Tensor:
        return sparse_attention(q, latents, positions, 512, SCALE)

    return ours, flash_mla.prefill(ours, q, latents, positions, SCALE)


def sparse_decoding() -> tuple[Callable[[], Tensor], dict[str, Any]]:
    q, cache, pages = drawn(4, 64, 576), filled_cache(6, 512, 64, torch.uint8), chosen(4, 6, 3)
    slots = flash_mla.look_up(pages, chosen(4, 3 * PAGE, 64))

    def ours() -> Tensor:
        return sparse_attention(q, cache.flatten(0, 1), slots, 512, SCALE)

    return ours, flash_mla.sparse_decoding(ours, q, cache, slots, 2, SCALE)


def decoding() -> tuple[Callable[[], Tensor], dict[str, Any]]:
    q, cache, pages = drawn(2, 64, 576), filled_cache(6, 512, 64, torch.bfloat16), chosen(2, 6, 3)
    lengths = torch.tensor([100, 170], dtype=torch.int32)

    def ours() -> Tensor:
        return paged_attention(q, cache, pages, lengths, 512, SCALE)

    return ours, flash_mla.decoding(ours, q, cache, pages, lengths, SCALE)


CASES = pytest.mark.parametrize("case", [prefill, sparse_decoding, decoding])


@CASES
def test_it_computes_the_same(case: Callable[[], Any], library: SimpleNamespace):
    ours, theirs = case()
    assert torch.equal(theirs["FlashMLA"](), ours())


@CASES
def test_other_results_are_not_measured(
    case: Callable[[], Any],
    library: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(library, "flash_mla_sparse_fwd", lambda *given: (2 * sparse_fwd(*given)[0],))
    monkeypatch.setattr(library, "flash_mla_with_kvcache", lambda *given: (2 * with_kvcache(*given)[0],))
    assert case()[1] == {}
    assert "no FlashMLA: ValueError: its result differs by 1 of the largest value" in capsys.readouterr().err


@CASES
def test_without_it_there_is_no_peer(
    case: Callable[[], Any],
    library: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    assert case()[1] == {}
    assert "no FlashMLA: ModuleNotFoundError" in capsys.readouterr().err


def test_heads_for_which_it_has_no_sparse_kernel_are_left_out(library: SimpleNamespace):
    q, latents, positions = drawn(3, 16, 576), drawn(200, 576), chosen(3, 200, 64)
    assert flash_mla.prefill(lambda: q, q, latents, positions, SCALE) == {}


def test_slots_are_those_of_the_pages():
    pages, positions = torch.tensor([[4, 0], [1, 3]]).int(), torch.tensor([[0, 65], [63, 127]]).int()
    assert flash_mla.look_up(pages, positions).tolist() == [[4 * 64, 1], [64 + 63, 3 * 64 + 63]]
