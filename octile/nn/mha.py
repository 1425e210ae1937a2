"""Multi-head attention with rotary positions, as the dense decoders before MLA have it.

Under a recipe that says how attention's output is kept, norm, projections and attention are one function
(`rotary_attention.py`). Otherwise, and where a layer has hooks or was replaced, they are called one after the other.

Source: Vaswani et al. (arXiv 1706.03762); RoFormer (arXiv 2104.09864).
Shapes: B batch, S sequence, T = B·S tokens, D model, H heads, X channels of a head.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import read
from octile.nn.fused.layers import common_recipe, fusable_norm
from octile.nn.fused.mha import rotary_attention
from octile.nn.fused.shared_quantization import shared_quantization
from octile.nn.norm import RMSNorm
from octile.nn.rope import CosSin, rotate
from octile.recipe import Recipe


class MHA(nn.Module):
    """Causal multi-head attention: x [B, S, hidden_size] → [B, S, hidden_size].

    Rotary channels stand in pairs side by side (`octile.nn.rope`), not in two halves.

    Args:
        hidden_size: D.
        num_attention_heads: H.
        head_dim: X; D / H if not given.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, head_dim: int | None = None):
        super().__init__()
        self.num_heads, self.head_dim = num_attention_heads, head_dim or hidden_size // num_attention_heads
        width = self.num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_sin: CosSin, norm: RMSNorm | None = None, residual: bool = False) -> Tensor:
        """Attention of x, or of norm(x), of which only x is then kept for the backward pass.

        Args:
            cos_sin: of the S positions, each [S, head_dim / 2].
            residual: adds x to the result.
        """
        recipe = self._fused_recipe()
        if recipe is not None and recipe.formats is not None and fusable_norm(norm):
            x = read(x_BSD.flatten(0, 1), recipe.formats.x, norm)
            weights = [layer.weight for layer in (self.q_proj, self.k_proj, self.v_proj, self.o_proj)]
            shape = (len(x_BSD), self.num_heads, self.head_dim**-0.5)
            y_TD = rotary_attention(x, cos_sin, weights, *shape, recipe, result_dtype(x_BSD))
            return (x.residual + y_TD if residual else y_TD).view_as(x_BSD)
        y_BSD = self._in_steps(x_BSD if norm is None else norm(x_BSD), cos_sin)
        return x_BSD + y_BSD if residual else y_BSD

    def _in_steps(self, x_BSD: Tensor, cos_sin: CosSin) -> Tensor:
        qkv = shared_quantization(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in qkv)
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, cos_sin), rotate(k, cos_sin), v))
        o_BHSX = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o_BHSX.transpose(1, 2).flatten(-2))

    def _fused_recipe(self) -> Recipe | None:
        recipe = common_recipe(self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        return recipe if recipe is not None and recipe.can_fuse_attention else None
