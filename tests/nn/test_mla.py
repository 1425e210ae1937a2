import pytest
import torch

from octile.nn.mla import MLA
from octile.nn.rope import Rope

ROPE = Rope(8, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=1.0)


def attention(q_lora_rank=24, seed=0):
    torch.manual_seed(seed)
    mla = MLA(
        64,
        4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        softmax_factor=ROPE.softmax_factor,
    )
    for parameter in mla.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return mla


def cos_sin(start, end):
    return ROPE.cos_sin(torch.arange(start, end))


def slow(mla, x_BSD):
    """The definition: one query, one head, one key at a time."""
    b, s, _ = x_BSD.shape
    q, *_ = mla._projections(x_BSD)
    latent, k_rope = mla.kv_a_proj_with_mqa(x_BSD).split([32, 8], dim=-1)
    kv = mla.kv_b_proj(mla.kv_a_layernorm(latent)).view(b, s, 4, 28)
    turn = lambda v, at: torch.view_as_real(  # noqa: E731
        torch.view_as_complex(v.view(4, 2)) * torch.exp(1j * at * ROPE.frequencies())
    ).flatten()
    size = (ROPE.cos_sin(torch.zeros(1))[0]).flatten()[0]
    out = torch.zeros(b, s, 4, 12)
    for i in range(b):
        for h in range(4):
            for t in range(s):
                scores = []
                for u in range(t + 1):
                    nope = q[i, t, h, :16] @ kv[i, u, h, :16]
                    rope = (turn(q[i, t, h, 16:].contiguous(), t) * size) @ (turn(k_rope[i, u].contiguous(), u) * size)
                    scores.append((nope + rope) * 24**-0.5 * ROPE.softmax_factor)
                out[i, t, h] = torch.stack(scores).softmax(0) @ kv[i, : t + 1, h, 16:]
    return mla.o_proj(out.flatten(2))


@torch.no_grad()
@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_attention_equals_the_definition(q_lora_rank):
    mla, x = attention(q_lora_rank), torch.randn(2, 7, 64)
    torch.testing.assert_close(mla(x, cos_sin(0, 7)), slow(mla, x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_token_does_not_see_the_future():
    mla, x = attention(), torch.randn(1, 10, 64)
    changed = torch.cat((x[:, :6], torch.randn(1, 4, 64)), dim=1)
    assert torch.equal(mla(x, cos_sin(0, 10))[:, :6], mla(changed, cos_sin(0, 10))[:, :6])


def test_gradients_reach_every_parameter():
    mla = attention()
    mla(torch.randn(2, 6, 64), cos_sin(0, 6)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in mla.parameters())
