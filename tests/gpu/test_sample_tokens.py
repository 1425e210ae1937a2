"""Sampling on a GPU: vocabularies of real models, in CUDA graphs, and the same in any batch."""

import math

import pytest
import torch
import triton
from torch import Tensor

from octile.ops.sample_tokens import ALL_MASKED, NOT_A_NUMBER, POSITIVE_INFINITY, sample_tokens
from octile.serve.engine.request import Sampling
from octile.serve.engine.sampler import Row, choose

HOW = (  # top_k, top_p and min_p of a row
    (0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.95, 0.0), (20, 0.95, 0.0), (0, 1.0, 0.05), (0, 0.999, 1e-4), (1, 0.5, 0.0),
    (2**31 - 1, 1.0, 0.0), (100_000, 0.9, 0.0), (0, 1 - 2**-40, 0.0),
)  # fmt: skip


def numbers(rows: int, how: tuple[tuple[int, float, float], ...] = HOW) -> tuple[Tensor, ...]:
    """What rows ask for: each with a seed of its own, at temperature 1."""
    top_k, *shares = zip(*(how[i % len(how)] for i in range(rows)), strict=True)
    seeds = torch.arange(rows, device="cuda")
    shares = (torch.tensor(share, dtype=torch.float64, device="cuda") for share in shares)
    return seeds, seeds + 7, torch.ones(rows, device="cuda"), torch.tensor(top_k, device="cuda"), *shares


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(vocabulary)
    return (3 * torch.randn(rows, vocabulary, device="cuda", generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1000, 102_400, 129_280, 163_840])
@pytest.mark.parametrize("rows", [1, 40, 400])
def test_tokens_are_mostly_those_of_the_reference(rows: int, vocabulary: int, dtype: torch.dtype):
    given = logits_of(rows, vocabulary, dtype), *numbers(rows)
    found = sample_tokens(*given).cpu()
    same = found[:40] == sample_tokens(*(t[:40].cpu() for t in given))
    assert same.float().mean() > 0.95  # logarithms and exponentials differ in their last bits


@pytest.mark.parametrize(
    ("how", "n_left"), [((1000, 1.0, 0.0), 1000), ((0, 0.25, 0.0), 40_960), ((50_000, 0.5, 0.9), 25_000)]
)
def test_of_equal_logits_the_first_are_left(how: tuple[int, float, float], n_left: int):
    tokens = sample_tokens(torch.zeros(4000, 163_840, dtype=torch.bfloat16, device="cuda"), *numbers(4000, (how,)))
    assert 0.99 * n_left < tokens.max() < n_left
    assert tokens.min() >= 0


def test_tokens_have_the_distribution_that_fp64_gives_those_that_are_left():
    logits = torch.linspace(0, 6, 64, dtype=torch.float64)
    p = logits.softmax(-1)
    ordered = p.flip(0)[:40] / p[-40:].sum()
    n_left = int((ordered.cumsum(0) - ordered < 0.9).sum())
    assert 4 < n_left < 40
    expected = torch.zeros(64, dtype=torch.float64)
    expected[-n_left:] = p[-n_left:] / p[-n_left:].sum()
    n = 100_000
    found = (
        sample_tokens(logits.float().cuda().repeat(n, 1), *numbers(n, ((40, 0.9, 0.0),))).cpu().bincount(minlength=64)
    )
    assert found[:-n_left].sum() == 0
    statistic = ((found - n * expected) ** 2 / (n * expected))[-n_left:].sum().item()
    assert abs(statistic - (n_left - 1)) < 5 * math.sqrt(2 * (n_left - 1))


def test_a_row_chooses_the_same_token_in_any_batch():
    given = logits_of(300, 129_280), *numbers(300)
    together = sample_tokens(*given).tolist()
    assert [sample_tokens(*(t[i : i + 1] for t in given)).item() for i in range(40)] == together[:40]
    assert sample_tokens(*(t[:40] for t in given)).tolist() == together[:40]


def test_logits_that_are_not_finite_choose_no_token():
    logits, how = logits_of(4, 102_400), numbers(4, ((20, 0.95, 0.01),))
    logits[0, -1], logits[1, 70_000] = math.nan, math.inf
    logits[2] = logits[3, :102_399] = -math.inf
    assert sample_tokens(logits, *how).tolist() == [NOT_A_NUMBER, POSITIVE_INFINITY, ALL_MASKED, 102_399]


def test_a_cuda_graph_reads_anew_what_rows_ask_for():
    given = logits_of(40, 129_280), *numbers(40, ((0, 1.0, 0.0),))
    sample_tokens(*given)  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # waiting for the GPU would be an error
        tokens = sample_tokens(*given)
    for how in (HOW, HOW[::-1]):
        for t, new in zip(given[1:], numbers(40, how), strict=True):
            t.copy_(new)
        graph.replay()
        assert tokens.tolist() == sample_tokens(*given).tolist()


def test_even_and_odd_numbers_of_rows_have_the_same_kernels(monkeypatch: pytest.MonkeyPatch):
    """What rows ask for are rows of one tensor, which are aligned if their number is even."""
    logits = torch.randn(3, 5000, device="cuda")
    rows = [Row(Sampling(temperature=1.0, top_p=0.9, top_k=50), seed, 0) for seed in range(3)]
    choose(logits[:2], rows[:2])
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **of: compiled.append(of["repr"]))
    choose(logits, rows)
    assert not compiled, compiled
