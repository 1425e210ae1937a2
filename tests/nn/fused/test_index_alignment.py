import pytest
import torch
from torch import Tensor

from octile.nn.fused import index_alignment
from octile.nn.fused.index_alignment import alignment_loss, top_k_alignment_loss
from octile.nn.fused.top_k_attention import top_k_weights
from tests.nn.fused.largest_tensor import LargestTensor

B, S, H, X, G, E, K = 2, 9, 3, 8, 4, 16, 4
SCALE = 0.3


def operands(dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, S, G, E), (B, S, E), (B, S, G), (B, S, H, X), (B, S, H, X)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def top_k_keys() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(B, S, S, generator=generator).masked_fill(torch.ones(S, S).triu(1).bool(), -1.0)
    values, top_k = order.topk(K)
    return top_k.masked_fill(values < 0, -1).int()


def definition(index_q, index_k, weights, q, k, top_k) -> Tensor:
    """Equations 3 and 4 of the paper, one query at a time, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for b in range(B):
        for t in range(S):
            keys = torch.arange(t + 1) if top_k is None else top_k[b, t][top_k[b, t] >= 0].long()
            scores = [(k[b, keys, h] @ q[b, t, h] * SCALE).softmax(0) for h in range(H)]
            p = torch.stack(scores).sum(0)
            p = (p / p.abs().sum()).detach()
            i = sum(weights[b, t, g] * (index_k[b, keys] @ index_q[b, t, g]).relu() for g in range(G))
            total = total + (p * (p / i.softmax(0)).log()).sum()
    return total / (B * S)


def loss_of(inputs: list[Tensor], top_k: Tensor | None) -> Tensor:
    """The loss over all keys or over the top-k keys, of which attention has computed the weights."""
    if top_k is None:
        return alignment_loss(*inputs, SCALE)
    return top_k_alignment_loss(*inputs[:3], top_k, top_k_weights(*inputs[3:], top_k, SCALE))


@pytest.mark.parametrize("top_k", [None, top_k_keys()], ids=["all keys", "top-k keys"])
@pytest.mark.parametrize("max_scores", [1, 500, 2**20], ids=["queries", "blocks", "all"])
def test_loss_and_gradients_equal_the_definition(top_k, max_scores, monkeypatch):
    monkeypatch.setattr("octile.nn.fused.index_alignment.MAX_SCORES", max_scores)
    inputs = operands()
    found = loss_of(inputs, top_k)
    expected = definition(*inputs, top_k)
    # attention's distribution is computed in FP32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    of_index = inputs[:3]
    torch.testing.assert_close(
        torch.autograd.grad(3 * found, of_index), torch.autograd.grad(3 * expected, of_index), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("top_k", [None, top_k_keys()], ids=["all keys", "top-k keys"])
def test_attention_gets_no_gradient(top_k):
    inputs = operands()
    loss_of(inputs, top_k).backward()
    assert [t.grad is not None for t in inputs] == [True, True, True, False, False]


def test_losses_over_all_keys_as_top_k_keys_and_over_all_keys_are_equal():
    inputs = operands(torch.float32)
    top_k = torch.where(torch.ones(S, S).tril().bool(), torch.arange(S), -1).flip(-1).int().expand(B, S, S)
    losses = [loss_of(inputs, keys) for keys in (None, top_k)]
    torch.testing.assert_close(*losses)
    gradients = [torch.autograd.grad(loss, inputs[:3]) for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_keys_outside_the_top_k_do_not_count():
    *inputs, q, k = operands(torch.float32)
    top_k = top_k_keys()
    top_k[top_k == 2] = -1
    p = top_k_weights(q, k, top_k, SCALE)

    def loss_and_gradients() -> list[Tensor]:
        loss = top_k_alignment_loss(*inputs, top_k, p)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    before = loss_and_gradients()
    with torch.no_grad():
        inputs[1][:, 2] = 1e30
    assert all(torch.equal(*pair) for pair in zip(loss_and_gradients(), before, strict=True))
    assert not before[2][:, 2].any()


def test_an_indexer_whose_distribution_is_attentions_has_no_loss():
    *_, q, k = operands(torch.float32)
    q, k = q[:, :, :1].abs(), k[:, :, :1].abs()  # one head, whose scores are positive
    weights = torch.full((B, S, 1), SCALE)
    assert alignment_loss(q, k[:, :, 0], weights, q, k, SCALE).abs() < 1e-6


def test_scores_in_memory_are_bounded(monkeypatch):
    sizes, logits = [], index_alignment.index_logits

    def counted(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        sizes.append(q.shape[0] * q.shape[1] * k.shape[1] * (H + 2 * G))
        return logits(q, k, weights)

    monkeypatch.setattr(index_alignment, "index_logits", counted)
    monkeypatch.setattr(index_alignment, "MAX_SCORES", 900)
    alignment_loss(*operands(torch.float32), SCALE)
    assert (len(sizes) > 1, max(sizes) <= 900) == (True, True)


@pytest.mark.parametrize("length", [40, 80])
def test_over_top_k_keys_no_tensor_grows_with_the_square(length, monkeypatch):
    monkeypatch.setattr(index_alignment, "MAX_SCORES", 2 * K * (G + E))  # of one query
    sizes = (1, length, G, E), (1, length, E), (1, length, G)
    inputs = [torch.randn(shape, requires_grad=True) for shape in sizes]
    top_k = torch.arange(K).expand(1, length, K).int()
    with LargestTensor() as largest:
        top_k_alignment_loss(*inputs, top_k, torch.full((1, length, K), 1 / K)).backward()
    assert largest.numel == length * G * E
