"""Hopper's choice of keys on a GPU: a CPU's columns in its order, for logits of many distributions and any lengths."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.ops.top_keys import top_keys


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


def drawn(s: int, w: int) -> Tensor:
    return torch.randn(s, w, generator=torch.Generator().manual_seed(w))


def ragged(logits: Tensor) -> tuple[Tensor, Tensor]:
    s, w = logits.shape
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(-5, w // 3, (s,), generator=generator)
    return starts.int(), torch.randint(0, w + w // 5, (s,), generator=generator).int()


def assert_as_reference(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> None:
    found = top_keys(logits.cuda(), starts.cuda(), ends.cuda(), k)
    assert torch.equal(found.cpu(), top_keys.reference(logits, starts, ends, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("s", "w", "k"), [(1, 131072, 2048), (300, 9999, 2048), (200, 20000, 300), (5, 9000, 4096)])
def test_rows_of_any_length(s: int, w: int, k: int, dtype: torch.dtype):
    logits = drawn(s, w).to(dtype)
    assert_as_reference(logits, *ragged(logits), k)


@pytest.mark.parametrize("kind", ["equal", "signs", "ascending", "descending", "few high", "negative zero", "nan"])
@pytest.mark.parametrize("w", [3000, 40001])
def test_logits_of_any_distribution(kind: str, w: int):
    logits = drawn(4, w)
    if kind == "equal":
        logits.fill_(-3.5)
    elif kind == "signs":
        logits = logits.sign()
    elif kind in ("ascending", "descending"):
        logits = logits.sort(-1, descending=kind == "descending").values
    elif kind == "few high":
        logits[:, 17:2065] += 100
    elif kind == "negative zero":
        logits = torch.where(logits > 0, 0.0, -0.0)
    else:
        logits[:, ::7], logits[:, 1::7], logits[:, 2::7] = math.nan, math.inf, -math.inf
    assert_as_reference(logits, torch.zeros(4).int(), torch.full((4,), w).int(), 2048)


def test_bits_are_the_same_every_time():
    logits = drawn(50, 30000).mul(8).round().cuda()
    starts, ends = (t.cuda() for t in ragged(logits))
    first = top_keys(logits, starts, ends, 2048)
    assert all(torch.equal(top_keys(logits, starts, ends, 2048), first) for _ in range(20))


def test_a_graph_chooses_of_the_logits_at_its_replay():
    logits = drawn(20, 30000).cuda()
    starts, ends = (t.cuda() for t in ragged(logits))
    top_keys(logits, starts, ends, 2048)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = top_keys(logits, starts, ends, 2048)
    logits.copy_(logits.roll(1, 0))
    ends.copy_(ends.roll(3, 0))
    graph.replay()
    assert torch.equal(found, top_keys(logits, starts, ends, 2048))
