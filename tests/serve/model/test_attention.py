"""Attention of decode rows: with few launches as with many, of rows that fill a step, in batch-invariant mode."""

from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.models.config import ModelConfig
from octile.serve.model.attention import Attention
from octile.serve.model.forward import Forward
from octile.serve.runner.batch import Chunk
from octile.serve.runner.kv_cache import IndexCache, KVCache
from octile.serve.runner.step import Layout, Step, mixed_step
from octile.serve.weights.weights import ServedWeights
from tests.serve.model.read_rows import read
from tests.serve.models import CONFIG, new_model

DIRECT = replace(CONFIG, q_lora_rank=None)
CONFIGS = pytest.mark.parametrize("config", [CONFIG, DIRECT], ids=["compressed", "direct"])
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
LAYER, N_PAGES = 1, 10
STARTS = 100, 63, 0, 17, 64


def forward_of(config: ModelConfig, fp8: bool, batch_invariant: bool = False) -> Forward:
    """A pass over pages of random latents, the same in each call."""
    weights = ServedWeights.of_model(new_model(fp8, config=config))
    cache = KVCache(3, N_PAGES, config.kv_lora_rank, config.qk_rope_head_dim, "float32", weights.device)
    cache.layers[LAYER].normal_(generator=torch.Generator().manual_seed(0))
    return Forward.make(weights, cache, config.max_position_embeddings, batch_invariant)


def step_of(starts: tuple[int, ...] = STARTS, fill: int = 1) -> Step:
    """A step of rows that decode, each after so many positions in two pages."""
    chunks = [Chunk([i], start, array("i", [i, 5 + i]), 1) for i, start in enumerate(starts)]
    return mixed_step(Layout.of(chunks, absorbed_only=False), 1, torch.device("cpu"), fill=fill)


def rows(n: int) -> Tensor:
    return torch.randn(n, CONFIG.hidden_size, generator=torch.Generator().manual_seed(n))


def attend(forward: Forward, x_TD: Tensor, step: Step) -> Tensor:
    cos_sin = forward.cos[step.positions], forward.sin[step.positions]
    return read(forward.attention.write_and_attend(x_TD, LAYER, forward.weights.blocks[LAYER], step, cos_sin))


def assert_near(found: Tensor, expected: Tensor, fp8: bool) -> None:
    """Compare rows whose sums have other orders: in FP8 some are a step of E4M3 apart, and few are."""
    torch.testing.assert_close(found, expected, rtol=2**-3 if fp8 else 1e-4, atol=1e-5)
    assert (found - expected).abs().mean() < 1e-3 * expected.abs().mean()


@CONFIGS
@FP8
def test_rows_that_decode_alone_attend_as_those_of_any_step(config: ModelConfig, fp8: bool):
    """Their norm, rotations and writes are one operator."""
    step, x_TD = step_of(), rows(len(STARTS))
    alone, other = forward_of(config, fp8), forward_of(config, fp8)
    found = attend(alone, x_TD, step)
    cos_sin, w = (other.cos[step.positions], other.sin[step.positions]), other.weights.blocks[LAYER]
    queries = other.attention.queries(x_TD, LAYER, w, step.slots, cos_sin)
    expected = read(other.gemms.rows_for(other.attention.attend(queries, LAYER, w.attention, step), w.attention.o))
    assert_near(found, expected, fp8)
    cached, expected = (forward.attention.cache.layers[LAYER] for forward in (alone, other))
    torch.testing.assert_close(cached, expected, rtol=1e-5, atol=1e-6)


@CONFIGS
@FP8
def test_rows_that_fill_a_step_change_no_other_row_and_are_written_nowhere(config: ModelConfig, fp8: bool):
    filled, n = step_of(fill=16), len(STARTS)
    assert len(filled.tokens) == 8
    expected, found = forward_of(config, fp8), forward_of(config, fp8)
    o_TV = attend(expected, rows(8)[:n], step_of())
    assert_near(attend(found, rows(8), filled)[:n], o_TV, fp8)
    cached, of_rows = (forward.attention.cache.layers[LAYER] for forward in (found, expected))
    torch.testing.assert_close(cached, of_rows, rtol=1e-5, atol=1e-6)


@pytest.mark.one_case
@CONFIGS
@FP8
def test_the_bits_of_a_row_do_not_depend_on_others_in_batch_invariant_mode(config: ModelConfig, fp8: bool):
    x_TD, step = rows(len(STARTS)), step_of()
    together = attend(forward_of(config, fp8, batch_invariant=True), x_TD, step)
    for row in range(len(STARTS)):
        numbers = (t[row : row + 1] for t in step[:5])
        alone = attend(forward_of(config, fp8, batch_invariant=True), x_TD[row : row + 1], Step(*numbers, None, ()))
        assert torch.equal(alone, together[row : row + 1])


@CONFIGS
@FP8
def test_queries_are_written_to_given_memory(config: ModelConfig, fp8: bool):
    forward, step = forward_of(config, fp8), step_of()
    x_TD, w = rows(len(STARTS)), forward.weights.blocks[LAYER]
    out_TW = torch.full((len(STARTS), forward.attention.query_width(w.attention)), torch.nan)
    of = x_TD, LAYER, w, step.slots, (forward.cos[step.positions], forward.sin[step.positions])
    found, expected = forward.attention.queries(*of, out_TW), forward.attention.queries(*of)
    assert found.q.data_ptr() == out_TW.data_ptr()
    assert not out_TW.isnan().any()
    assert torch.equal(found.q, expected.q)


@pytest.mark.parametrize(
    ("has_index", "batch_invariant", "expected"),
    [(False, False, []), (False, True, []), (True, False, [65, 500]), (True, True, [1, 64, 65, 500])],
)
def test_rows_attend_to_top_k_positions_if_one_has_more_or_always_in_batch_invariant_mode(
    has_index: bool, batch_invariant: bool, expected: list[int]
):
    forward = forward_of(CONFIG, False, batch_invariant)
    index = IndexCache(range(3), N_PAGES, 128, torch.device("cpu")) if has_index else None
    config = replace(CONFIG, index_n_heads=32, index_head_dim=128, index_topk=64)
    attention: Attention = replace(forward.attention, index=index, config=config)
    assert [longest for longest in (1, 64, 65, 500) if attention.is_sparse(longest)] == expected
