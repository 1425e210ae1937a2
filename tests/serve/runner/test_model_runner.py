"""Tests of the model runner: its logits are those of the model's forward pass over whole texts."""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.weight_cache import frozen_weights
from octile.recipe import Recipe
from octile.serve.engine.config import MAX_DRAFTS
from octile.serve.runner import model_runner, step
from octile.serve.runner.batch import Batch, Chunk, Results
from octile.serve.runner.kv_cache import KVCache
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step import CONTEXT_POSITIONS, Layout, mixed_step
from tests.serve.models import CONFIG, Texts, new_model, text

N_PAGES = 40
LENGTHS = [150, 64, 66, 9]  # several pages, exactly one, a little more, and less
# How four texts are read: whole prompts, a prompt in chunks, single tokens and a few at once, about page boundaries.
SIZES = [(100, 50, 0, 1), (0, 10, 63, 0), (1, 1, 1, 1), (0, 1, 2, 7), (20, 0, 0, 0), (29, 2, 0, 0)]
FP32_ERROR, BF16_ERROR = 1e-5, 0.02  # of logits, relative to their RMS: sums of some hundred terms in two layers


def forward(model: DeepseekV3, tokens: list[int]) -> Tensor:
    with torch.no_grad(), frozen_weights(model):
        return model(torch.tensor([tokens]))[0].float()


def error(found: Tensor, expected: Tensor) -> float:
    """The RMS of the difference, relative to that of the expected values."""
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def texts_of(runner: ModelRunner) -> Texts:
    return Texts(runner, [text(n, seed) for seed, n in enumerate(LENGTHS)])


def read_all(texts: Texts, order: list[tuple[int, ...]] = SIZES) -> list[Tensor]:
    for sizes in order:
        texts.run(*sizes)
    assert [len(logits) for logits in texts.logits] == LENGTHS
    return texts.logits


def test_another_number_of_micro_batches_is_refused():
    with pytest.raises(ValueError, match="micro_batches must be 1 or 2, not 3"):
        ModelRunner(new_model(False), 4, micro_batches=3)


def test_a_prompt_in_fp8_has_the_bits_of_the_models_forward_pass():
    """Both multiply the same FP8 values, and the cache holds FP32, as the model computes it."""
    model = new_model(fp8=True, config=replace(CONFIG, intermediate_size=256, moe_intermediate_size=128))
    texts = Texts(ModelRunner(model, N_PAGES), [text(150)]).run(150)
    assert torch.equal(texts.logits[0], forward(model, text(150)))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_texts_read_in_chunks_and_token_by_token_have_the_models_logits(batch_invariant: bool):
    model = new_model(fp8=False)
    for i, logits in enumerate(read_all(texts_of(ModelRunner(model, N_PAGES, batch_invariant=batch_invariant)))):
        assert error(logits, forward(model, text(LENGTHS[i], i))) < FP32_ERROR


@pytest.mark.one_case
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_in_fp8_are_as_near_to_those_of_fp32_as_the_models_own(batch_invariant: bool):
    """Decoding rounds other numbers to E4M3 than the model's forward pass, and no more of them."""
    model, exact = new_model(fp8=True), new_model(fp8=False)
    logits = torch.cat(read_all(texts_of(ModelRunner(model, N_PAGES, batch_invariant=batch_invariant))))
    own, expected = (torch.cat([forward(m, text(n, i)) for i, n in enumerate(LENGTHS)]) for m in (model, exact))
    assert error(logits, expected) < 1.1 * error(own, expected)


@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
def test_a_cache_of_fewer_bits_changes_logits_by_its_rounding(cache_format: str):
    """Each of two layers rounds latents by 2⁻⁹ of themselves at most in BF16, by 2⁻⁴ in E4M3. Without experts, which a
    gate may choose otherwise then."""
    model = new_model(fp8=False, config=replace(CONFIG, first_k_dense_replace=2))
    bound = 2 * {"bf16": 2**-9, "fp8": 2**-4}[cache_format]
    for i, logits in enumerate(read_all(texts_of(ModelRunner(model, N_PAGES, cache_format)))):
        found = error(logits, forward(model, text(LENGTHS[i], i)))
        assert bound / 100 < found < bound


def test_a_model_in_bf16_has_the_models_logits():
    model = new_model(fp8=False, dtype=torch.bfloat16)
    for i, logits in enumerate(read_all(texts_of(ModelRunner(model, N_PAGES)))):
        assert error(logits, forward(model, text(LENGTHS[i], i))) < BF16_ERROR


@pytest.mark.parametrize(
    "changes",
    [
        {"q_lora_rank": None, "num_nextn_predict_layers": 0},
        {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1},
        {"first_k_dense_replace": 2},
    ],
    ids=["direct queries", "gate of V2", "no experts"],
)
def test_every_kind_of_model_has_the_models_logits(changes: dict):
    model = new_model(fp8=False, config=replace(CONFIG, **changes))
    for i, logits in enumerate(read_all(texts_of(ModelRunner(model, N_PAGES)))):
        assert error(logits, forward(model, text(LENGTHS[i], i))) < FP32_ERROR


@pytest.mark.one_case
@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
@pytest.mark.parametrize("cache_format", ["float32", "fp8"])
def test_a_batch_invariant_runner_has_the_same_bits_however_texts_are_read(fp8: bool, cache_format: str):
    runner = ModelRunner(new_model(fp8), N_PAGES, cache_format, batch_invariant=True)
    together = read_all(texts_of(runner))
    alone = texts_of(runner)
    for i, n in enumerate(LENGTHS):
        alone.run(*(n if i == j else 0 for j in range(len(LENGTHS))))
    for i in range(len(LENGTHS)):
        assert torch.equal(together[i], alone.logits[i])


def test_only_the_logits_that_are_asked_for_are_returned_in_the_order_of_chunks():
    runner = ModelRunner(new_model(fp8=False), N_PAGES)
    expected = read_all(texts_of(runner))
    first, second = text(LENGTHS[0], 0), text(LENGTHS[3], 3)
    chunks = [Chunk(first[:100], 0, array("i", [1, 2]), 2), Chunk(second[:3], 0, array("i", [3]), 1)]
    chunks.append(Chunk(text(40), 0, array("i", [4]), 0))
    results = runner.run(Batch(chunks))
    torch.testing.assert_close(results.logits, torch.cat((expected[0][98:100], expected[3][2:3])), rtol=0, atol=1e-4)
    assert len(results.hidden) == 143


def test_chunks_of_one_size_attend_together_and_each_to_its_own_text():
    model = new_model(fp8=False)
    prompts = [text(n, seed) for seed, n in enumerate((60, 40, 60, 60, 40, 5))]
    texts = Texts(ModelRunner(model, N_PAGES), prompts).run(30, 20, 30, 20, 20, 2).run(30, 20, 30, 40, 20, 3)
    for tokens, logits in zip(prompts, texts.logits, strict=True):
        assert error(logits, forward(model, tokens)) < FP32_ERROR


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions the keys and values of each GEMM have."""
    read, sizes = KVCache.read, list[int]()

    def count(self: KVCache, layer: int, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        sizes.append(len(slots))
        return read(self, layer, slots, dtype)

    monkeypatch.setattr(KVCache, "read", count)
    return sizes


def test_chunks_that_share_a_long_beginning_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch, reads: list[int]):
    """A step has few new tokens then, and many positions that they attend to."""
    model, beginning = new_model(fp8=False), text(128)
    runner = ModelRunner(model, N_PAGES)
    first = Texts(runner, [beginning + text(70, 1)]).run(128)
    free = sorted(set(range(N_PAGES)) - set(first.pages[0]))
    rest = [text(n, seed) for seed, n in enumerate((9, 9, 9, 9, 9, 20, 20, 70))]
    chunks = [
        Chunk(tokens, 128, first.pages[0][:2] + array("i", free[2 * i : 2 * i + 2]), len(tokens))
        for i, tokens in enumerate(rest)
    ]
    expected = [forward(model, beginning + tokens)[128:] for tokens in rest]
    del reads[:]
    whole = runner.run(Batch(chunks)).logits
    assert reads == [5 * 137 + 2 * 148 + 198] * CONFIG.num_hidden_layers
    del reads[:]
    monkeypatch.setattr(step, "CONTEXT_POSITIONS", 300)
    in_pieces = runner.run(Batch(chunks)).logits
    assert reads == [2 * 137, 2 * 137, 137 + 148, 148, 198] * CONFIG.num_hidden_layers
    assert error(in_pieces, torch.cat(expected)) < FP32_ERROR
    assert error(in_pieces, whole) < FP32_ERROR
    del reads[:]
    monkeypatch.setattr(step, "CONTEXT_POSITIONS", 100)  # less than the 155 rows, and than a chunk
    runner.run(Batch(chunks))
    assert reads == [137, 137, 137, 137, 137, 148, 148, 70, 128] * CONFIG.num_hidden_layers


@pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
def test_one_chunk_of_a_long_text_attends_in_parts(monkeypatch: pytest.MonkeyPatch, reads: list[int], fp8: bool):
    model, tokens = new_model(fp8), text(300)
    whole = Texts(ModelRunner(model, N_PAGES), [tokens]).run(250).run(50).logits[0]
    monkeypatch.setattr(step, "CONTEXT_POSITIONS", 100)
    texts = Texts(ModelRunner(model, N_PAGES), [tokens]).run(250)
    del reads[:]
    logits = texts.run(50).logits[0]
    assert reads == [50, 100, 100, 50] * CONFIG.num_hidden_layers
    assert error(logits, whole) < (0.05 if fp8 else FP32_ERROR)  # rounded to E4M3 otherwise where a sum differs


def test_a_batch_invariant_runner_has_the_same_bits_whatever_fits_into_memory_at_once(monkeypatch: pytest.MonkeyPatch):
    model, logits = new_model(fp8=True), []
    for positions in (CONTEXT_POSITIONS, 100):
        monkeypatch.setattr(step, "CONTEXT_POSITIONS", positions)
        logits.append(Texts(ModelRunner(model, N_PAGES, batch_invariant=True), [text(300)]).run(250).run(50).logits[0])
    assert torch.equal(*logits)


def test_the_positions_of_a_piece_are_bounded_by_the_steps_tokens_and_a_constant():
    """64 requests with 20 new tokens each after the same 4096."""
    shared = array("i", range(64))
    chunks = [Chunk(text(20, i), 4096, shared + array("i", [64 + i]), 1) for i in range(64)]
    step = mixed_step(Layout.of(chunks, absorbed_only=False), 1, torch.device("cpu"))
    assert step.context is not None
    assert len(step.context) == 64 * 4116
    sizes = [piece.positions for piece in step.prefills]
    assert sum(sizes) == 64 * 4116
    assert max(sizes) <= CONTEXT_POSITIONS


def test_as_many_drafts_as_an_engine_may_have_are_verified_by_decode_rows():
    chunks = [Chunk(text(1 + MAX_DRAFTS, i), 100, array("i", range(2)), 1 + MAX_DRAFTS) for i in range(3)]
    layout = Layout.of(chunks, absorbed_only=False)
    assert not layout.prefill
    assert layout.n_decode == 3 * (1 + MAX_DRAFTS)


@pytest.mark.parametrize("fill", [16, 256])
def test_rows_that_only_fill_gemms_change_nothing(monkeypatch: pytest.MonkeyPatch, fill: int):
    found = []
    for filled in (False, True):
        if filled:
            monkeypatch.setattr(model_runner, "FILL_ROWS", fill)
            monkeypatch.setattr(ModelRunner, "_fills", True)  # as on a GPU
        runner = ModelRunner(new_model(fp8=False), N_PAGES)
        texts = Texts(runner, [text(200, seed=i) for i in range(3)])
        drafts = [texts.draft(*sizes) for sizes in ((90, 30, 0), (1, 100, 90), (40, 1, 40), (1, 1, 1))]
        found.append((torch.cat(texts.logits), torch.cat(drafts)))
    for ours, expected in zip(*found, strict=True):
        assert ours.shape == expected.shape
        assert error(ours, expected) < FP32_ERROR


@pytest.mark.parametrize(
    ("decoding", "prompt", "attending"), [(5, 13, 8), (5, 109, 8), (8, 39, 8), (33, 15, 48), (0, 29, 0)]
)
def test_decode_rows_of_a_step_with_prompts_attend_as_a_power_of_two(decoding: int, prompt: int, attending: int):
    """But as no more rows than the step has."""
    chunks = [Chunk([i], 9, array("i", [i]), 1) for i in range(decoding)]
    chunks.append(Chunk(text(prompt), 0, array("i", [decoding, decoding + 1]), 1))
    step = mixed_step(Layout.of(chunks, absorbed_only=False), 1, torch.device("cpu"), fill=16)
    assert step.lengths.tolist() == [10] * decoding + [0] * (attending - decoding)
    assert len(step.pages) == attending
    assert step.tokens[: decoding + prompt].tolist() == [*range(decoding), *chunks[-1].tokens]
    assert len(step.tokens) % 16 == 0
    assert step.prefills[0].first_row == decoding


@pytest.mark.parametrize("prompt", [0, 20])
def test_negative_tokens_are_those_that_the_pass_before_has_chosen(prompt: int):
    chunks = [Chunk([token], 9, array("i", [i]), 1) for i, token in enumerate((-2, 50, -1, -3))]
    chunks += [Chunk(text(prompt), 0, array("i", [4]), 1)] * (prompt > 0)
    layout, chosen = Layout.of(chunks, absorbed_only=False), torch.tensor([7, 8, -1])  # the last one is none
    step = mixed_step(layout, 1, torch.device("cpu"), fill=16, chosen=chosen)
    assert step.tokens[: 4 + prompt].tolist() == [8, 50, 7, 0, *text(prompt)]


@pytest.mark.parametrize(("decoding", "rows"), [(1, 1), (3, 4), (8, 8), (17, 32), (33, 48)])
def test_rows_that_decode_alone_are_padded_to_a_power_of_two(decoding: int, rows: int):
    """Kernels of few rows are compiled for each number of rows."""
    chunks = [Chunk([i], 9, array("i", [i]), 1) for i in range(decoding)]
    step = mixed_step(Layout.of(chunks, absorbed_only=False), 1, torch.device("cpu"), fill=16)
    assert step.only_decodes
    assert step.lengths.tolist() == [10] * decoding + [0] * (rows - decoding)
    assert step.slots.tolist() == [64 * i + 9 for i in range(decoding)] + [-1] * (rows - decoding)


@pytest.mark.parametrize("sizes", [(9,), (1, 9, 2, 13, 1), (12, 5, 8, 1), (1, 2), (16, 9)], ids=str)
@pytest.mark.parametrize("block", [1, 16])
def test_rows_of_a_prompt_have_whole_thread_blocks(sizes: tuple[int, ...], block: int):
    """The four rows of each have the same pages, or no positions; a chunk of up to 8 tokens stands alone."""
    chunks = [Chunk(text(n, i), 60, array("i", [2 * i, 2 * i + 1]), 1) for i, n in enumerate(sizes)]
    layout = Layout.of(chunks, absorbed_only=True, shares_blocks=True)
    step = mixed_step(layout, block, torch.device("cpu"))
    assert [sizes[i] for i in layout.decode] == [n for n in sizes if n <= 8] + [n for n in sizes if n > 8]
    order = layout.rows() or list(range(sum(sizes)))
    assert step.tokens[order].tolist() == [token for chunk in chunks for token in chunk.tokens]
    assert step.lengths[order].tolist() == [61 + i for n in sizes for i in range(n)]
    assert step.positions[order].tolist() == [60 + i for n in sizes for i in range(n)]
    assert step.slots[order].tolist() == [128 * i + 60 + j for i, n in enumerate(sizes) for j in range(n)]
    assert step.pages[order].tolist() == [[2 * i, 2 * i + 1] for i, n in enumerate(sizes) for _ in range(n)]
    padding = sorted(set(range(len(step.tokens))) - set(order))
    assert (step.slots[padding] == -1).all()
    assert not step.lengths[padding].any()
    assert len(step.tokens) == len(step.lengths)
    assert len(step.tokens) % block == 0
    if max(sizes) > 8:
        assert step.rows_per_text == 4
        assert (len(step.tokens) - step.first_text) % 4 == 0
        blocks = (t[step.first_text :].split(4) for t in (step.pages, step.lengths))
        for rows, lengths in zip(*blocks, strict=True):
            assert len({tuple(row) for row, n in zip(rows.tolist(), lengths.tolist(), strict=True) if n}) <= 1


def test_prompts_do_not_attend_as_decode_rows_where_these_are_padded_to_all_rows():
    chunks = [Chunk([i], 9, array("i", [i]), 1) for i in range(33)]
    chunks.append(Chunk(text(15), 0, array("i", [33]), 1))
    layout, forward = Layout.of(chunks, absorbed_only=False), ModelRunner(new_model(fp8=False), 34).forward
    steps = [mixed_step(layout, 1, torch.device("cpu"), fill=fill) for fill in (1, 16)]
    assert [len(step.lengths) for step in steps] == [33, 48]
    with torch.no_grad():
        alone, padded = (forward.hidden(step) for step in steps)
    assert alone.shape == padded.shape
    assert error(padded, alone) < FP32_ERROR


@pytest.mark.slow
def test_warming_up_writes_nothing_and_counts_nothing():
    runner = ModelRunner(new_model(fp8=True), N_PAGES, None, 4, False, 1, 8, max_step_tokens=300)
    texts = Texts(runner, [text(60)]).run(40)
    cached = runner.cache.bytes_LPQ.clone()
    runner.warm_up()
    runner._end_step()
    assert torch.equal(runner.cache.bytes_LPQ, cached)
    assert runner.expert_tokens is not None
    assert sum(runner.expert_tokens[1]) == 40 * CONFIG.num_experts_per_tok
    whole = Texts(ModelRunner(new_model(fp8=True), N_PAGES), [text(60)]).run(40).run(20).logits[0]
    assert torch.equal(texts.run(20).logits[0], whole)


def test_texts_of_one_position_need_no_warming_up(monkeypatch: pytest.MonkeyPatch):
    runner = ModelRunner(new_model(fp8=False, config=replace(CONFIG, max_position_embeddings=1)), 1, n_drafts=1)
    computed: list[Layout] = []
    monkeypatch.setattr(runner, "_compute_unwritten", computed.append)
    runner.warm_up()
    assert not computed


def test_many_cached_positions_are_decompressed_in_parts(monkeypatch: pytest.MonkeyPatch):
    model, found = new_model(fp8=True), []
    for rows in (2048, 64):
        monkeypatch.setattr("octile.serve.model.attention.GEMM_ROWS", rows)
        found.append(Texts(ModelRunner(model, N_PAGES), [text(200), text(150, 1)]).run(90, 80).run(110, 70).logits)
    for parts, whole in zip(*found, strict=True):
        assert error(parts, whole) < FP32_ERROR


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_are_the_models(batch_invariant: bool):
    """Drafts of a text that is read in parts, from the hidden states that the runner has returned."""
    model = new_model(fp8=False)
    tokens = text(100)
    with torch.no_grad():
        _, expected = model.with_drafts(torch.tensor([tokens]))
    runner = ModelRunner(model, N_PAGES, batch_invariant=batch_invariant)
    texts = Texts(runner, [tokens])
    drafts = torch.cat([texts.draft(size) for size in (63, 1, 2, 33)])
    torch.testing.assert_close(drafts, expected[0], rtol=0, atol=1e-4)


def test_drafts_of_chunks_in_any_order_are_their_own():
    runner = ModelRunner(new_model(fp8=False), N_PAGES)
    first, second = (Chunk(text(n, n), 0, array("i", [n]), n) for n in (3, 30))
    hidden = torch.randn(33, CONFIG.hidden_size)
    together = runner.draft(Batch([second, first]), hidden)
    for chunk, rows in ((second, slice(0, 30)), (first, slice(30, 33))):
        alone = runner.draft(Batch([chunk]), hidden[rows])
        torch.testing.assert_close(together.logits[rows], alone.logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(together.hidden[rows], alone.hidden, rtol=0, atol=1e-4)


def test_the_bytes_of_a_page_are_those_of_the_cache():
    model = new_model(fp8=False)
    for cache_format in ("bf16", "float32", "fp8"):
        runner = ModelRunner(model, 3, cache_format)
        assert 3 * ModelRunner.bytes_per_page(model, cache_format, runner.max_position) == runner.cache.nbytes


def test_wrong_calls_are_refused():
    model, chunk = new_model(fp8=False), Chunk([1, 2], 63, array("i", [0, 1]), 1)
    runner = ModelRunner(model, N_PAGES)
    with pytest.raises(ValueError, match="at least one chunk"):
        runner.run(Batch([]))
    with pytest.raises(ValueError, match=r"hidden must be \(2, 128\)"):
        runner.draft(Batch([chunk]), torch.zeros(1, 128))
    with pytest.raises(ValueError, match="cache_format must be"):
        ModelRunner(model, N_PAGES, "fp4")
    with pytest.raises(ValueError, match="n_pages must be at least 1"):
        ModelRunner(model, 0)
    without = new_model(fp8=False, config=replace(CONFIG, num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="no multi-token prediction layer"):
        ModelRunner(without, N_PAGES).draft(Batch([chunk]), torch.zeros(2, 128))


def test_a_recipe_that_serving_does_not_compute_is_refused():
    from octile.nn.conversion import apply_recipe

    with pytest.raises(ValueError, match="has the recipe 'per_tensor', which serving does not compute"):
        ModelRunner(apply_recipe(new_model(fp8=False), Recipe.per_tensor()), N_PAGES)


def test_logits_of_a_gpu_that_waits_for_another_rank_are_not_waited_for_forever(monkeypatch):
    runner = ModelRunner(new_model(False), 4)
    runner.device, runner.timeout = torch.device("cuda"), 0.01
    event = SimpleNamespace(record=lambda stream: None, query=lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    runner._wait_for(Results(torch.zeros(0, 5), torch.zeros(3, 2)))  # the host reads nothing
    with pytest.raises(TimeoutError, match=r"timed out after 0\.01 s"):
        runner._wait_for(Results(torch.zeros(1, 5), torch.zeros(3, 2)))
