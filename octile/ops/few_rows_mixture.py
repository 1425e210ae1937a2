"""A mixture of experts of few rows, as decoding of one or a few requests computes it.

The result is that of the operators of many rows (`octile.ops.norm`, `gate`, `grouped`, `swiglu`), with the same values
in 8 bits; but here the experts' results are added to x in FP32 and rounded once. With few rows, reading the weights
takes all the time, and between kernels the memory is idle. So Hopper has three kernels for at most 8 rows in bfloat16,
which do not sort rows by expert, and read an expert's weight once for all rows that have chosen it. The operators of
many rows compute other calls.

Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2 and §3.3.
Shapes: T rows, D model, E experts, K chosen ones, I intermediate of an expert, S of the shared experts together.
"""

import torch
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.kernels.cuda.few_rows import mixture
from octile.kernels.memory_layout import new_scale
from octile.ops.gate import check_gate, gate
from octile.ops.grouped import grouped_matmul_nt
from octile.ops.matmul import matmul_nt
from octile.ops.norm import check_operands, rms_norm_quantize
from octile.ops.operator import operator
from octile.ops.permute import unpermute
from octile.ops.quantize import check_device, check_scale
from octile.ops.row_invariant import row_invariant_scaled_nt
from octile.ops.swiglu import swiglu_quantize

E4M3 = torch.float8_e4m3fn


@operator(writes=("x",))
def few_rows_mixture(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_weight: Tensor,
    bias: Tensor | None,
    n_chosen: int,
    n_group: int,
    topk_group: int,
    best: int,
    scoring_func: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    shared_up: Tensor | None,
    shared_up_scale: Tensor | None,
    shared_down: Tensor | None,
    shared_down_scale: Tensor | None,
    power_of_2: bool,
    row_invariant: bool = False,
) -> Tensor:
    """Add to x the mixture of its normalized rows: x + Σ weight · expert(norm(x)) + shared(norm(x)).

    An expert is down(silu(gate) · up · weight), whose gate and up are rounded to x's dtype. Its input and what `down`
    reads are quantized to E4M3 in 1×128 tiles, in FP32.

    Args:
        x: [T, D] bfloat16 or float32, contiguous. The result is written to it, rounded once.
        norm_weight, eps: as in `rms_norm_quantize`; the gate reads rows rounded to x's dtype.
        gate_weight, bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor: as
            in `gate`.
        up: float8_e4m3fn [E, 2·I, D], the rows of gate before those of up, in 128×128 blocks with up_scale
            [E, ⌈2·I/128⌉, ⌈D/128⌉] float32.
        down: float8_e4m3fn [E, D, I], with down_scale [E, ⌈D/128⌉, ⌈I/128⌉].
        shared_up, shared_down: [2·S, D] and [D, S] of the shared experts, with their scales; None: there are none. A
            GPU reads these, norm_weight and gate_weight before the previous kernel of the stream has ended, which must
            not write them.
        power_of_2: whether to round the scales of activations up to powers of two.
        row_invariant: whether a row has the bits of the operators whose rows do not depend on each other: gate, GEMMs
            and `unpermute`, whose results are rounded to x's dtype, each.

    Returns:
        experts int64 [T, K], as `gate`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, only some tensors of the shared experts are given, or the
            numbers do not fit them.
    """
    choice = n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor
    experts = up, up_scale, down, down_scale
    shared = shared_up, shared_up_scale, shared_down, shared_down_scale
    _check(x, norm_weight, gate_weight, bias, choice, experts, shared)
    return _mixture(x, norm_weight, eps, gate_weight, bias, choice, experts, shared, power_of_2, row_invariant)


@few_rows_mixture.register_fake
def _(
    x, norm_weight, eps, gate_weight, bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob,
    routed_scaling_factor, up, up_scale, down, down_scale, shared_up, shared_up_scale, shared_down, shared_down_scale,
    power_of_2, row_invariant=False,
):  # fmt: skip
    return x.new_empty(x.shape[0], n_chosen, dtype=torch.int64)


@few_rows_mixture.register_kernel("cuda")
def _(
    x, norm_weight, eps, gate_weight, bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob,
    routed_scaling_factor, up, up_scale, down, down_scale, shared_up, shared_up_scale, shared_down, shared_down_scale,
    power_of_2, row_invariant=False,
):  # fmt: skip
    experts, shared = (up, up_scale, down, down_scale), (shared_up, shared_up_scale, shared_down, shared_down_scale)
    choice = n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor
    _check(x, norm_weight, gate_weight, bias, choice, experts, shared)
    arguments = x, norm_weight, eps, gate_weight, bias, choice, experts, shared, power_of_2, row_invariant
    run = _mixture if mixture.why_unsupported(*arguments) else mixture.launch
    return run(*arguments)


def _mixture(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate_weight: Tensor,
    bias: Tensor | None,
    choice: mixture.Choice,
    experts: mixture.Weights,
    shared: mixture.SharedWeights,
    power_of_2: bool,
    row_invariant: bool,
) -> Tensor:
    up, up_scale, down, down_scale = experts
    data, scale, _, normed = rms_norm_quantize(x, norm_weight, eps, "e4m3", power_of_2, True)
    weights_TK, experts_TK, _ = gate(normed, gate_weight, bias, *choice, row_invariant)

    chosen_R = experts_TK.flatten()
    order_R = chosen_R.argsort(stable=True)
    row_R = order_R // experts_TK.shape[1]
    count_E = torch.zeros(len(up), dtype=torch.int32, device=x.device).scatter_add_(
        0, chosen_R, torch.ones_like(chosen_R, dtype=torch.int32)
    )
    offs_E = count_E.cumsum(0, dtype=torch.int32)
    rows, rows_scale = data[row_R], new_scale(data[row_R], *TILE).copy_(scale[row_R])
    dtype = x.dtype if row_invariant else torch.float32  # of what is summed

    def multiply(
        a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        operands = a, a_scale, TILE, b, b_scale, BLOCK
        if row_invariant:
            return row_invariant_scaled_nt(*operands, offs, dtype)
        return matmul_nt(*operands, dtype) if offs is None else grouped_matmul_nt(*operands, offs, dtype)

    gate_up = multiply(rows, rows_scale, up, up_scale, offs_E, x.dtype)
    h, h_scale = swiglu_quantize(*gate_up.chunk(2, dim=-1), "e4m3", power_of_2, weights_TK.flatten()[order_R])
    y_RD = multiply(h, h_scale, down, down_scale, offs_E, dtype)
    shared_TD: Tensor | None = None
    shared_up, shared_up_scale, shared_down, shared_down_scale = shared
    if shared_up is not None:
        assert shared_up_scale is not None  # `_check`
        assert shared_down is not None
        assert shared_down_scale is not None
        gate_up = multiply(data, scale, shared_up, shared_up_scale, None, x.dtype)
        h, h_scale = swiglu_quantize(*gate_up.chunk(2, dim=-1), "e4m3", power_of_2)
        shared_TD = multiply(h, h_scale, shared_down, shared_down_scale, None, dtype)
    if row_invariant:
        row_ids_TK = order_R.argsort().int().view(experts_TK.shape)
        x.add_(unpermute(y_RD, row_ids_TK, shared_TD))
        return experts_TK
    y_TKD = torch.empty_like(y_RD).index_copy_(0, order_R, y_RD).unflatten(0, experts_TK.shape)
    sum_TD = x.float() + y_TKD.sum(1)
    x.copy_(sum_TD if shared_TD is None else sum_TD.add_(shared_TD))
    return experts_TK


def _check(
    x: Tensor,
    norm_weight: Tensor,
    gate_weight: Tensor,
    bias: Tensor | None,
    choice: mixture.Choice,
    experts: mixture.Weights,
    shared: mixture.SharedWeights,
) -> None:
    """Check what the single operators would find only after work, and Hopper's kernels not at all."""
    up, up_scale, down, down_scale = experts
    shared_up, shared_up_scale, shared_down, shared_down_scale = shared
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"x must be bfloat16 or float32, not {x.dtype}")
    if x.dim() != 2 or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous matrix [T, D], not {tuple(x.shape)} with strides {x.stride()}")
    if up.dim() != 3 or up.shape[1] % 2:
        raise ValueError(f"up must be [E, 2·I, D], not {tuple(up.shape)}")
    (n_experts, both, d), i = up.shape, up.shape[1] // 2
    _check_weight("up", up, up_scale, (n_experts, both, x.shape[1]), x)
    _check_weight("down", down, down_scale, (n_experts, d, i), x)
    if len(gate_weight) != n_experts:
        raise ValueError(f"gate_weight must have the {n_experts} experts of up, not {len(gate_weight)}")
    check_operands(x, norm_weight, "norm_weight")
    n_chosen, n_group, topk_group, best, scoring_func, *_ = choice
    check_gate(x, gate_weight, bias, n_chosen, n_group, topk_group, best, scoring_func, "gate_weight")
    given = [t is not None for t in shared]
    if any(given) and not all(given):
        raise ValueError("shared_up, shared_down and their scales must be given together")
    if shared_up is None or shared_up_scale is None or shared_down is None or shared_down_scale is None:
        return
    if shared_up.dim() != 2 or len(shared_up) % 2:
        raise ValueError(f"shared_up must be [2·S, D], not {tuple(shared_up.shape)}")
    _check_weight("shared_up", shared_up, shared_up_scale, (len(shared_up), d), x)
    _check_weight("shared_down", shared_down, shared_down_scale, (d, len(shared_up) // 2), x)


def _check_weight(name: str, weight: Tensor, scale: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if weight.dtype != E4M3:
        raise TypeError(f"{name} must be {E4M3}, not {weight.dtype}")
    if weight.shape != shape:
        raise ValueError(f"{name} must be {shape}, not {tuple(weight.shape)}")
    check_scale(name, weight, scale, *BLOCK)
    check_device("x", x, name, weight)
