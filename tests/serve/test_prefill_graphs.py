"""Tests of the parts of a step with prompts that a GPU captures; on a CPU they are computed without a graph."""

import pytest
import torch

from octile.serve.model_runner import ModelRunner
from octile.serve.prefill_graphs import PrefillGraphs, padded_rows
from tests.serve.models import Texts, new_model, text


@pytest.mark.parametrize(("n", "rows"), [(1, 256), (256, 256), (257, 512), (2048, 2048), (2049, 3072), (8192, 8192)])
def test_rows_are_padded(n, rows):
    assert padded_rows(n) == rows


@pytest.mark.parametrize("fp8", [False, True])
def test_logits_are_those_of_the_forward_pass(fp8):
    found = []
    for captured in (False, True):
        runner = ModelRunner(new_model(fp8), 32)
        if captured:
            runner.prefill_graphs = PrefillGraphs(runner.forward)
        texts = Texts(runner, [text(200, seed=i) for i in range(3)])
        for sizes in ((90, 30, 0), (1, 100, 90), (40, 1, 40)):  # prompts alone, and next to a token that is decoded
            texts.run(*sizes)
        found.append(torch.cat(texts.logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)
