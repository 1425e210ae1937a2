"""Hopper's MLA decode attention on a GPU: values, bits, NaN, and replays of a graph with other lengths."""

import functools

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mla_decode
from octile.kernels.cuda.gemm import request
from octile.ops.latent_cache import read_latents
from octile.ops.paged_attention import paged_attention
from tests.ops.paged_caches import filled_cache

FORMS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
LENGTHS = [1, 63, 64, 65, 0, 1000, 2048, 130]
SCALE = 0.02


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


@functools.cache
def rows_on_cpu(dtype: torch.dtype) -> Tensor:
    return filled_cache(len(LENGTHS) * 32, 512, 64, dtype)


def inputs(n_heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_heads)
    q = torch.randn(len(LENGTHS), n_heads, 576, generator=generator).bfloat16().cuda()
    pages = torch.randperm(len(LENGTHS) * 32, generator=generator).int().view(len(LENGTHS), 32)
    return q, rows_on_cpu(dtype).cuda(), pages.cuda(), torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")


def reference(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, rounds_latents: bool = False
) -> tuple[Tensor, float]:
    """The exact result for values as the kernel multiplies them, and the largest value of the cache."""
    slots = torch.arange(len(cache) * 64, device="cuda")
    rounds_latents = rounds_latents or q.shape[1] > 32  # of FP8 rows: for so many heads, or with parts
    dtype = torch.bfloat16 if rounds_latents else torch.float32
    values = read_latents(cache, slots, 512, dtype).view(-1, 64, 576).float()
    on_cpu = (t.cpu() for t in (q.float(), values, pages, lengths))
    return paged_attention.reference(*on_cpu, 512, SCALE).cuda(), float(values.abs().max())


@FORMS
@pytest.mark.parametrize("n_heads", [1, 8, 16, 20, 32, 64, 100, 128])
@pytest.mark.parametrize("part", [0, 256, 2048])
def test_results_are_the_references(n_heads: int, part: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    expected, largest = reference(q, cache, pages, lengths, part > 0)
    found = mla_decode.launch(q, cache, pages, lengths, 512, SCALE, part, 1).float()
    # BF16 rounds a softmax's weights, whose sum is 1, by 2⁻⁹ of themselves
    assert ((found - expected).abs() <= 2**-8 * largest + 2**-8 * expected.abs()).all()
    assert (found - expected).norm() <= 2**-7 * expected.norm()
    assert not found[lengths == 0].any()


@FORMS
@pytest.mark.parametrize("n_heads", [16, 128])
@pytest.mark.parametrize("part", [256, 512, 1024])
def test_a_row_of_parts_has_its_own_bits(part: int, n_heads: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    together = paged_attention(q, cache, pages, lengths, 512, SCALE, part)
    for row in (3, 5, 6):
        alone = (t[row : row + 1].contiguous() for t in (q, pages, lengths))
        one_q, one_pages, one_length = alone
        assert torch.equal(paged_attention(one_q, cache, one_pages, one_length, 512, SCALE, part)[0], together[row])


@FORMS
@pytest.mark.parametrize("n_heads", [4, 16, 20, 32])
@pytest.mark.parametrize("part", [256, 512, 1024])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_rows_that_share_a_thread_block_have_the_bits_that_they_have_alone(
    spread: float, part: int, n_heads: int, dtype: torch.dtype
):
    """All rows of texts of 2,048 positions, as a prompt has them; a large spread of scores has weights of zero, too."""
    _, cache, pages, _ = inputs(16, dtype)
    texts, rows = 2, 2048
    generator = torch.Generator("cuda").manual_seed(part)
    q = (spread * torch.randn(texts * rows, n_heads, 576, generator=generator, device="cuda")).bfloat16()
    of_rows = pages[:texts].repeat_interleave(rows, 0)
    lengths = torch.arange(1, rows + 1, dtype=torch.int32, device="cuda").repeat(texts)
    alone = paged_attention(q, cache, of_rows, lengths, 512, SCALE, part)
    assert alone.isfinite().all()
    for rows_per_text in (2, 4, 2048):
        together = paged_attention(q, cache, of_rows, lengths, 512, SCALE, part, rows_per_text)
        assert torch.equal(together.view(torch.int16), alone.view(torch.int16))
    chosen = torch.randperm(len(q), generator=generator, device="cuda")[:300]  # as texts that decode
    few = paged_attention(q[chosen], cache, of_rows[chosen], lengths[chosen], 512, SCALE, part)
    assert torch.equal(few.view(torch.int16), alone[chosen].view(torch.int16))


@FORMS
@pytest.mark.parametrize("n_heads", [16, 32, 64, 128])
@pytest.mark.parametrize("part", [0, 512])
def test_bits_are_the_same_every_time(n_heads: int, part: int, dtype: torch.dtype):
    operands = inputs(n_heads, dtype)
    first = paged_attention(*operands, 512, SCALE, part)
    assert all(torch.equal(paged_attention(*operands, 512, SCALE, part), first) for _ in range(20))


@FORMS
@pytest.mark.parametrize("n_heads", [16, 32, 128])
@pytest.mark.parametrize("channel", [0, 511, 512])
def test_nan_is_not_hidden_and_stays_in_its_row(n_heads: int, channel: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    before = paged_attention(q, cache, pages, lengths, 512, SCALE, 512)
    cache[pages[3, 1].long(), 1:] = 0xFF if dtype == torch.uint8 else torch.nan  # after row 3's end
    of_row = cache[pages[5, 9].long(), 3]  # row 5's position 579
    if dtype == torch.uint8:
        of_row[channel if channel < 512 else slice(528, 530)] = 0xFF
    else:
        of_row[channel] = torch.nan
    found = paged_attention(q, cache, pages, lengths, 512, SCALE, 512)
    assert found[5].isnan().all()
    others = [row for row in range(len(LENGTHS)) if row != 5]
    assert torch.equal(found[others], before[others])


@FORMS
@pytest.mark.parametrize("n_heads", [16, 64, 128])
@pytest.mark.parametrize("part", [0, 512])
def test_a_graph_attends_to_the_lengths_and_pages_at_its_replay(part: int, n_heads: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    paged_attention(q, cache, pages, lengths, 512, SCALE, part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_attention(q, cache, pages, lengths, 512, SCALE, part)
    for shift in (1, 3, 0):
        lengths.copy_(torch.tensor(LENGTHS).roll(shift))
        pages.copy_(pages.roll(shift, 0))
        graph.replay()
        assert torch.equal(found, paged_attention(q, cache, pages, lengths, 512, SCALE, part))


@FORMS
@pytest.mark.parametrize("n_heads", [16, 128])
@pytest.mark.parametrize("queries", [2, 4, 8])
def test_rows_of_one_text_read_its_pages_once(n_heads: int, queries: int, dtype: torch.dtype):
    q, cache, pages, ends = inputs(n_heads, dtype)
    q = q.repeat_interleave(queries, 0) * torch.linspace(0.5, 1, queries, device="cuda").repeat(len(q))[:, None, None]
    q = q.bfloat16()
    pages, counts = pages.repeat_interleave(queries, 0), torch.arange(queries, device="cuda").repeat(len(ends))
    lengths = (ends.repeat_interleave(queries) + counts).clamp(max=2048).int()
    apart = paged_attention(q, cache, pages, lengths, 512, SCALE).float()
    found = paged_attention(q, cache, pages, lengths, 512, SCALE, 0, queries).float()
    largest = float(read_latents(cache, torch.arange(len(cache) * 64, device="cuda"), 512, torch.float32).abs().max())
    # twice the bound of one result: also where latents are rounded for one of both
    assert ((found - apart).abs() <= 2**-7 * largest + 2**-7 * apart.abs()).all()
    assert (found - apart).norm() <= 2**-6 * apart.norm()
    assert not found[lengths == 0].any()


@FORMS
@pytest.mark.parametrize("rows", [1, 300])
def test_any_number_of_rows_and_drafts_of_one_text(rows: int, dtype: torch.dtype):
    _, cache, pages, _ = inputs(16, dtype)
    q = torch.randn(rows, 16, 576, generator=torch.Generator().manual_seed(0)).bfloat16().cuda()
    of_text = torch.arange(rows, device="cuda") // 4 % len(LENGTHS)  # four rows of each text, one position apart
    lengths = (500 + 10 * of_text + torch.arange(rows, device="cuda") % 4).int()
    expected, largest = reference(q, cache, pages[of_text], lengths)
    found = paged_attention(q, cache, pages[of_text].contiguous(), lengths, 512, SCALE).float()
    assert ((found - expected).abs() <= 2**-8 * largest + 2**-8 * expected.abs()).all()
