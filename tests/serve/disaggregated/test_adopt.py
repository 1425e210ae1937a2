"""An engine that continues what another one has read."""

import pickle
from dataclasses import replace

import pytest
import torch

from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.disaggregated.page_pool import FilledPages, PagePool
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine, FirstToken
from octile.serve.engine.request import FinishReason, RequestFactory, Sampling
from octile.serve.runner.model_runner import ModelRunner
from tests.train.conftest import MICRO

N_PAGES = 12


@pytest.fixture(scope="module")
def model() -> DeepseekV3:
    torch.manual_seed(0)
    return DeepseekV3(replace(MICRO, max_position_embeddings=512, num_nextn_predict_layers=1))


def one_engine(model, tokenizer, **config) -> Engine:
    options = EngineConfig(batch_invariant=True, **config)
    return Engine(ModelRunner(model, N_PAGES, "float32", batch_invariant=True), tokenizer, options)


class Apart:
    """Two engines of one model, of which one reads and the other writes."""

    def __init__(self, model, tokenizer, n_pages: int = N_PAGES, **config):
        options = EngineConfig(batch_invariant=True, **config)
        runners = [ModelRunner(model, n, "float32", batch_invariant=True) for n in (N_PAGES, n_pages)]
        self.reader = Engine(runners[0], tokenizer, replace(options, n_drafts=min(options.n_drafts, 1)))
        self.writer = Engine(runners[1], tokenizer, options)
        self.cache, self.pool = runners[1].pages, PagePool(N_PAGES, runners[0].pages)

    def hand_over(self, prompt: list[int], sampling: Sampling) -> FilledPages | None:
        """Read a prompt and have it adopted; None if its first token is the last."""
        request = self.reader.add(prompt, sampling)
        output = None
        while output is None:
            output = next((o for o in self.reader.step() if o.request_id == request.id), None)
        if output.finish_reason is not None:
            return None
        latents = FilledPages(self.pool.bytes_SQ, self.pool.fill(request.pages[: -(-len(prompt) // 64)]), self.cache)
        logprobs = output.logprobs[0] if output.logprobs else None
        first = FirstToken(output.tokens[0], logprobs, cached_tokens=output.cached_tokens)
        self.reader.cancel(request.id)
        self.writer.adopt(pickle.loads(pickle.dumps(request)), first, latents)  # as of another process
        return latents


def finish(engine: Engine) -> dict[int, tuple[list[int], str, list]]:
    found: dict[int, tuple[list[int], str, list]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens, text, logprobs = found.get(output.request_id, ([], "", []))
            found[output.request_id] = (
                [*tokens, *output.tokens], text + output.text, [*logprobs, *output.logprobs]
            )  # fmt: skip
    return found


def prompt_of(tokenizer, seed: int, length: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [tokenizer.begin, *torch.randint(3, MICRO.vocab_size, (length - 1,), generator=draw).tolist()]


@pytest.fixture(scope="module")
def sparse_model() -> DeepseekV3:
    torch.manual_seed(0)
    sparse = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=12, indexer_rope_interleave=True)
    sparse = replace(sparse, indexer_types=("full", "shared"))
    return DeepseekV3(replace(sparse, max_position_embeddings=512, num_nextn_predict_layers=1))


@pytest.mark.one_case
@pytest.mark.parametrize(("of", "n_drafts"), [("model", 0), ("model", 2), ("sparse_model", 1)])
def test_the_text_is_that_of_one_engine(request, tokenizer, of, n_drafts):
    model = request.getfixturevalue(of)
    asked = [
        (prompt_of(tokenizer, length, length), Sampling(20, temperature=t, seed=3, logprobs=n, ignore_eos=True))
        for length, t, n in ((1, 0.0, None), (63, 1.0, 2), (64, 0.0, None), (65, 0.7, 0), (130, 0.0, None))
    ]
    single = one_engine(model, tokenizer, n_drafts=n_drafts)
    for prompt, sampling in asked:
        single.add(prompt, sampling)
    apart = Apart(model, tokenizer, n_drafts=n_drafts)
    for prompt, sampling in asked:
        assert apart.hand_over(prompt, sampling) is not None
    assert finish(apart.writer) == finish(single)
    assert apart.writer.stats().used_pages == apart.reader.stats().used_pages == 0


@pytest.mark.slow
def test_a_request_that_is_put_back_is_read_anew(model, tokenizer):
    asked = [(prompt_of(tokenizer, i, 60), Sampling(80, seed=i, ignore_eos=True)) for i in range(2)]
    single = one_engine(model, tokenizer)
    apart = Apart(model, tokenizer, n_pages=4)
    for prompt, sampling in asked:
        single.add(prompt, sampling)
        apart.hand_over(prompt, sampling)
    assert finish(apart.writer) == finish(single)
    assert apart.writer.stats().preemptions > 0


def test_a_prefix_that_the_engine_has_is_shared(model, tokenizer):
    apart = Apart(model, tokenizer)
    prompt = prompt_of(tokenizer, 0, 130)
    first, second = (apart.hand_over(prompt, Sampling(5, seed=0, ignore_eos=True)) for _ in range(2))
    texts = finish(apart.writer)
    assert texts[0] == texts[1]
    assert first.is_free
    assert second.is_free
    assert apart.writer.stats().shared_tokens == 128


def test_cached_tokens_are_those_of_the_engine_that_prefills(model, tokenizer):
    apart, prompt = Apart(model, tokenizer), prompt_of(tokenizer, 0, 130)
    for _ in range(2):
        apart.hand_over(prompt, Sampling(2, seed=0, ignore_eos=True))
        first, *_ = apart.writer.step()
        finish(apart.writer)
    assert first.cached_tokens == 128
    other = Apart(model, tokenizer)
    other.writer, other.cache = apart.writer, apart.cache  # which have the prefix
    other.hand_over(prompt, Sampling(2, seed=0, ignore_eos=True))
    first, *_ = other.writer.step()
    assert first.cached_tokens == 0


def test_a_request_that_is_canceled_before_it_runs_releases_its_pages(model, tokenizer):
    apart = Apart(model, tokenizer)
    latents = apart.hand_over(prompt_of(tokenizer, 0, 70), Sampling(5, seed=0, ignore_eos=True))
    assert apart.writer.cancel(0)
    assert latents.is_free
    assert not apart.writer.step()
    assert apart.writer.stats().used_pages == 0


def test_a_request_that_is_canceled_while_it_runs_frees_its_pages(model, tokenizer):
    apart = Apart(model, tokenizer)
    latents = apart.hand_over(prompt_of(tokenizer, 0, 70), Sampling(50, seed=0, ignore_eos=True))
    outputs = apart.writer.step()
    assert len(outputs) == 2  # the first token, and the next one
    assert latents.is_free
    assert apart.writer.stats().used_pages == 2
    assert apart.writer.cancel(0)
    assert apart.writer.stats().used_pages == 0


def test_a_stop_string_in_the_first_token_ends_the_text(model, tokenizer):
    apart = Apart(model, tokenizer)
    prompt = prompt_of(tokenizer, 5, 10)
    apart.hand_over(prompt, Sampling(5, seed=0, ignore_eos=True))
    token = finish(apart.writer)[0][0][0]
    text = tokenizer.decode([token])
    assert text
    latents = FilledPages(apart.pool.bytes_SQ, [0], apart.cache)
    (request,) = RequestFactory(MICRO.vocab_size, 512).make(prompt, Sampling(5, seed=0, stop=(text,)))
    apart.writer.adopt(request, FirstToken(token, None), latents)
    (output,) = apart.writer.step()
    assert (output.finish_reason, output.text) == (FinishReason.STOP, "")
    assert latents.is_free
