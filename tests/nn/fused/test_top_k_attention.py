import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.nn.fused.top_k_attention import causal_query_blocks, top_k_attention, top_k_mask

B, S, H, X, V, K = 2, 11, 3, 8, 6, 4


def operands(seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, S, H, n, generator=generator, dtype=dtype).requires_grad_() for n in (X, X, V))
    order = torch.rand(B, S, S, generator=generator).masked_fill(torch.ones(S, S).triu(1).bool(), -1.0)
    values, top_k = order.topk(K)
    return q, k, v, top_k.masked_fill(values < 0, -1).int()


def definition(q, k, v, top_k, scale):
    """One query at a time, over its top-k keys."""
    o = []
    for b in range(B):
        for s in range(S):
            keys = top_k[b, s][top_k[b, s] >= 0].long()
            p = (torch.einsum("hx,thx->ht", q[b, s], k[b, keys]) * scale).softmax(-1)
            o.append(torch.einsum("ht,thv->hv", p, v[b, keys]))
    return torch.stack(o).view(B, S, H, V)


@pytest.mark.parametrize("max_scores", [1, 150, 2**20], ids=["queries", "blocks", "all"])
def test_results_and_gradients_equal_the_definition(max_scores, monkeypatch):
    monkeypatch.setattr("octile.nn.fused.top_k_attention.MAX_SCORES", max_scores)
    q, k, v, top_k = operands()
    found, expected = top_k_attention(q, k, v, top_k, 0.3), definition(q, k, v, top_k, 0.3)
    torch.testing.assert_close(found, expected)
    do = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, (q, k, v), do)
    # those of keys and values are summed in FP32
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, (q, k, v), do), rtol=1e-5, atol=1e-5, check_dtype=True
    )


def test_a_query_reads_no_key_outside_the_top_k():
    q, k, v, top_k = operands()
    before = top_k_attention(q, k, v, top_k, 0.3)
    hidden = ~top_k_mask(top_k, S)[:, S - 1]
    with torch.no_grad():
        v[hidden] = 1e30
    assert torch.equal(top_k_attention(q, k, v, top_k, 0.3)[:, S - 1], before[:, S - 1])


def test_attention_to_all_keys_is_causal_attention():
    q, k, v, _ = operands()
    top_k = torch.where(torch.ones(S, S).tril().bool(), torch.arange(S), -1).int().expand(B, S, S)
    of = [t.transpose(1, 2) for t in (q, k, v)]
    dense = torch.nn.functional.scaled_dot_product_attention(*of, is_causal=True, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(top_k_attention(q, k, v, top_k, 0.3), dense)


@given(rows=st.integers(0, 40), length=st.integers(0, 200), max_scores=st.integers(1, 20000))
def test_blocks_cover_all_queries_and_have_few_scores(rows, length, max_scores):
    blocks = list(causal_query_blocks(rows, length, max_scores))
    assert [i for of in blocks for i in range(of.start, of.stop)] == list(range(length))
    assert all(rows * (of.stop - of.start) * of.stop <= max_scores or of.stop - of.start == 1 for of in blocks)
