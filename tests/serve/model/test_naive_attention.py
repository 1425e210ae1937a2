"""Tests of attention of prefill chunks: in parts, and from keys and values that were computed before."""

from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.serve.model.attention import NaiveAttention
from octile.serve.model.gemms import Gemms
from octile.serve.runner.batch import Chunk
from octile.serve.runner.kv_cache import KVCache
from octile.serve.runner.step import Layout, Step, mixed_step
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, new_model

PAGES = array("i", [2, 0, 1])
LAYER = 1


@pytest.fixture(scope="module")
def attention() -> tuple[NaiveAttention, ServedWeights]:
    """Attention over three pages of random latents."""
    weights = ServedWeights.of_model(new_model(fp8=True))
    cache = KVCache(2, 3, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim, "float32", torch.device("cpu"))
    cache.layers[LAYER].normal_(generator=torch.Generator().manual_seed(0))
    gemms = Gemms(weights.dtype, weights.power_of_2, batch_invariant=False)
    unrotated = torch.ones(1, CONFIG.qk_rope_head_dim // 2), torch.zeros(1, CONFIG.qk_rope_head_dim // 2)
    return NaiveAttention(CONFIG, weights.n_heads, gemms, cache, unrotated, CONFIG.qk_head_dim**-0.5), weights


def step_of(*chunks: tuple[int, int]) -> Step:
    """A step of prefill chunks, each of which has so many rows and so many positions before them."""
    of = [Chunk([0] * rows, start, PAGES, 0) for rows, start in chunks]
    return mixed_step(Layout.of(of, absorbed_only=False), 1, torch.device("cpu"))


def attend(attention: tuple[NaiveAttention, ServedWeights], step: Step, q_THX: Tensor, own: bool = False) -> Tensor:
    naive, weights = attention
    w = weights.blocks[LAYER].attention
    out_THV = torch.full((*q_THX.shape[:2], CONFIG.v_head_dim), torch.nan)
    kv_TY, rope_TR = naive.decompressed(LAYER, w, step.slots)
    for piece in step.prefills:
        rows = slice(piece.first_row, piece.first_row + piece.rows)
        naive.attend(out_THV[rows], q_THX[rows], LAYER, w, step, piece, (kv_TY[rows], rope_TR[rows]) if own else None)
    return out_THV


def queries(n: int, size: float = 1.0) -> Tensor:
    drawn = torch.randn(n, CONFIG.num_attention_heads, CONFIG.qk_head_dim, generator=torch.Generator().manual_seed(n))
    return size * drawn


@given(
    rows=st.integers(9, 60),
    start=st.integers(1, 130),  # a chunk without positions before it fits
    part=st.integers(1, 100),
    size=st.sampled_from([0.0, 1.0, 1000.0]),
)
def test_a_chunk_attends_in_parts_as_to_all_positions(attention, rows: int, start: int, part: int, size: float):
    step, q_THX = step_of((rows, start)), queries(rows, size)
    whole = attend(attention, step, q_THX)
    found = attend(attention, step._replace(max_positions=part), q_THX)
    torch.testing.assert_close(found, whole, rtol=1e-3, atol=1e-4)


def test_chunks_that_begin_their_texts_attend_to_their_own_rows(attention):
    step, q_THX = step_of((40, 0), (9, 0)), queries(49)
    assert torch.equal(attend(attention, step, q_THX, own=True), attend(attention, step, q_THX))


def test_a_chunk_attends_to_no_other_chunk(attention):
    q_THX = queries(49)
    both = attend(attention, step_of((40, 60), (9, 3)), q_THX)
    alone = attend(attention, step_of((9, 3)), q_THX[40:])
    torch.testing.assert_close(both[40:], alone, rtol=1e-5, atol=1e-6)
