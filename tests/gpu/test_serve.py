"""The model runner on a GPU: the CPU's logits, graphs with the bits of eager steps, and batch invariance."""

from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor

from octile.kernels.cuda.jit import specialize
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.ops.attention import attention, ragged_attention
from octile.ops.latent_cache import read_latents, write_latents
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from octile.ops.row_invariant import row_invariant_matmul_nt
from octile.serve.runner import step
from octile.serve.runner.model_runner import ModelRunner
from tests.ops.paged_caches import new_cache, random_rows
from tests.serve.models import Texts, text

N_PAGES = 60
LENGTHS = [200, 64, 66, 30]
SIZES = [(100, 50, 0, 1), (0, 10, 63, 0), (1, 1, 1, 1), (0, 1, 2, 7), (1, 1, 0, 5), (60, 0, 0, 1)]
SIZES += [(8, 0, 0, 5), (30, 1, 0, 10)]
MODELS = {"tiny": ModelConfig.tiny(), "small": replace(ModelConfig.small(), num_hidden_layers=3)}


def make(name: str, fp8: bool = True) -> DeepseekV3:
    torch.manual_seed(0)
    model = DeepseekV3(MODELS[name]).to(torch.bfloat16).eval()
    return apply_recipe(model) if fp8 else model  # type: ignore[return-value]


def read_all(runner: ModelRunner) -> list[Tensor]:
    texts = Texts(runner, [text(n, i, runner.vocab_size) for i, n in enumerate(LENGTHS)])
    for sizes in SIZES:
        texts.run(*sizes)
    assert [len(logits) for logits in texts.logits] == LENGTHS
    return texts.logits


def alone(runner: ModelRunner) -> list[Tensor]:
    """The logits of whole texts, each read at once by itself."""
    texts = Texts(runner, [text(n, i, runner.vocab_size) for i, n in enumerate(LENGTHS)])
    for i, n in enumerate(LENGTHS):
        texts.run(*(n if i == j else 0 for j in range(len(LENGTHS))))
    return texts.logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
def test_logits_are_as_near_to_those_of_fp32_as_the_cpus(name: str, cache_format: str):
    model = make(name)
    exact = DeepseekV3(MODELS[name]).eval()
    exact.load_state_dict(model.state_dict())
    on_cpu = torch.cat(read_all(ModelRunner(model, N_PAGES, cache_format)))
    expected = torch.cat(read_all(ModelRunner(exact, N_PAGES)))
    found = torch.cat(read_all(ModelRunner(model.cuda(), N_PAGES, cache_format, max_batch=16)))
    assert error(found, expected) < 1.1 * error(on_cpu, expected)


def test_graphs_count_the_tokens_of_experts_like_steps_without_one():
    model, counts = make("tiny").cuda(), []
    for max_batch in (0, 16):
        runner = ModelRunner(model, N_PAGES, max_batch=max_batch, batch_invariant=True, expert_window=8)
        texts = Texts(runner, [text(100, i, runner.vocab_size) for i in range(4)]).run(20, 10, 5, 1)
        for sizes in 4 * [(1, 1, 1, 0), (3, 0, 2, 1), (0, 0, 1, 0), (4, 4, 4, 4)]:  # in graphs of 4, 8, 1, 16 rows
            texts.run(*sizes)
        assert sum(runner.expert_tokens[1]) == 8 // 4 * 26 * model.config.num_experts_per_tok
        counts.append(runner.expert_tokens)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_graphs_have_the_bits_of_steps_of_their_size(name: str, batch_invariant: bool):
    """Every decoding step here has as many rows as a graph, so that no GEMM has another number of rows."""
    model, results = make(name).cuda(), []
    for max_batch in (0, 16):
        sizes = {"max_batch": max_batch, "max_step_tokens": 128 * max_batch}
        runner = ModelRunner(model, N_PAGES, **sizes, batch_invariant=batch_invariant)
        texts = Texts(runner, [text(100, i, runner.vocab_size) for i in range(4)]).run(90, 80, 70, 63)
        for sizes in ((1, 1, 1, 1), (1, 1, 0, 0), (0, 1, 0, 0), (4, 4, 4, 4), (1, 0, 7, 0), (1, 1, 1, 1)):
            texts.run(*sizes)
        results.append(texts.logits)
    for graph, eager in zip(*results, strict=True):
        assert torch.equal(graph, eager)


@pytest.mark.each_value
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(100, 96, 60), (100, 1, 90), (300, 200, 12), (3, 8, 5)], ids=str)
def test_graphs_of_prompts_have_the_logits_of_steps_without_one(name: str, sizes: tuple[int, ...]):
    model, results = make(name).cuda(), []
    for has_graphs in (False, True, True):
        runner = ModelRunner(model, N_PAGES, max_batch=4)
        runner.prefill_graphs = runner.prefill_graphs if has_graphs else None
        texts = Texts(runner, [text(600, i, runner.vocab_size) for i in range(3)])
        for _ in range(2):
            texts.run(*sizes)
        results.append(torch.cat(texts.logits))
    assert torch.equal(results[2], results[1])
    if sum(sizes) % 256:  # GEMMs with other numbers of rows
        assert error(results[1], results[0]) < 0.05
    else:
        assert torch.equal(results[1], results[0])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [(100, 96, 60), (100, 1, 90), (300, 200, 12)], ids=str)
def test_in_batch_invariant_mode_graphs_of_prompts_have_the_bits_of_steps_without_one(
    name: str, sizes: tuple[int, ...]
):
    model, results = make(name).cuda(), []
    for has_graphs in (False, True):
        runner = ModelRunner(model, N_PAGES, max_batch=4, batch_invariant=True)
        assert runner.prefill_graphs is not None
        runner.prefill_graphs = runner.prefill_graphs if has_graphs else None
        texts = Texts(runner, [text(600, i, runner.vocab_size) for i in range(3)])
        for _ in range(2):
            texts.run(*sizes)
        results.append(torch.cat(texts.logits))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("max_batch", "max_step_tokens", "sizes"),
    [
        (16, 0, [(100, 50, 20, 20), (1, 1, 1, 1), (2, 1, 0, 3)]),
        (0, 512, [(100, 50, 20, 30), (60, 14, 46, 0), (40, 0, 0, 0)]),
    ],
    ids=["decode", "prefill"],
)
def test_the_graphs_of_one_phase_have_its_logits_in_both(
    max_batch: int, max_step_tokens: int, sizes: list[tuple[int, ...]]
):
    model, found = make("small").cuda(), []
    both = ModelRunner(model, N_PAGES, max_batch=16, max_step_tokens=512)
    one = ModelRunner(model, N_PAGES, max_batch=max_batch, max_step_tokens=max_step_tokens)
    captured = [graphs is not None for graphs in (one.graphs, one.loop, one.prefill_graphs)]
    assert captured == [max_batch > 0, max_batch > 0, max_step_tokens > 0]
    for runner in (one, both):
        texts = Texts(runner, [text(n, i, runner.vocab_size) for i, n in enumerate(LENGTHS)])
        for of_step in sizes:
            texts.run(*of_step)
        found.append(torch.cat(texts.logits))
    assert error(*found) < 0.05  # a prompt outside of a graph has GEMMs with other numbers of rows


def test_graphs_that_share_memory_do_not_disturb_each_other():
    model, found = make("small").cuda(), []
    for has_others in (False, True):
        runner = ModelRunner(model, N_PAGES, max_batch=4, n_drafts=1, max_step_tokens=512)
        texts = Texts(runner, [text(600, i, runner.vocab_size) for i in range(3)]).run(90, 0, 0)
        for _ in range(4):
            if has_others:
                texts.run(0, 100, 20)
                texts.run(0, 1, 2)
            texts.run(1, 0, 0)
        found.append(texts.logits[0])
    assert torch.equal(*found)


def test_no_step_captures_a_graph(monkeypatch: pytest.MonkeyPatch):
    runner = ModelRunner(make("small").cuda(), N_PAGES, max_batch=4, n_drafts=1, max_step_tokens=300)
    monkeypatch.delattr(torch.cuda, "CUDAGraph")
    texts = Texts(runner, [text(600, i, runner.vocab_size) for i in range(3)])
    for sizes in ((100, 30, 0), (1, 1, 150), (1, 2, 1), (300, 100, 1)):
        hidden = texts.run(*sizes).hidden
        assert not hidden.isnan().any()


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("max_batch", [4, 0], ids=["decode and prefill", "prefill"])
def test_no_kernel_is_compiled_after_the_start(fp8: bool, max_batch: int, monkeypatch: pytest.MonkeyPatch):
    """Also of few rows, whose kernels are specialized for their number, with a latent of 512 channels."""
    torch.manual_seed(0)
    config = replace(MODELS["small"], kv_lora_rank=512)
    model = DeepseekV3(config).to(torch.bfloat16).cuda().eval()
    model = apply_recipe(model) if fp8 else model
    runner = ModelRunner(model, N_PAGES, max_batch=max_batch, n_drafts=1, max_step_tokens=300)
    loaded, compiled = [*specialize._loaded], []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["repr"]))
    texts = Texts(runner, [text(1100, i, config.vocab_size) for i in range(3)])
    few = (100, 30, 0), (1, 1, 150), (3, 0, 0), (1, 1, 1), (0, 2, 3), (2, 4, 1), (6, 8, 5), (30, 1, 0)
    for sizes in (*few, (300, 0, 0), (300, 0, 0), (300, 0, 0)):
        texts.draft(*sizes)
    assert not compiled, compiled
    assert [*specialize._loaded] == loaded


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
@pytest.mark.parametrize("cache_format", ["bf16", "fp8"])
def test_a_batch_invariant_runner_has_the_same_bits_however_texts_are_read(name: str, fp8: bool, cache_format: str):
    runner = ModelRunner(make(name, fp8).cuda(), N_PAGES, cache_format, max_batch=16, batch_invariant=True)
    for together, by_itself in zip(read_all(runner), alone(runner), strict=True):
        assert torch.equal(together, by_itself)


@pytest.mark.parametrize("name", MODELS)
def test_one_chunk_of_a_long_text_attends_in_parts(monkeypatch: pytest.MonkeyPatch, name: str):
    """Without experts, which a gate may choose otherwise where a sum is rounded otherwise."""
    config = replace(MODELS[name], first_k_dense_replace=MODELS[name].num_hidden_layers, num_nextn_predict_layers=0)
    model, exact = DeepseekV3(config).to(torch.bfloat16).cuda().eval(), DeepseekV3(config).eval()
    exact.load_state_dict(model.state_dict())
    tokens = text(2000, vocab_size=config.vocab_size)

    def logits(read: DeepseekV3) -> Tensor:
        return Texts(ModelRunner(read, N_PAGES), [tokens]).run(1700).run(300).logits[0]

    whole, expected = logits(model), logits(exact)
    monkeypatch.setattr(step, "CONTEXT_POSITIONS", 500)
    assert error(logits(model), expected) < 1.1 * error(whole, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n_rows", "n_keys"), [(1, 1), (9, 100), (300, 1000), (2048, 16384)])
def test_attention_to_all_keys_has_the_references_values(dtype: torch.dtype, n_rows: int, n_keys: int):
    q = torch.randn(1, n_rows, 4, 192, device="cuda").to(dtype)
    k, v = (torch.randn(1, n_keys, 4, width, device="cuda").to(dtype) for width in (192, 128))
    (o, lse), (expected, expected_lse) = (f(q, k, v, 0.07, False) for f in (attention, attention.reference))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
    atol = 2**-8 * float(v.abs().max()) if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(o, expected, rtol=2**-7, atol=atol)


def drafted(runner: ModelRunner, tokens: list[int], sizes: tuple[int, ...]) -> Tensor:
    """The logits of all drafts of a text that is read in chunks of these sizes."""
    texts = Texts(runner, [tokens])
    return torch.cat([texts.draft(size) for size in sizes])


def test_drafts_are_as_near_to_those_of_fp32_as_the_models():
    """With all experts: a gate may choose otherwise among more where a sum is rounded otherwise."""
    config = replace(MODELS["small"], n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1)
    torch.manual_seed(0)
    model, exact = DeepseekV3(config).to(torch.bfloat16).eval(), DeepseekV3(config).eval()
    exact.load_state_dict(model.state_dict())
    tokens = text(100, vocab_size=config.vocab_size)
    with torch.no_grad():
        expected = exact.with_drafts(torch.tensor([tokens]))[1][0]
        own = model.cuda().with_drafts(torch.tensor([tokens], device="cuda"))[1][0].float().cpu()
    found = drafted(ModelRunner(model, N_PAGES, max_batch=16, n_drafts=1), tokens, (63, 1, 2, 33))
    assert error(found.cpu(), expected) < 1.1 * error(own, expected)


def test_drafts_of_graphs_have_the_bits_of_steps_without_one():
    model, tokens = make("small").cuda(), text(100, vocab_size=MODELS["small"].vocab_size)
    runners = (ModelRunner(model, N_PAGES, max_batch=16, n_drafts=n, max_step_tokens=0) for n in (0, 1))
    assert torch.equal(*(drafted(runner, tokens, (63, 1, 2, 4, 1, 1)) for runner in runners))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [192, 20])
@pytest.mark.parametrize(
    "texts", [((1, 1), (300, 300), (9, 700), (2, 129), (1000, 1000)), 2 * ((1024, 1024),)], ids=len
)
def test_attention_of_texts_of_any_lengths_has_the_references_values(dtype: torch.dtype, width: int, texts):
    rows, keys = map(sum, zip(*texts, strict=True))
    q, k, v = (torch.randn(n, 4, x, device="cuda").to(dtype) for n, x in ((rows, width), (keys, width), (keys, 16)))
    starts = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).cuda() for sizes in zip(*texts, strict=True))
    arguments = q, k, v, *starts, *map(max, zip(*texts, strict=True)), 0.07
    found, expected = torch.empty(2, rows, 4, 16, device="cuda", dtype=dtype)
    ragged_attention(found, *arguments)
    ragged_attention.reference(expected, *arguments)
    atol = 2**-8 * float(v.abs().max()) if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=atol)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.uint8])
def test_rows_of_the_cache_have_the_references_bits(cache_dtype: torch.dtype):
    latent, rope = random_rows(300, 512, 64, torch.bfloat16)
    slots = torch.randperm(640)[:300]
    expected, found = new_cache(10, 512, 64, cache_dtype), new_cache(10, 512, 64, cache_dtype).cuda()
    write_latents(expected, slots, latent, rope)
    write_latents(found, slots.cuda(), latent.cuda(), rope.cuda())
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    read = read_latents(found, slots.cuda(), 512, torch.bfloat16)
    assert torch.equal(read.cpu(), read_latents(expected, slots, 512, torch.bfloat16))


@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("part", [0, 512, 4096])
def test_paged_attention_has_the_references_values(heads: int, cache_dtype: torch.dtype, part: int):
    lengths = torch.tensor([1, 64, 65, 0, 1000, 4096], dtype=torch.int32)
    pages = torch.randperm(6 * 64).int().view(6, 64)
    cache = new_cache(6 * 64, 512, 64, cache_dtype)
    write_latents(cache, torch.arange(6 * 64 * 64), *random_rows(6 * 64 * 64, 512, 64))
    q = torch.randn(6, heads, 576).bfloat16()
    # the kernel for blocks of 64 heads, which parts have, rounds the latents of an FP8 cache to BF16
    multiplied = torch.bfloat16 if heads == 128 or part else torch.float32
    values = read_latents(cache, torch.arange(len(cache) * 64), 512, multiplied).view(-1, 64, 576)
    expected = paged_attention(q, values, pages, lengths, 512, 0.02)
    found = paged_attention(q.cuda(), cache.cuda(), pages.cuda(), lengths.cuda(), 512, 0.02, part).cpu()
    largest = values.float().abs().max()  # BF16 rounds a softmax's weights, whose sum is 1, by 2⁻⁹ of themselves
    assert ((found - expected).float().abs() <= 2**-8 * largest + 2**-7 * expected.float().abs()).all()
    assert not found[3].any()


@pytest.mark.parametrize("part", [0, 64, 512, 4096])
def test_paged_attention_hides_no_nan(part: int):
    lengths = torch.tensor([1, 0, 1000, 4096], dtype=torch.int32).cuda()
    pages = torch.arange(4 * 64).int().view(4, 64).cuda()
    cache, q = torch.randn(4 * 64, 64, 576).bfloat16().cuda(), torch.randn(4, 16, 576).bfloat16().cuda()
    before = paged_attention(q, cache, pages, lengths, 512, 0.02, part)
    cache[0, 1, 0] = torch.nan  # after row 0's end
    cache[2 * 64 + 15, 3, 511] = torch.nan  # row 2's position 963
    cache[3 * 64, 0, 575] = torch.nan  # row 3's first position
    found = paged_attention(q, cache, pages, lengths, 512, 0.02, part)
    assert found[2:].isnan().all()
    assert torch.equal(found[:2], before[:2])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("part", [512, 2048])
def test_rows_of_a_short_latent_have_the_same_bits_alone_and_in_whole_texts(cache_dtype: torch.dtype, part: int):
    """Of 256 channels, as `small` has them, with 6 heads, so that blocks of 128 begin and end within rows."""
    cache = new_cache(2 * 32, 256, 64, cache_dtype)
    write_latents(cache, torch.arange(2 * 2048), *random_rows(2 * 2048, 256, 64))
    pages = torch.arange(2 * 32).int().view(2, 32).repeat_interleave(2048, 0)
    q = torch.randn(2 * 2048, 6, 320).bfloat16().cuda()
    texts = cache.cuda(), pages.cuda(), torch.arange(1, 2049).repeat(2).int().cuda()
    o, lse = paged_attention_with_lse(q, *texts, 256, 0.05, part, 2048)
    for rows_per_text in (1, 4):
        found, found_lse = paged_attention_with_lse(q, *texts, 256, 0.05, part, rows_per_text)
        assert torch.equal(found, o)
        assert torch.equal(found_lse, lse)
    more_pages = torch.cat((texts[1], texts[1]), dim=1)  # of more parts, which are not merged where they are empty
    for row in (0, 20, 21, 1000, 2047, 4095):
        own = slice(row, row + 1)
        assert torch.equal(paged_attention(q[own], texts[0], texts[1][own], texts[2][own], 256, 0.05, part), o[own])
        assert torch.equal(paged_attention(q[own], texts[0], more_pages[own], texts[2][own], 256, 0.05, part), o[own])


def test_rows_of_a_gemm_in_high_precision_do_not_depend_on_each_other():
    a, w = torch.randn(3, 200, 512).cuda().bfloat16(), torch.randn(3, 130, 512).cuda().bfloat16()
    together = row_invariant_matmul_nt(a, w, torch.float32)
    torch.testing.assert_close(together, a.float() @ w.float().mT, rtol=1e-3, atol=1e-2)
    for rows in (slice(0, 1), slice(7, 40), slice(100, 200)):
        assert torch.equal(row_invariant_matmul_nt(a[:, rows], w, torch.float32), together[:, rows])


@pytest.mark.parametrize("k", [128, 512, 2000])
def test_rows_have_the_same_bits_in_small_and_in_large_tiles(k: int):
    a, w = torch.randn(2, 4100, k).cuda().bfloat16(), torch.randn(2, 1000, k).cuda().bfloat16()
    together = row_invariant_matmul_nt(a, w, torch.float32)  # in tiles of 128 × 128
    for rows in (slice(0, 1), slice(7, 70), slice(100, 400), slice(4099, 4100)):
        assert torch.equal(row_invariant_matmul_nt(a[:, rows], w, torch.float32), together[:, rows])
