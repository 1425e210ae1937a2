"""Hopper's kernel for the indexer's logits: as close to the sums in float64 as the tensor cores are, in every mode."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mqa_logits as kernel
from octile.ops.mqa_logits import PAGE, mqa_logits, paged_mqa_logits, paged_mqa_schedule
from tests.ops.paged_keys import filled_pages, in_order, scored

ROUNDING = 2.0**-11  # of the tensor cores' sums, relative to the sum of magnitudes: products lose their last bits
E4M3 = torch.float8_e4m3fn
every_shape = pytest.mark.parametrize(("h", "d"), [(h, d) for h in kernel.HEADS for d in kernel.HEAD_DIMS])


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's")


def operands(s: int, t: int, h: int, d: int) -> tuple[Tensor, ...]:
    g = torch.Generator("cuda").manual_seed(s)
    random = partial(torch.randn, generator=g, device="cuda")
    return random(s, h, d).to(E4M3), random(t, d).to(E4M3), random(t).exp(), random(s, h)


def ranges(s: int, t: int) -> tuple[Tensor, Tensor]:
    """First keys and ends, some before the first and beyond the last key, and some ranges empty."""
    g = torch.Generator("cuda").manual_seed(t)
    start = torch.randint(-3, t // 2 + 1, (s,), generator=g, device="cuda", dtype=torch.int32)
    length = torch.randint(-5, t + 1, (s,), generator=g, device="cuda", dtype=torch.int32)
    return start, start + length


def assert_as_exact_as_the_tensor_cores(
    found: Tensor, seen: Tensor, q: Tensor, k: Tensor, scale: Tensor, w: Tensor
) -> None:
    exact = scored(q, k, scale, w)
    magnitudes = scored(q.float().abs(), k.float().abs(), scale.abs(), w.abs())
    bound = ROUNDING * magnitudes + torch.finfo(found.dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= bound)[seen].all()


@every_shape
@pytest.mark.parametrize(("s", "t"), [(1, 1), (7, 63), (70, 1000), (131, 4160)])
def test_logits_of_any_shape(h: int, d: int, s: int, t: int):
    tensors, (starts, ends) = operands(s, t, h, d), ranges(s, t)
    found = mqa_logits(*tensors, starts, ends, 0, True, torch.float32)
    key = torch.arange(t, device="cuda")
    seen = (key >= starts[:, None]) & (key < ends[:, None])
    assert_as_exact_as_the_tensor_cores(found, seen, *tensors)
    assert (found[~seen] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("h", kernel.HEADS)
def test_compressed_logits_begin_at_the_first_key(h: int, dtype: torch.dtype):
    tensors, (starts, ends) = operands(70, 1000, h, 128), ranges(70, 1000)
    whole = mqa_logits(*tensors, starts, ends, 0, False, dtype)
    found = mqa_logits(*tensors, starts, ends, 300, False, dtype)
    for row, (start, end) in enumerate(zip(starts.clamp(min=0).tolist(), ends.clamp(max=1000).tolist(), strict=True)):
        count = max(min(end - start, 300), 0)
        assert torch.equal(found[row, :count], whole[row, start : start + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_the_same_at_every_call(dtype: torch.dtype):
    call = partial(mqa_logits, *operands(300, 5000, 64, 128), *ranges(300, 5000), 0, True, dtype)
    first = call()
    assert all(torch.equal(call(), first) for _ in range(10))


@pytest.mark.parametrize("value", [0.0, 2.0**-9, 448.0, -448.0])
def test_extreme_values(value: float):
    q, k, scale, w = operands(9, 200, 64, 128)
    k = torch.full_like(k, value)
    starts, ends = torch.zeros(9, device="cuda").int(), torch.full((9,), 200, device="cuda").int()
    found = mqa_logits(q, k, scale, w, starts, ends, 0, True, torch.float32)
    assert_as_exact_as_the_tensor_cores(found, found == found, q, k, scale, w)


@pytest.mark.parametrize("which", range(4))
def test_nan_appears_in_its_logits_alone(which: int):
    tensors = [*operands(9, 200, 32, 64)]
    tensors[which][3] = math.nan
    starts, ends = torch.zeros(9, device="cuda").int(), torch.full((9,), 200, device="cuda").int()
    found = mqa_logits(*tensors, starts, ends, 0, True, torch.float32).isnan()
    expected = torch.zeros_like(found)
    (expected if which in (0, 3) else expected.mT)[3] = True
    assert torch.equal(found, expected)


def test_tensors_that_do_not_begin_at_16_bytes():
    q, k, scale, w = operands(9, 200, 64, 128)
    begin = torch.zeros(1, device="cuda")
    shifted = torch.cat((begin, scale))[1:], torch.cat((begin.expand(9, 1), w), 1)[:, 1:]
    starts, ends = torch.zeros(9, device="cuda").int(), torch.full((9,), 200, device="cuda").int()
    rest = starts, ends, 0, True, torch.float32
    assert torch.equal(mqa_logits(q, k, *shifted, *rest), mqa_logits(q, k, scale, w, *rest))


def test_a_captured_call_follows_its_inputs():
    tensors, (starts, ends) = operands(70, 1000, 64, 128), ranges(70, 1000)
    call = partial(mqa_logits, *tensors, starts, ends, 0, True, torch.float32)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    starts += 20
    ends -= 30
    graph.replay()
    assert torch.equal(captured, call())


def test_other_heads_are_computed_by_torch():
    tensors, (starts, ends) = operands(7, 100, 6, 48), ranges(7, 100)
    found = mqa_logits(*tensors, starts, ends, 0, True, torch.float32)
    on_cpu = mqa_logits(*(t.cpu() for t in (*tensors, starts, ends)), 0, True, torch.float32)
    torch.testing.assert_close(found.cpu(), on_cpu, rtol=1e-5, atol=1e-4)


@every_shape
@pytest.mark.parametrize("next_n", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_pages(h: int, d: int, next_n: int, dtype: torch.dtype):
    b, p, width = 9, 40, 1200
    q, k, scale, w = operands(b * next_n, p * PAGE, h, d)
    cache, g = filled_pages(k, scale), torch.Generator("cuda").manual_seed(next_n)
    lengths = torch.randint(0, width, (b, next_n), generator=g, device="cuda", dtype=torch.int32)
    lengths[4] = 0
    pages = torch.randint(0, p, (b, -(-width // PAGE)), generator=g, device="cuda", dtype=torch.int32)
    schedule = paged_mqa_schedule(lengths, torch.cuda.get_device_properties().multi_processor_count)
    found = paged_mqa_logits(q.view(b, next_n, h, d), cache, w, lengths, pages, schedule, width, True, dtype)
    seen = torch.arange(width, device="cuda") < lengths.view(-1, 1)
    assert (found[~seen] == -math.inf).all()
    for i in range(b):
        rows = slice(i * next_n, (i + 1) * next_n)
        keys, scales = (t[:width] for t in in_order(cache, pages[i], d))
        assert_as_exact_as_the_tensor_cores(found[rows], seen[rows], q[rows], keys, scales, w[rows])


@pytest.mark.parametrize("n_blocks", [1, 7, 500])
def test_a_schedule_of_any_number_of_blocks(n_blocks: int):
    q, k, scale, w = operands(6, 40 * PAGE, 64, 128)
    lengths = torch.tensor([[2000], [0], [1], [640], [257], [2560]], device="cuda", dtype=torch.int32)
    pages = torch.arange(40, device="cuda", dtype=torch.int32).expand(6, 40).contiguous()
    arguments = q[:, None], filled_pages(k, scale), w, lengths, pages
    one, many = (
        paged_mqa_logits(*arguments, paged_mqa_schedule(lengths, n), 2560, True, torch.float32) for n in (132, n_blocks)
    )
    assert torch.equal(one, many)
