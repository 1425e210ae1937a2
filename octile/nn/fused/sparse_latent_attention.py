"""Multi-head latent attention to the top-k keys of an indexer, in the absorbed form, as one function.

    forward     q' = (q · W_UK, rotary q)                    of each head; W_UK and W_UV are the rows of w_kv
                o' = softmax(scale · q' · row) · latent      over the top-k rows [latent; rotary key], which heads share
                o  = o' · W_UVᵀ
    backward    q' recomputed;  do' = do · W_UV;  dq' and the gradients of rows from q', o' and lse
                dq = dq' · W_UKᵀ;  dW_UK = qᵀ · dq';  dW_UV = doᵀ · o'

Keys and values of single heads are never computed: q · (W_UK · latent) is (q · W_UK) · latent. One launch attends from
all sequences of a batch. Time and memory grow with S · K, and not with the square of S, but for one thing: Hopper's
backward pass writes two bytes for each query and each row of the batch. q, o', lse, the rows, the list of top-k keys
and, where it is not cached, the quantized weight are saved for backward.

This is the form of `octile.serve`. So w_kv has the values by which serving multiplies: under a recipe with FP8 weights
those of the quantized weight, dequantized, and its gradient passes through the rounding. The latents are not quantized,
and the products of heads are in high precision, as are the weight's gradients, which are summed in FP32. Observers see
the quantized weight, and no GEMM of this layer.

Source: DeepSeek-V2 (arXiv 2405.04434) §2.1.2; DeepSeek-V3.2-Exp (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) §1.
Shapes: B batch, S sequence, T = B·S tokens, H heads, N channels of a head's key, R of the rotary key, X = N + R, V of a
value, C of a latent, W = C + R, K top-k keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octile.kernels.cuda.attention.sparse_mla import LATENT, ROTARY
from octile.kernels.cuda.gemm import request
from octile.nn.deferred_wgrad import parameters_of, run_or_defer
from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.double_backward import first_derivative_only
from octile.nn.fused.fusion import has_hooks
from octile.nn.fused.high_precision import into_main_grad
from octile.nn.fused.quantize import quantize_weight
from octile.nn.gathered_weight import GatheredWeight, gathered
from octile.nn.linear import Linear
from octile.nn.main_grad import check_main_grad, main_grads_of
from octile.nn.weight_cache import can_cache
from octile.ops.matmul import without_autocast
from octile.ops.operator import PLAIN_TENSORS
from octile.ops.quantize import INPUT_DTYPES
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from octile.ops.sparse_attention_weights import sparse_attention_weights
from octile.recipe import OperandFormat
from octile.scaled import ScaledTensor


class _Settings(NamedTuple):
    """The arguments that are no tensors.

    Attributes:
        nope_dim: N.
        scale: factor of the scores.
        compute: dtype of the products with w_kv.
        w_format: format of the weight that is multiplied; None: it is not quantized.
        history: the layer's amax history, of a recipe with delayed scaling.
        cache: whether the quantized weight may be cached beyond the forward pass.
        has_main_grad: whether the weight's gradient is added to its `main_grad`, if it has one.
        with_weights: whether attention's weights are computed.
    """

    nope_dim: int
    scale: float
    compute: torch.dtype
    w_format: OperandFormat | None
    history: AmaxHistory | None
    cache: bool
    has_main_grad: bool
    with_weights: bool


def why_not_absorbed(layer: nn.Module, q: Tensor, nope_dim: int) -> str | None:
    """Return why a layer for keys and values is called, so that attention is not absorbed; None: it is absorbed.

    A layer that is not exactly `torch.nn.Linear` or `octile.nn.Linear` may compute something else than a product with
    its weight, and hooks are to be called. On a GPU, where torch would gather rows, dense attention is faster.

    Args:
        layer: the layer.
        q: attention's queries [..., X].
        nope_dim: N.
    """
    if type(layer) not in (nn.Linear, Linear):
        return f"it is a {type(layer).__name__}"
    assert isinstance(layer, nn.Linear)
    if has_hooks(layer):
        return "it has hooks"
    if layer.bias is not None:
        return "it has a bias"
    if type(layer.weight) not in (*PLAIN_TENSORS, GatheredWeight):  # sharded, or quantized by another library
        return f"its weight is a {type(layer.weight).__name__}"
    if not {q.dtype, layer.weight.dtype} <= set(INPUT_DTYPES):
        return f"queries and weight are {q.dtype} and {layer.weight.dtype}"
    dims = layer.in_features, q.shape[-1] - nope_dim
    if q.is_cuda and (q.dtype, *dims) != (torch.bfloat16, LATENT, ROTARY):
        return f"no kernel reads latents of {dims[0]} + {dims[1]} channels in {q.dtype}"
    if q.is_cuda and (why := _why_no_kernels(q.device)):
        return f"the kernels do not run on this GPU: {why}"
    return None


def _why_no_kernels(device: torch.device) -> str | None:
    return request.why_not_on(device)


# torch's compiler calls it and does not trace it: `torch.compiler.assume_constant_result`, which would import it
vars(_why_no_kernels)["_dynamo_marked_constant"] = True


def sparse_latent_attention(
    q_BSHX: Tensor,
    rows_BSW: Tensor,
    layer: nn.Linear,
    top_k_BSK: Tensor,
    nope_dim: int,
    scale: float,
    with_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend from each query to its top-k keys; differentiable in q, the rows and the layer's weight.

    Args:
        q_BSHX: queries, their last R channels rotated.
        rows_BSW: normalized latents, then rotated rotary keys.
        layer: the layer for keys and values, with weight w_kv [H·(N + V), C], for which `why_not_absorbed` is None.
        top_k_BSK: int32, positions up to the query's own, each at most once; −1 stands for none.
        nope_dim: N.
        scale: the factor of the scores.
        with_weights: whether attention's weights are wanted, too.

    Returns:
        o [B, S, H, V] in q's dtype; and the mean over heads of the weights of the top-k keys, float32 [B, S, K],
        without a gradient, or None.

    Raises:
        TypeError: the weight's main_grad is not float32.
        ValueError: shapes do not fit together, or main_grad is not of the weight's shape and device.
    """
    recipe, weight = layer.recipe if isinstance(layer, Linear) else None, layer.weight
    w_format, cache, compute = None, False, q_BSHX.dtype
    if recipe is not None and recipe.formats is not None and "fprop" not in recipe.high_precision:
        w_format = recipe.formats.w
        cache = can_cache(weight, w_format, torch.is_grad_enabled() and rows_BSW.requires_grad)
    elif recipe is not None:
        compute = recipe.compute
    if recipe is not None:
        check_main_grad(weight)
    history = layer.history if isinstance(layer, Linear) else None
    s = _Settings(nope_dim, scale, compute, w_format, history, cache, recipe is not None, with_weights)
    o_BSHV, weights_BSK = _SparseLatentAttention.apply(q_BSHX, rows_BSW.to(q_BSHX.dtype), weight, top_k_BSK, s)
    return o_BSHV, weights_BSK


class _SparseLatentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSHX: Tensor, rows_BSW: Tensor, weight: Tensor, top_k_BSK: Tensor, s: _Settings
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)  # attention's weights have none
        c, h = weight.shape[1], q_BSHX.shape[2]
        quantized = None
        if s.w_format is not None and not isinstance(weight, GatheredWeight):
            quantized = quantize_weight(weight, s.w_format, s.history, s.cache, needs_dgrad=False).w
        w_k_HNC, w_v_HVC = _weights_of_heads(weight, quantized, h, s)
        rows_TW, positions_TK = rows_BSW.flatten(0, 1), _rows_of_batch(top_k_BSK)
        q_THW = _absorbed(q_BSHX.flatten(0, 1), w_k_HNC, s)
        o_THC, lse_TH = sparse_attention_with_lse(q_THW, rows_TW, positions_TK, c, s.scale)
        o_BSHV = q_BSHX.new_empty(*q_BSHX.shape[:3], w_v_HVC.shape[1])
        _multiply_heads(o_THC, w_v_HVC.mT, o_BSHV.flatten(0, 1), s.compute)
        weights_BSK = None
        if s.with_weights:
            weights_TK = sparse_attention_weights(q_THW, rows_TW, positions_TK, lse_TH, c, s.scale)
            weights_BSK = weights_TK.view(top_k_BSK.shape)
            ctx.mark_non_differentiable(weights_BSK)

        # the cache holds its quantized weights, and FSDP2 gathers its own once more
        ctx.cached = quantized if s.cache else None
        saved_weight: tuple[Tensor | None, ...] = None, None, None
        if quantized is None:
            saved_weight = weight, None, None
        elif not s.cache:
            saved_weight = None, quantized.data, quantized.scale
        ctx.save_for_backward(q_BSHX, rows_BSW, top_k_BSK, o_THC, lse_TH, *saved_weight)
        ctx.block = None if quantized is None else quantized.block
        ctx.settings, ctx.w_dtype = s, weight.dtype
        ctx.main_grads = main_grads_of((weight,)) if s.has_main_grad else ()
        ctx.parameters = parameters_of((weight,))
        return o_BSHV, weights_BSK

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, do_BSHV: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if do_BSHV is None:
            return None, None, None, None, None
        q_BSHX, rows_BSW, top_k_BSK, o_THC, lse_TH, weight, data, scale = ctx.saved_tensors
        s, (_, _, h, _), c = ctx.settings, q_BSHX.shape, o_THC.shape[-1]
        quantized = ctx.cached if data is None else ScaledTensor(data, scale, ctx.block)
        w_k_HNC, w_v_HVC = _weights_of_heads(weight, quantized, h, s)
        q_THX, do_THV = q_BSHX.flatten(0, 1), do_BSHV.flatten(0, 1)
        q_THW, do_THC = _absorbed(q_THX, w_k_HNC, s), torch.empty_like(o_THC)
        _multiply_heads(do_THV, w_v_HVC, do_THC, s.compute)
        operands = do_THC, q_THW, rows_BSW.flatten(0, 1), _rows_of_batch(top_k_BSK), o_THC, lse_TH
        dq_THW, drows_TW = sparse_attention_backward(*operands, c, s.scale)

        dq_THX = drows_BSW = dw = None
        if ctx.needs_input_grad[0]:
            dq_THX = torch.empty_like(q_THX, memory_format=torch.contiguous_format)
            _multiply_heads(dq_THW[..., :c], w_k_HNC.mT, dq_THX[..., : s.nope_dim], s.compute)
            dq_THX[..., s.nope_dim :] = dq_THW[..., c:]
        if ctx.needs_input_grad[1]:
            drows_BSW = drows_TW.to(rows_BSW.dtype).view(rows_BSW.shape)
        if ctx.needs_input_grad[2]:
            parts = (q_THX[..., : s.nope_dim], dq_THW[..., :c]), (do_THV, o_THC)
            settings = s.compute, ctx.w_dtype
            (dw,) = run_or_defer(
                ctx.parameters, ctx.main_grads, lambda main_grads: [_wgrad(parts, *settings, *main_grads)]
            )
        return None if dq_THX is None else dq_THX.view(q_BSHX.shape), drows_BSW, dw, None, None


def _weights_of_heads(
    weight: Tensor, quantized: ScaledTensor | None, n_heads: int, s: _Settings
) -> tuple[Tensor, Tensor]:
    """Return W_UK [H, N, C] and W_UV [H, V, C], with the values that are multiplied, in the dtype of the products."""
    if isinstance(weight, GatheredWeight):
        quantized = gathered(weight)
    w = weight.detach().to(s.compute) if quantized is None else quantized.dequantize(s.compute)
    w_HYC = w.unflatten(0, (n_heads, -1))
    return w_HYC[:, : s.nope_dim], w_HYC[:, s.nope_dim :]


def _rows_of_batch(top_k_BSK: Tensor) -> Tensor:
    """Return the positions [T, K] among the rows of all sequences, which lie one after the other."""
    b, s, _ = top_k_BSK.shape
    if b > 1:
        first_B11 = torch.arange(0, b * s, s, dtype=torch.int32, device=top_k_BSK.device)[:, None, None]
        top_k_BSK = torch.where(top_k_BSK < 0, top_k_BSK, top_k_BSK + first_B11)
    return top_k_BSK.flatten(0, 1)


def _absorbed(q_THX: Tensor, w_k_HNC: Tensor, s: _Settings) -> Tensor:
    """Return the queries times W_UK, then the rotary queries: [T, H, W] in q's dtype."""
    c, rope_dim = w_k_HNC.shape[2], q_THX.shape[2] - s.nope_dim
    q_THW = q_THX.new_empty(*q_THX.shape[:2], c + rope_dim)
    _multiply_heads(q_THX[..., : s.nope_dim], w_k_HNC, q_THW[..., :c], s.compute)
    q_THW[..., c:] = q_THX[..., s.nope_dim :]
    return q_THW


def _multiply_heads(a_THK: Tensor, b_HKN: Tensor, out_THN: Tensor, compute: torch.dtype) -> None:
    """Write the products of each head to out: a, cast to the dtype of b, times b, summed in FP32 and rounded once."""
    a_HTK, out_HTN = a_THK.to(compute).transpose(0, 1), out_THN.transpose(0, 1)
    if a_THK.is_cuda and out_THN.dtype == compute and not torch.compiler.is_compiling():
        with without_autocast(a_THK.device):
            torch.bmm(a_HTK, b_HKN, out=out_HTN)
    else:
        out_HTN.copy_(_bmm(a_HTK, b_HKN, out_THN.dtype))


def _bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Multiply matrices, summed in FP32; the result is in the dtype of the operands if that is wanted, or in FP32."""
    with without_autocast(a.device):
        if not a.is_cuda:
            return torch.bmm(a.float(), b.float())
        return torch.bmm(a, b) if out_dtype == a.dtype else torch.bmm(a, b, out_dtype=torch.float32)


def _wgrad(
    parts: tuple[tuple[Tensor, Tensor], ...], compute: torch.dtype, dtype: torch.dtype, main_grad: Tensor | None = None
) -> Tensor | None:
    """Return the gradient of w_kv [H·(N + V), C] in dtype, or None if it was added to main_grad.

    Args:
        parts: for W_UK and for W_UV, two operands [T, H, ·], whose products are summed over the tokens in FP32.
    """
    products = [_bmm(a.to(compute).permute(1, 2, 0), b.to(compute).transpose(0, 1), torch.float32) for a, b in parts]
    return into_main_grad(torch.cat(products, dim=1).flatten(0, 1), dtype, main_grad)
