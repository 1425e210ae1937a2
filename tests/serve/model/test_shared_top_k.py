"""Tests of serving models in which layers share the top-k positions of an earlier layer's indexer, as in GLM-5.2."""

from dataclasses import replace

import pytest
import torch

from octile.checkpoint import load, save
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.model import attention
from octile.serve.runner.graphs import PrefillGraphs
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from tests.serve.model.test_sparse_attention import (
    FP32_ERROR,
    LENGTHS,
    MICRO_SPARSE,
    N_PAGES,
    NEW_TOKENS,
    PROMPTS,
    SPARSE,
    error,
    micro_model,
    read_all,
    texts_of,
    whole,
)
from tests.serve.models import Texts, new_model, text

SHARED = replace(
    SPARSE,
    num_hidden_layers=4,
    indexer_rope_interleave=True,
    indexer_types=("full", "shared", "full", "shared"),
)
OWN = [0, 2, 4]  # the layers that have an indexer, with that of multi-token prediction


@pytest.fixture(scope="module")
def model() -> DeepseekV3:
    return new_model(fp8=False, config=SHARED)


@pytest.mark.one_case
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("max_queries", [attention.MAX_QUERIES, 2**12], ids=["whole chunks", "in parts"])
def test_texts_read_in_chunks_and_token_by_token_have_the_models_logits(
    model, monkeypatch, batch_invariant, max_queries
):
    """Chunks in parts, too, which differ between layers that choose and layers that do not."""
    monkeypatch.setattr(attention, "MAX_QUERIES", max_queries)
    monkeypatch.setattr(attention, "MAX_LOGITS", 700)
    for i, logits in enumerate(read_all(ModelRunner(model, N_PAGES, batch_invariant=batch_invariant))):
        assert error(logits, whole(model, text(LENGTHS[i], i))) < FP32_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_a_batch_invariant_runner_has_the_same_bits_however_texts_are_read(fp8):
    runner = ModelRunner(new_model(fp8, config=SHARED), N_PAGES, batch_invariant=True)
    together = read_all(runner)
    alone = Texts(runner, [text(n, seed) for seed, n in enumerate(LENGTHS)])
    for i, n in enumerate(LENGTHS):
        alone.run(*(n if i == j else 0 for j in range(len(LENGTHS))))
    assert all(torch.equal(logits, alone.logits[i]) for i, logits in enumerate(together))


@pytest.mark.slow
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_of_the_graphs_of_prompts_are_those_of_the_model(model, batch_invariant):
    runner = ModelRunner(model, N_PAGES, batch_invariant=batch_invariant)
    runner.prefill_graphs = PrefillGraphs(runner.forward, None, 2048)
    for i, logits in enumerate(read_all(runner)):
        assert error(logits, whole(model, text(LENGTHS[i], i))) < FP32_ERROR


def test_drafts_are_the_models(model):
    with torch.no_grad():
        _, expected = model.with_drafts(torch.tensor([text(100)]))
    texts = Texts(ModelRunner(model, N_PAGES), [text(100)])
    assert error(torch.cat([texts.draft(size) for size in (63, 1, 2, 33)]), expected[0]) < FP32_ERROR


def test_the_layers_that_share_positions_choose_none(model, monkeypatch):
    n_found, find = 0, attention.top_k_of_pages

    def counted(*args):
        nonlocal n_found
        n_found += 1
        return find(*args)

    monkeypatch.setattr(attention, "top_k_of_pages", counted)
    Texts(ModelRunner(model, N_PAGES), [text(40)]).run(39).run(1)
    assert n_found == 2


@pytest.mark.parametrize("index_format", ["e4m3", "float32"])
def test_the_cache_has_keys_of_the_layers_with_an_indexer_alone(model, index_format):
    runner = ModelRunner(model, N_PAGES, "bf16", index_format=index_format)
    assert [*runner.index.layers] == OWN
    counted = ModelRunner.bytes_per_page(model, "bf16", runner.max_position, index_format)
    assert counted == runner.pages.bytes_per_page
    of_all = ModelRunner.bytes_per_page(new_model(False, config=SPARSE), "bf16", runner.max_position, index_format)
    assert counted - of_all == 2 * 64 * 2 * SHARED.latent_dim  # two layers more, and as many indexers


@pytest.mark.one_case
@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_a_saved_model_is_served(model, tmp_path, weights):
    save(model, tmp_path, weights)
    served = ServedWeights.read(tmp_path, torch.float32), ServedWeights.of_model(load(tmp_path))
    of_tensors, of_model = (Texts(ModelRunner(w, N_PAGES), [text(100)]).run(100).logits[0] for w in served)
    assert torch.equal(of_tensors, of_model)
    assert [layer for layer, block in enumerate(served[0].blocks) if block.attention.indexer is not None] == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("max_ahead", [4, 0])
def test_texts_with_drafts_are_the_greedy_ones_of_whole_forward_passes(tokenizer, max_ahead):
    config = replace(MICRO_SPARSE, indexer_rope_interleave=True, indexer_types=("full", "shared"))
    expected = [*PROMPTS[0]]
    for _ in range(NEW_TOKENS):
        expected.append(int(whole(micro_model(config), expected)[-1].argmax()))
    found, _ = texts_of(tokenizer, PROMPTS, n_drafts=2, max_ahead=max_ahead, config=config)
    assert found[0] == expected
