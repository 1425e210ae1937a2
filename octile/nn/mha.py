"""Multi-head attention with rotary positions, as dense decoders before MLA have it.

Source: Vaswani et al. (arXiv 1706.03762); RoFormer (arXiv 2104.09864).
Shapes: B batch, S sequence, T = B·S tokens, D model, H heads, X channels of a head.
"""

from torch import Tensor, nn

from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.fusion import FusableModule, Fusion, fuse_linear
from octile.nn.fused.mha import rotary_attention
from octile.nn.fused.rotary import rotate
from octile.nn.fused.shared_quantization import shared_quantization
from octile.nn.fused.text_attention import causal_attention
from octile.nn.rope import CosSin
from octile.recipe import Recipe


class MHA(FusableModule):
    """Causal multi-head attention: x [B, S, hidden_size] → [B, S, hidden_size].

    Rotary channels are adjacent pairs (`octile.nn.rope`), not two halves.

    Under a recipe that says how attention's output is saved, projections and attention are one function
    (`octile.nn.fused.mha`). Otherwise, and where a layer has hooks or was replaced, they are called one after another.

    Args:
        hidden_size: D.
        num_attention_heads: H.
        head_dim: X; D / H if not given.
    """

    fusable_layers = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, hidden_size: int, num_attention_heads: int, head_dim: int | None = None):
        super().__init__()
        self.num_heads, self.head_dim = num_attention_heads, head_dim or hidden_size // num_attention_heads
        width = self.num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden_size, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor | BlockInput, cos_sin: CosSin) -> Tensor:
        """Attend from each token to itself and those before it.

        Args:
            x_BSD: the input, or the second result of `octile.nn.pre_norm`.
            cos_sin: cosines and sines of the S positions, each [S, head_dim / 2].
        """
        x = self.fused_input(x_BSD)
        if isinstance(x, BlockInput):
            weights = [layer.weight for layer in (self.q_proj, self.k_proj, self.v_proj, self.o_proj)]
            shape = (x.shape[0], self.num_heads, self.head_dim**-0.5)
            return rotary_attention(x, cos_sin, weights, *shape, result_dtype(x.x)).view(x.shape)

        qkv = shared_quantization(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)) for t in qkv)
        o_BSHX = causal_attention(rotate(q, cos_sin), rotate(k, cos_sin), v, self.head_dim**-0.5)
        return self.o_proj(o_BSHX.flatten(-2))

    def decide_fusion(self) -> Fusion | None:
        """Return how the four projections are fused, or None if they are called one after the other."""
        return fuse_linear(self.q_proj, self.k_proj, self.v_proj, self.o_proj, can_fuse=_can_fuse)


def _can_fuse(recipe: Recipe) -> bool:
    return recipe.can_fuse_attention
