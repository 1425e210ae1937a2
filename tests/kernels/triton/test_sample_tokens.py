"""The kernels that sample choose the tokens of the reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from octile.kernels.triton import sample_tokens as kernel
from octile.kernels.triton.launch_config import SAMPLE_TOKENS
from octile.ops.sample_tokens import ALL_MASKED, FIXED_POINT, NOT_A_NUMBER, POSITIVE_INFINITY, sample_tokens
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu", "exponentials_of_torch"), any_gpu]


@pytest.fixture
def exponentials_of_torch(monkeypatch):
    """NumPy's differ in their last bits, so that another token may be left out."""

    def create_exp(self, x):
        return interpreter.TensorHandle(torch.from_numpy(np.array(x.data)).exp().numpy(), x.dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_exp", create_exp)


def rows(vocabulary, n=6, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    torch.manual_seed(vocabulary)
    numbers = torch.randint(2**62, (n,)), torch.randint(2**20, (n,)), torch.full((n,), temperature)
    shares = (torch.full((n,), share, dtype=torch.float64) for share in (top_p, min_p))
    return torch.randn(n, vocabulary), *numbers, torch.full((n,), top_k), *shares


def assert_chosen(given):
    assert kernel.launch(*given, FIXED_POINT).tolist() == sample_tokens(*given).tolist()


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [1, 50, 300])
@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.float32), (8, torch.float32), (8, torch.bfloat16)])
def test_tokens_are_the_references(monkeypatch, vocabulary, how, parts, dtype):
    monkeypatch.setitem(SAMPLE_TOKENS, "BLOCK", 32)
    monkeypatch.setitem(SAMPLE_TOKENS, "PROGRAMS", 6 * parts)
    logits, *numbers = rows(vocabulary, **how)
    assert_chosen((logits.to(dtype), *numbers))


@pytest.mark.one_case
@pytest.mark.parametrize("parts", [8, 1])
@pytest.mark.parametrize("how", [{"top_k": 3, "top_p": 0.5, "min_p": 0.3}, {"temperature": 0.0}], ids=str)
def test_rows_that_are_not_truncated_leave_all_tokens(monkeypatch, how, parts):
    monkeypatch.setitem(SAMPLE_TOKENS, "BLOCK", 32)
    monkeypatch.setitem(SAMPLE_TOKENS, "PROGRAMS", 6 * parts)
    given = rows(300, **how)
    for name in "count_weights", "list_tokens", "find_borders":
        monkeypatch.delattr(kernel, name)
    found = kernel.launch(*given, FIXED_POINT, truncates=False).tolist()
    assert found == sample_tokens(*given, truncates=False).tolist()


@pytest.mark.one_case
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("vocabulary", [50, 300])
def test_extreme_logits(monkeypatch, vocabulary, how):
    monkeypatch.setitem(SAMPLE_TOKENS, "BLOCK", 64)
    logits, *numbers = rows(vocabulary, n=7, **how)
    logits[0, -1] = float("nan")
    logits[1, 3] = logits[1, 40] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5:] = float("-inf")
    logits[4] = logits[4].sign()  # equal ones
    logits[5, 7], logits[5, -1] = float("inf"), float("nan")
    logits[6, 2:] = float("-inf")
    chosen = kernel.launch(logits, *numbers, FIXED_POINT).tolist()
    assert chosen == sample_tokens(logits, *numbers).tolist()
    assert chosen[:3] + chosen[5:6] == [NOT_A_NUMBER, POSITIVE_INFINITY, ALL_MASKED, NOT_A_NUMBER]


TOP_K = st.sampled_from([0, 1, 2, 31, 32, 33, 69, 2**31 - 1])
TOP_P = st.sampled_from([1e-10, 0.1, 0.5, 0.9, 1 - 2**-40, 1.0])
MIN_P = st.sampled_from([0.0, 1e-12, 0.05, 1.0])


@pytest.mark.slow
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    steps=st.sampled_from([0.0, 0.5, 2.0]),
    limits=st.lists(st.tuples(TOP_K, TOP_P, MIN_P), min_size=3, max_size=3),
    parts=st.sampled_from([1, 3]),
    heat=st.sampled_from([0.5, 40.0]),  # hot rows have weights that hardly differ
)
def test_tokens_at_the_border_are_left_out_as_the_reference_does(seed, steps, limits, parts, heat):
    logits, *numbers = rows(70, n=3)  # three blocks, the last one ragged
    logits = 3 * torch.randn(3, 70, generator=torch.Generator().manual_seed(seed))
    if steps:
        logits = (logits / steps).round() * steps
    top_k, top_p, min_p = zip(*limits, strict=True)
    shares = [torch.tensor(share, dtype=torch.float64) for share in (top_p, min_p)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SAMPLE_TOKENS, "BLOCK", 32)
        patch.setitem(SAMPLE_TOKENS, "PROGRAMS", 3 * parts)
        assert_chosen((logits, *numbers[:2], torch.tensor([heat, 1.0, heat]), torch.tensor(top_k), *shares))


def test_a_token_that_is_alone_is_chosen_whatever_its_noise_is():
    logits, _, positions, *how = rows(2000, n=1)
    logits[0, torch.arange(2000) != 1150] = -torch.inf
    assert kernel.launch(logits, torch.tensor([68]), 0 * positions, *how, FIXED_POINT).tolist() == [1150]


@pytest.mark.slow
def test_what_rows_ask_for_may_be_columns_of_a_matrix(monkeypatch):
    monkeypatch.setitem(SAMPLE_TOKENS, "BLOCK", 32)
    logits, *numbers = rows(70, top_k=9, top_p=0.7, min_p=0.01)
    numbers[3][1], numbers[4][2], numbers[5][3] = 0, 1.0, 0.0
    assert_chosen((logits, *(torch.stack((t, torch.zeros_like(t)), dim=1)[:, 0] for t in numbers)))
