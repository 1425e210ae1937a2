"""Multi-head latent attention (MLA): the keys and values of all heads from one small vector a token.

    latent = RMSNorm(W_kva · x)     512 numbers, and beside them 64 of a rotary key that all heads share
    k, v   = W_kvb · latent         128 + 128 numbers a head, made anew wherever they are needed

Only the latent is cached.  The same attention has two forms:

    naive      makes k and v and attends as usual: the fewest operations where many queries share the keys, as in
               training and in reading a prompt
    absorbed   moves W_kvb to the other side of both products, (q · W_k) · latent instead of q · (W_k · latent), and
               attends to the latents themselves: for decoding, where reading the cache is what takes the time

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1, DeepSeek-V3 (arXiv 2412.19437) §2.1.1.
Shapes: B batch, S new tokens, T tokens so far, D model, H heads, C latent, R rotary key, N the rest of a head's key,
V a head's value, W = C + R.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import read
from octile.nn.fused.layers import common_recipe, fusable_norm
from octile.nn.fused.mla import Heads, latent_attention
from octile.nn.fused.projections import projections
from octile.nn.fused.shared_quantization import shared_quantization
from octile.nn.norm import RMSNorm
from octile.nn.rope import CosSin, rotate
from octile.recipe import Recipe


class LatentCache:
    """Latents and rotary keys of every layer in one tensor: data [layers, B, T_max, W], `length` tokens in use.

    A model reads a layer's part with `cache[layer]` and moves `length` on when all layers have written.
    """

    def __init__(
        self,
        n_layers: int,
        batch: int,
        max_length: int,
        latent_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.data = torch.zeros(n_layers, batch, max_length, latent_dim, device=device, dtype=dtype)
        self.length = 0

    def __getitem__(self, layer: int) -> "LayerCache":
        return LayerCache(self.data[layer], self.length)

    def check(self, tokens_BS: Tensor) -> None:
        """Raises ValueError unless these tokens fit behind those already there."""
        _, batch, max_length, _ = self.data.shape
        if tokens_BS.shape[0] != batch:
            raise ValueError(f"tokens have batch {tokens_BS.shape[0]}, but the cache was made for {batch}")
        if self.length + tokens_BS.shape[1] > max_length:
            raise ValueError(
                f"{tokens_BS.shape[1]} tokens do not fit into the cache: {self.length} of {max_length} are in use"
            )


class LayerCache:
    """One layer's part of a cache: data [B, T_max, W], of which the first `length` are in use."""

    def __init__(self, data_BTW: Tensor, length: int):
        self.data_BTW, self.length = data_BTW, length

    def append(self, new_BSW: Tensor) -> Tensor:
        """Writes new tokens behind the others and returns all of them [B, T, W]."""
        end = self.length + new_BSW.shape[1]
        self.data_BTW[:, self.length : end] = new_BSW
        return self.data_BTW[:, :end]


class MLA(nn.Module):
    """Causal multi-head latent attention; parameters are named as in the published checkpoints.

    Args:
        hidden_size: D.
        num_attention_heads: H.
        q_lora_rank: rank of the compressed queries; None projects them directly.
        kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, v_head_dim: C, R, N, V.
        softmax_factor: by how much YaRN sharpens the softmax.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        softmax_factor: float = 1.0,
    ):
        super().__init__()
        self.latent_split = [kv_lora_rank, qk_rope_head_dim]
        self.q_split = [qk_nope_head_dim, qk_rope_head_dim]
        self.kv_split = [qk_nope_head_dim, v_head_dim]
        self.num_heads = num_attention_heads
        self.softmax_scale = softmax_factor * sum(self.q_split) ** -0.5

        q_dim = num_attention_heads * sum(self.q_split)
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, q_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank)
            self.q_b_proj = nn.Linear(q_lora_rank, q_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, sum(self.latent_split), bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_attention_heads * sum(self.kv_split), bias=False)
        self.o_proj = nn.Linear(num_attention_heads * v_head_dim, hidden_size, bias=False)

    def forward(
        self,
        x_BSD: Tensor,
        cos_sin: CosSin,
        cache: LayerCache | None = None,
        norm: RMSNorm | None = None,
        residual: bool = False,
    ) -> Tensor:
        """Attends from S new tokens to themselves and, with a cache, to the tokens before them: [B, S, D].

        Args:
            norm: applied to x first; of both only x is then kept for the backward pass.
            residual: adds x to the result.
        """
        recipe = self._fused_recipe()
        if recipe is not None and cache is None and fusable_norm(norm):
            return self._fused(x_BSD, cos_sin, norm, residual, recipe)
        y_BSD = self._in_steps(x_BSD if norm is None else norm(x_BSD), cos_sin, cache)
        return x_BSD + y_BSD if residual else y_BSD

    def _in_steps(self, x_BSD: Tensor, cos_sin: CosSin, cache: LayerCache | None) -> Tensor:
        q_BSHX, latent_BSW = self._projections(x_BSD)
        q_nope_BSHN, q_rope_BSHR = q_BSHX.split(self.q_split, dim=-1)
        q_rope_BSHR = rotate(q_rope_BSHR, cos_sin)
        latent_BSC, k_rope_BSR = latent_BSW.split(self.latent_split, dim=-1)
        latent_BSC = self.kv_a_layernorm(latent_BSC)
        k_rope_BSR = rotate(k_rope_BSR[:, :, None], cos_sin)[:, :, 0]

        if cache is not None:
            cached_BTW = cache.append(torch.cat((latent_BSC, k_rope_BSR), dim=-1))
        if cache is None or cache.length == 0:
            o_BSHV = self._naive(q_nope_BSHN, q_rope_BSHR, latent_BSC, k_rope_BSR)
        else:
            o_BSHV = self._absorbed(q_nope_BSHN, q_rope_BSHR, cached_BTW)
        return self.o_proj(o_BSHV.flatten(-2))

    def _fused_recipe(self) -> Recipe | None:
        """The recipe, where attention and the layers around it are one function under it."""
        compressed = hasattr(self, "q_a_proj")
        of_q = [self.q_a_proj, self.q_b_proj] if compressed else [self.q_proj]
        norms = [self.kv_a_layernorm, *([self.q_a_layernorm] if compressed else [])]
        recipe = common_recipe(*of_q, self.kv_a_proj_with_mqa, self.kv_b_proj, self.o_proj)
        fuses = recipe is not None and recipe.can_fuse_attention and all(fusable_norm(norm) for norm in norms)
        return recipe if fuses else None

    def _fused(self, x_BSD: Tensor, cos_sin: CosSin, norm: RMSNorm | None, residual: bool, recipe: Recipe) -> Tensor:
        assert recipe.formats is not None
        how, dtype = recipe.formats.x, result_dtype(x_BSD)
        x = read(x_BSD.flatten(0, 1), how, norm)
        if hasattr(self, "q_a_proj"):
            down = [self.q_a_proj.weight, self.kv_a_proj_with_mqa.weight]
            q_TK, latent_TW = projections(x, down, recipe, dtype)
            x_q, w_q = read(q_TK, how, self.q_a_layernorm), self.q_b_proj.weight
        else:
            (latent_TW,) = projections(x, [self.kv_a_proj_with_mqa.weight], recipe, dtype)
            x_q, w_q = x, self.q_proj.weight
        latent_TC, k_rope_TR = latent_TW.split(self.latent_split, dim=-1)
        x_kv = read(latent_TC, how, self.kv_a_layernorm)
        weights = (w_q, self.kv_b_proj.weight, self.o_proj.weight)
        nope_dim, rope_dim = self.q_split
        heads = Heads(len(x_BSD), self.num_heads, nope_dim, rope_dim, self.kv_split[1], self.softmax_scale)
        y_TD = latent_attention(x_q, x_kv, k_rope_TR, cos_sin, *weights, heads, recipe, dtype)
        y_TD = x.residual + y_TD if residual else y_TD
        return y_TD.view(*x_BSD.shape[:-1], -1)

    def _projections(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The queries [B, S, H, N + R], and the latents with the rotary key beside them [B, S, W]."""
        compressed = hasattr(self, "q_a_proj")
        q, latent_BSW = shared_quantization(
            x_BSD, self.q_a_proj if compressed else self.q_proj, self.kv_a_proj_with_mqa
        )
        if compressed:
            q = self.q_b_proj(self.q_a_layernorm(q))
        return q.unflatten(-1, (self.num_heads, -1)), latent_BSW

    def _naive(self, q_nope_BSHN: Tensor, q_rope_BSHR: Tensor, latent_BSC: Tensor, k_rope_BSR: Tensor) -> Tensor:
        kv_BSHX = self.kv_b_proj(latent_BSC).unflatten(-1, (self.num_heads, -1))
        k_nope_BSHN, v_BSHV = kv_BSHX.split(self.kv_split, dim=-1)
        k_rope_BSHR = k_rope_BSR[:, :, None].expand(-1, -1, self.num_heads, -1)
        q_BHSX = torch.cat((q_nope_BSHN, q_rope_BSHR), dim=-1).transpose(1, 2)
        k_BHSX = torch.cat((k_nope_BSHN, k_rope_BSHR), dim=-1).transpose(1, 2)
        o_BHSV = F.scaled_dot_product_attention(
            q_BHSX, k_BHSX, v_BSHV.transpose(1, 2), is_causal=True, scale=self.softmax_scale
        )
        return o_BHSV.transpose(1, 2)

    def _absorbed(self, q_nope_BSHN: Tensor, q_rope_BSHR: Tensor, cached_BTW: Tensor) -> Tensor:
        # kv_b_proj is taken as it is, in no 8-bit format: its product with the latents is never made
        w_HXC = self.kv_b_proj.weight.to(q_nope_BSHN.dtype).unflatten(0, (self.num_heads, -1))
        w_k_HNC, w_v_HVC = w_HXC.split(self.kv_split, dim=1)
        cached_BTW = cached_BTW.to(q_nope_BSHN.dtype)
        latent_BTC = cached_BTW[..., : w_HXC.shape[-1]]

        q_BSHW = torch.cat((torch.einsum("bshn,hnc->bshc", q_nope_BSHN, w_k_HNC), q_rope_BSHR), dim=-1)
        score_BHST = torch.einsum("bshw,btw->bhst", q_BSHW, cached_BTW).float() * self.softmax_scale
        s, t = score_BHST.shape[-2:]
        future_ST = torch.ones(s, t, dtype=torch.bool, device=score_BHST.device).triu(t - s + 1)
        weight_BHST = score_BHST.masked_fill(future_ST, float("-inf")).softmax(-1).to(latent_BTC.dtype)
        o_BSHC = torch.einsum("bhst,btc->bshc", weight_BHST, latent_BTC)
        return torch.einsum("bshc,hvc->bshv", o_BSHC, w_v_HVC)
