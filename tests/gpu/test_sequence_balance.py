"""On a GPU the balance within sequences is that of the CPU, the same in every run, and nothing waits."""

import pytest
import torch
from torch.nn import functional

from octile.ops.sequence_balance import sequence_balance, sequence_balance_backward

SHAPES = [(1, 1, 1, 1), (8, 4096, 64, 6), (3, 1001, 16, 4), (4, 4096, 256, 8), (1, 50, 4096, 3)]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_are_those_of_the_cpu(shape: tuple[int, int, int, int], scoring_func: str, given: bool):
    batch, length, e, k = shape
    logits = torch.randn(batch * length, e, generator=torch.Generator().manual_seed(0))
    logits[::3] = logits[::3].round()  # ties
    experts = logits.flip(0).topk(k).indices if given else None
    expected_loss, expected_f = sequence_balance(logits, experts, k, batch, scoring_func)
    dloss = torch.tensor(0.37)
    expected = sequence_balance_backward(dloss, logits, expected_f, scoring_func)

    on_gpu, of_loss = logits.cuda(), dloss.cuda()
    counted = None if experts is None else experts.cuda()
    results = []
    for waiting in ("default", "error"):  # the first call compiles the kernels
        torch.cuda.set_sync_debug_mode(waiting)
        loss, f = sequence_balance(on_gpu, counted, k, batch, scoring_func)
        results.append((loss, f, sequence_balance_backward(of_loss, on_gpu, f, scoring_func)))
    torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))
    assert torch.equal(f.cpu(), expected_f)
    torch.testing.assert_close(loss.cpu(), expected_loss, rtol=2.0**-18, atol=0)
    # shares · (d − Σ shares · d) cancels: the error is that of its terms, a few spacings, and of a sum of E
    shares = (functional.logsigmoid(logits) if scoring_func == "sigmoid" else logits).softmax(-1)
    d = (dloss / batch * expected_f / length).repeat_interleave(length, 0)
    terms = shares * (d + (d * shares).sum(-1, keepdim=True))
    assert ((results[1][2].cpu() - expected).abs() <= (8 + e / 64) * 2.0**-23 * terms).all()
