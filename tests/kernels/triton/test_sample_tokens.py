"""The kernels that sample choose the tokens of the reference."""

import pytest
import torch

from octile.kernels.triton import sample_tokens as kernel
from octile.kernels.triton.launch_config import SAMPLE_TOKENS
from octile.ops.sample_tokens import ALL_MASKED, NOT_A_NUMBER, POSITIVE_INFINITY, sample_tokens
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


def rows(vocabulary, n=6, temperature=1.0):
    torch.manual_seed(vocabulary)
    numbers = torch.randint(2**62, (n,)), torch.randint(2**20, (n,)), torch.full((n,), temperature)
    return torch.randn(n, vocabulary), *numbers


@pytest.mark.each_pair
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocabulary", [1, 50, 300])
@pytest.mark.parametrize(("parts", "dtype"), [(1, torch.float32), (8, torch.float32), (8, torch.bfloat16)])
def test_tokens_are_the_references(monkeypatch, vocabulary, temperature, parts, dtype):
    monkeypatch.setitem(SAMPLE_TOKENS, "BLOCK", 32)
    monkeypatch.setitem(SAMPLE_TOKENS, "PROGRAMS", 6 * parts)
    logits, *numbers = rows(vocabulary, temperature=temperature)
    given = logits.to(dtype), *numbers
    assert kernel.launch(*given).tolist() == sample_tokens(*given).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", [50, 300])
def test_extreme_logits(monkeypatch, vocabulary, temperature):
    monkeypatch.setitem(SAMPLE_TOKENS, "BLOCK", 64)
    logits, *numbers = rows(vocabulary, n=7, temperature=temperature)
    logits[0, -1] = float("nan")
    logits[1, 3] = logits[1, 40] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5:] = float("-inf")
    logits[4] = logits[4].sign()  # equal ones
    logits[5, 7], logits[5, -1] = float("inf"), float("nan")
    logits[6, 2:] = float("-inf")
    chosen = kernel.launch(logits, *numbers).tolist()
    assert chosen == sample_tokens(logits, *numbers).tolist()
    assert chosen[:3] + chosen[5:6] == [NOT_A_NUMBER, POSITIVE_INFINITY, ALL_MASKED, NOT_A_NUMBER]
