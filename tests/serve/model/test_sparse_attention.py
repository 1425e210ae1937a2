"""Tests of serving models with indexers: logits are those of the model's forward pass, whatever is in a batch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV32ForCausalLM, PreTrainedModel

from octile.checkpoint import load, save
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.engine.config import EngineConfig, IndexFormat
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.model import attention
from octile.serve.runner.graphs import PrefillGraphs
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import Tokenizer
from tests.serve.models import CONFIG, Texts, new_model, text
from tests.train.conftest import MICRO

TOPK = 24
SPARSE = replace(CONFIG, index_n_heads=4, index_head_dim=32, index_topk=TOPK)
N_PAGES = 40
LENGTHS = [150, 64, 66, 9]
# prompts that are longer than TOPK or not, in one chunk and in several, single tokens and a few at once
SIZES = [(100, 50, 0, 1), (0, 10, 24, 0), (1, 1, 2, 1), (0, 1, 40, 7), (20, 2, 0, 0), (29, 0, 0, 0)]
N_PROMPT, GREEDY_TOKENS = [40, 30, 10, 3], 40
# with few heads many logits are 0, and transformers chooses among equal ones in no fixed order
OF_V32 = {"index_n_heads": 16, "num_nextn_predict_layers": 0, "eos_token_id": None}
FP32_ERROR = 1e-5  # of logits, relative to their RMS


def whole(model: DeepseekV3, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]))[0].float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def read_all(runner: ModelRunner, order: list[tuple[int, ...]] = SIZES) -> list[Tensor]:
    texts = Texts(runner, [text(n, seed) for seed, n in enumerate(LENGTHS)])
    for sizes in order:
        texts.run(*sizes)
    assert [len(logits) for logits in texts.logits] == LENGTHS
    return texts.logits


@pytest.fixture(scope="module")
def model() -> DeepseekV3:
    return new_model(fp8=False, config=SPARSE)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_texts_read_in_chunks_and_token_by_token_have_the_models_logits(model, batch_invariant):
    for i, logits in enumerate(read_all(ModelRunner(model, N_PAGES, batch_invariant=batch_invariant))):
        assert error(logits, whole(model, text(LENGTHS[i], i))) < FP32_ERROR


def test_texts_have_the_logits_of_a_glm_5(model):
    of_glm = new_model(fp8=False, config=replace(SPARSE, indexer_rope_interleave=True))
    of_glm.load_state_dict(model.state_dict())
    found = read_all(ModelRunner(of_glm, N_PAGES))
    for i, logits in enumerate(found):
        assert error(logits, whole(of_glm, text(LENGTHS[i], i))) < FP32_ERROR
    assert error(found[0], whole(model, text(LENGTHS[0], 0))) > 1e-3


def test_the_models_logits_are_not_those_of_dense_attention(model):
    dense = new_model(fp8=False)
    dense.load_state_dict({n: t for n, t in model.state_dict().items() if ".indexer." not in n})
    assert error(whole(model, text(150)), whole(dense, text(150))) > 0.1


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decode_rows_find_top_k_positions_where_one_attends_to_more(model, monkeypatch, batch_invariant):
    found_for, find = [], attention.top_k_of_pages

    def counted(index, cache, pages, lengths, *rest):
        found_for.append(lengths.tolist())
        return find(index, cache, pages, lengths, *rest)

    monkeypatch.setattr(attention, "top_k_of_pages", counted)
    runner = ModelRunner(model, N_PAGES, batch_invariant=batch_invariant)
    texts = Texts(runner, [text(40, 0), text(40, 1)]).run(8, 7)
    assert (len(found_for) > 0) == batch_invariant
    texts.run(8, 0).run(8, 0)  # to exactly K
    assert (len(found_for) > 0) == batch_invariant
    found_for.clear()
    texts.run(1, 1)
    assert [sorted(lengths)[-2:] for lengths in found_for] == SPARSE.num_hidden_layers * [[8, TOPK + 1]]
    for i, logits in enumerate(texts.logits):
        assert error(logits, whole(model, text(40, i))[: len(logits)]) < FP32_ERROR


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory) -> tuple[DeepseekV3, PreTrainedModel]:
    """A model, and the same in transformers, whose indexer has neither Hadamard rotation nor E4M3."""
    own = new_model(fp8=False, config=replace(SPARSE, **OF_V32))
    folder = tmp_path_factory.mktemp("v32")
    save(own, folder, "float32")
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(other, DeepseekV32ForCausalLM)
    return own, other


def greedy_texts(model: DeepseekV3, tokenizer: Tokenizer, index_format: IndexFormat) -> list[list[int]]:
    """The new tokens of 4 prompts, of which two have more than K positions, in one batch."""
    engine = Engine(ModelRunner(model, N_PAGES, index_format=index_format), tokenizer)
    requests = [engine.add(text(n, seed), Sampling(GREEDY_TOKENS, ignore_eos=True)) for seed, n in enumerate(N_PROMPT)]
    while engine.has_work:
        engine.step()
    return [request.tokens.tolist() for request in requests]


@pytest.mark.slow
def test_an_indexer_in_fp32_writes_the_texts_of_transformers(theirs, tokenizer):
    model, other = theirs
    settings = {"max_new_tokens": GREEDY_TOKENS, "do_sample": False, "eos_token_id": None}
    expected = [
        other.generate(torch.tensor([text(n, seed)]), **settings)[0].tolist() for seed, n in enumerate(N_PROMPT)
    ]
    assert greedy_texts(model, tokenizer, "float32") == expected
    assert greedy_texts(model, tokenizer, "e4m3") != expected


@pytest.mark.slow
def test_the_default_rounds_the_indexer_as_published(theirs):
    model, _ = theirs
    for i, logits in enumerate(read_all(ModelRunner(model, N_PAGES))):
        assert error(logits, whole(model, text(LENGTHS[i], i))) < FP32_ERROR
    in_fp32 = read_all(ModelRunner(model, N_PAGES, index_format="float32"))
    assert error(in_fp32[0], whole(model, text(LENGTHS[0], 0))) > 1e-3
    assert EngineConfig().index_format == "e4m3"


def test_an_indexer_in_fp32_of_a_model_without_one_is_refused():
    with pytest.raises(ValueError, match="index_format must be e4m3, not float32: the model has no indexer"):
        ModelRunner(new_model(fp8=False), N_PAGES, index_format="float32")


def test_an_indexer_in_fp32_in_batch_invariant_mode_is_refused(model):
    with pytest.raises(ValueError, match="index_format must be e4m3, not float32, with batch_invariant"):
        ModelRunner(model, N_PAGES, batch_invariant=True, index_format="float32")
    with pytest.raises(ValueError, match=r"engine.index_format must be e4m3, not float32, with engine.batch_invariant"):
        EngineConfig(batch_invariant=True, index_format="float32")


def test_a_page_of_keys_in_fp32_has_the_bytes_that_an_engine_counts(model):
    runner = ModelRunner(model, N_PAGES, index_format="float32")
    counted = ModelRunner.bytes_per_page(model, "float32", runner.max_position, "float32")
    assert counted == runner.pages.bytes_per_page
    assert counted > ModelRunner.bytes_per_page(model, "float32", runner.max_position)


def test_top_k_positions_are_found_in_parts(model, monkeypatch):
    monkeypatch.setattr(attention, "MAX_LOGITS", 700)
    for i, logits in enumerate(read_all(ModelRunner(model, N_PAGES))):
        assert error(logits, whole(model, text(LENGTHS[i], i))) < FP32_ERROR


def test_a_cache_in_fp8_changes_the_latents_that_are_read_and_not_the_choice():
    """Of one layer, whose keys of the indexer do not depend on the cache."""
    model = new_model(False, config=replace(SPARSE, num_hidden_layers=1, num_nextn_predict_layers=0))
    for i, logits in enumerate(read_all(ModelRunner(model, N_PAGES, "fp8"))):
        assert 1e-4 < error(logits, whole(model, text(LENGTHS[i], i))) < 2**-4


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize("cache_format", ["float32", "fp8"])
def test_a_batch_invariant_runner_has_the_same_bits_however_texts_are_read(fp8, cache_format):
    runner = ModelRunner(new_model(fp8, config=SPARSE), N_PAGES, cache_format, batch_invariant=True)
    together = read_all(runner)
    alone = Texts(runner, [text(n, seed) for seed, n in enumerate(LENGTHS)])
    for i, n in enumerate(LENGTHS):
        alone.run(*(n if i == j else 0 for j in range(len(LENGTHS))))
    assert all(torch.equal(logits, alone.logits[i]) for i, logits in enumerate(together))


def test_logits_of_the_graphs_of_prompts_are_those_of_the_model(model):
    runner = ModelRunner(model, N_PAGES)
    runner.prefill_graphs = PrefillGraphs(runner.forward, None, 2048)
    for i, logits in enumerate(read_all(runner)):
        assert error(logits, whole(model, text(LENGTHS[i], i))) < FP32_ERROR


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_are_the_models(model, batch_invariant):
    tokens = text(100)
    with torch.no_grad():
        _, expected = model.with_drafts(torch.tensor([tokens]))
    runner = ModelRunner(model, N_PAGES, batch_invariant=batch_invariant)
    texts = Texts(runner, [tokens])
    drafts = torch.cat([texts.draft(size) for size in (63, 1, 2, 33)])
    assert error(drafts, expected[0]) < FP32_ERROR


def test_texts_that_cannot_be_longer_than_the_top_k_keys_have_no_pages_of_the_indexer(model):
    assert ModelRunner(replace_topk(model, 64), 1).index is None
    assert ModelRunner(replace_topk(model, 63), 1).index is not None


def replace_topk(model: DeepseekV3, topk: int) -> ServedWeights:
    return replace(ServedWeights.of_model(model), config=replace(SPARSE, index_topk=topk))


def test_the_bytes_of_a_page_are_those_of_both_caches(model):
    runner = ModelRunner(model, 3, "bf16")
    of_index = sum(layer.nbytes for layer in runner.index.layers.values())
    assert 3 * ModelRunner.bytes_per_page(model, "bf16", runner.max_position) == runner.cache.nbytes + of_index
    short = ModelRunner(replace_topk(model, 3 * 64), 3, "bf16")
    assert 3 * ModelRunner.bytes_per_page(replace_topk(model, 3 * 64), "bf16", 3 * 64) == short.cache.nbytes


@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_a_saved_model_is_served_with_its_indexers(model, tmp_path, weights):
    save(model, tmp_path, weights)
    served = ServedWeights.read(tmp_path, torch.float32), ServedWeights.of_model(load(tmp_path))
    of_tensors, of_model = (Texts(ModelRunner(w, N_PAGES), [text(100)]).run(100).logits[0] for w in served)
    assert torch.equal(of_tensors, of_model)
    if weights == "float32":
        assert error(of_tensors, whole(model, text(100))) < FP32_ERROR


# the engine

MICRO_SPARSE = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=12)
PROMPTS = [text(n, n, MICRO.vocab_size) for n in (50, 66, 9)]
NEW_TOKENS = 20  # so that a text of 50 gets a second page


def micro_model(config: ModelConfig = MICRO_SPARSE) -> DeepseekV3:
    torch.manual_seed(0)
    model = DeepseekV3(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def texts_of(tokenizer, prompts, n_pages=16, n_drafts=0, max_ahead=0, batch_invariant=True, config=MICRO_SPARSE):
    """The greedy texts of requests that run together, and the engine's counts."""
    runner = ModelRunner(micro_model(config), n_pages, batch_invariant=batch_invariant, n_drafts=n_drafts)
    runner.max_ahead = max_ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=24, n_drafts=n_drafts))
    added = [engine.add(prompt, Sampling(NEW_TOKENS, 0.0, ignore_eos=True)) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return [list(request.tokens) for request in added], engine.stats()


@pytest.fixture(scope="module")
def alone(tokenizer) -> Callable[[list[int]], list[int]]:
    """A function that returns the text of a prompt that runs alone, and computes it once."""
    found: dict[tuple[int, ...], list[int]] = {}

    def text_of(prompt: list[int]) -> list[int]:
        if tuple(prompt) not in found:
            found[tuple(prompt)] = texts_of(tokenizer, [prompt])[0][0]
        return found[tuple(prompt)]

    return text_of


@pytest.fixture(scope="module")
def greedy() -> dict[int, list[int]]:
    """The greedy texts of whole forward passes of prompts with more than K tokens, and with fewer."""
    model, found = micro_model(), dict[int, list[int]]()
    for i in (0, 2):
        found[i] = list(PROMPTS[i])
        for _ in range(NEW_TOKENS):
            found[i].append(int(whole(model, found[i])[-1].argmax()))
    return found


@pytest.mark.one_case
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("max_ahead", [0, 4])
def test_a_text_is_the_greedy_one_of_whole_forward_passes(tokenizer, greedy, batch_invariant, max_ahead):
    options = {"n_drafts": 1, "max_ahead": max_ahead, "batch_invariant": batch_invariant}
    assert texts_of(tokenizer, [PROMPTS[i] for i in greedy], **options)[0] == [*greedy.values()]


@pytest.mark.slow
@pytest.mark.parametrize("max_ahead", [0, 4])
@pytest.mark.parametrize("n_drafts", [0, 2])
def test_a_text_is_the_same_in_a_batch_with_drafts_and_launched_ahead(tokenizer, alone, n_drafts, max_ahead):
    assert texts_of(tokenizer, PROMPTS, n_drafts=n_drafts, max_ahead=max_ahead)[0] == [*map(alone, PROMPTS)]


@pytest.mark.slow
def test_a_text_is_the_same_where_it_was_preempted(tokenizer, alone):
    prompts = [text(50, n, MICRO.vocab_size) for n in range(3)]
    texts, stats = texts_of(tokenizer, prompts, n_pages=3)
    assert stats.preemptions > 0
    assert texts == [*map(alone, prompts)]


@pytest.mark.slow
def test_a_text_is_the_same_where_its_beginning_is_shared(tokenizer):
    runner = ModelRunner(micro_model(), 16, batch_invariant=True)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=24))
    found = []
    for _ in range(2):
        request = engine.add(PROMPTS[1], Sampling(NEW_TOKENS, 0.0, ignore_eos=True))
        while engine.has_work:
            engine.step()
        found.append(list(request.tokens))
    assert engine.stats().shared_tokens > 0
    assert found[0] == found[1]
