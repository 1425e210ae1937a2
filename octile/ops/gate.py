"""The expert gate: the logits of the experts in FP32, the choice of K of them, and their weights; and the gradients.

The choice of experts must not depend on rounding to 8 or 16 bits. But a GPU computes an FP32 GEMM without its tensor
cores, about fifteen times slower than one in BF16. Tensor cores multiply BF16 exactly and sum in FP32, and an FP32
number is the sum of three BF16 numbers with 8 bits each. So the FP32 operand is split into three terms, which are
multiplied in one GEMM, and the results are added:

    x · wᵀ = x · w₁ᵀ + x · w₂ᵀ + x · w₃ᵀ        w = w₁ + w₂ + w₃ exactly

That is so for finite operands; where one is infinite, a GPU's result may be NaN instead.

If both operands are FP32, as for dx, the gradient of x, the three products of the smallest terms are omitted:

    dx = dy · w = dy₁ · w₁ + dy₂ · w₁ + dy₁ · w₂ + dy₃ · w₁ + dy₂ · w₂ + dy₁ · w₃

What is omitted is at most 2⁻²⁵ of |dy| · |w|, not of dx, which is far smaller where products cancel. Over the experts
the gradients of a softmax gate sum to zero, so what the experts' weights have in common cancels. The first three
products alone would be off by up to 2⁻¹⁶ of |dy| · |w|, which is more than BF16's rounding of such a dx.

Sums are in FP32 in unspecified order, and a GPU's exponential differs from the CPU's in its last bits, by less than
2⁻²⁰ of the result for logits from −10 to 10. So the results are close to the reference but not bit for bit. Hopper's
kernel and the portable one differ, too. With up to 16 experts both accumulate the products of the first terms in the
same order, the other products in different orders: two logits are at most (1 + D/2048) · 2⁻²³ of |x| · |w| apart.

After the GEMM one kernel adds the products, and computes scores, choice and weights; before the GEMMs of the backward
pass one kernel computes the gradient of the logits and splits it. With many tokens kernels also multiply themselves, on
Hopper for up to 64 experts, elsewhere for up to 16: in forward one kernel multiplies, adds and chooses, and in backward
one reads x and writes dx. On Hopper one kernel also splits the weight for few tokens, multiplies, and chooses.

If row_invariant, one kernel of Triton multiplies, by parts of D that a second one adds where there are few tokens, and
a third one chooses. On Hopper one kernel does all that for few tokens and a weight in BF16, with the same bits.

The choice is a token's K experts with the highest scores, within its best groups of experts. Among equal scores the
expert with the lower index comes first, so that every device chooses the same experts. NaN is above all numbers.
`top_experts` is the specification: the gate's kernels choose by the same order.

Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 artificial intelligence datatype for higher-precision
computations" (arXiv 1904.06376); DeepSeek-V3 (arXiv 2412.19437) §2.1.2,
DeepSeek-V2 (arXiv 2405.04434) §2.2.2.
Shapes: T tokens, D model width, E experts, K chosen ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels import backends
from octile.kernels.cuda.gate import choice, few_rows
from octile.kernels.terms import TERMS
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype
from octile.ops.row_invariant import row_invariant_matmul_nt
from octile.routing import EPS

MAX_EXPERTS = 4096  # a token's scores must fit into one Triton program


@operator()
def gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n_chosen: int,
    n_group: int,
    topk_group: int,
    best: int,
    scoring_func: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
    row_invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the logits x · weightᵀ, choose K experts for each token, and compute their weights.

    The affinity of a token to an expert is the sigmoid of its logit, or the softmax of all its logits. Experts are
    chosen by affinity + bias; their weights are affinities, without the bias.

    Args:
        x: [T, D], float32, bfloat16 or float16; on a GPU bfloat16 is fast.
        weight: [E, D], float32, bfloat16 or float16.
        bias: [E], float32, bfloat16 or float16; None: zeros.
        n_chosen, n_group, topk_group, best: as in `top_experts`.
        scoring_func: sigmoid or softmax.
        norm_topk_prob: whether a token's affinities are divided by their sum.
        routed_scaling_factor: by which the weights are finally multiplied.
        row_invariant: whether a row has the same bits for any T, at any position, and for any dtype of the weight that
            its values fit.

    Returns:
        weights [T, K] float32, experts [T, K] int64 with the highest score first, logits [T, E] float32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, the numbers do not fit them, or scoring_func is another one.
    """
    check_gate(x, weight, bias, n_chosen, n_group, topk_group, best, scoring_func)
    logits = _row_invariant_logits(x, weight) if row_invariant else _logits(x, weight)
    settings = n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor
    return *route(logits, bias, *settings), logits


@gate.register_fake
def _(
    x, weight, bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor,
    row_invariant=False,
):  # fmt: skip
    t = x.shape[0]
    weights, logits = (x.new_empty(t, n, dtype=torch.float32) for n in (n_chosen, weight.shape[0]))
    return weights, x.new_empty(t, n_chosen, dtype=torch.int64), logits


@gate.register_flops
def _(x, weight, *_, **__):
    return 2 * x.numel() * weight.shape[0]


@gate.register_kernel("cuda")
def _(
    x, weight, bias, n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor,
    row_invariant=False,
):  # fmt: skip
    from octile.kernels.triton import gate as kernel  # late: a machine without a GPU has no Triton

    check_gate(x, weight, bias, n_chosen, n_group, topk_group, best, scoring_func)
    settings = n_chosen, n_group, topk_group, best, scoring_func, norm_topk_prob, routed_scaling_factor
    if x.dtype != torch.bfloat16:
        logits = _row_invariant_logits(x, weight) if row_invariant else _logits(x, weight)
        return kernel.launch(logits, bias, *settings, len(weight), row_invariant)
    if not row_invariant:
        return backends.run("gate", x, weight, bias, *settings)
    if few_rows.why_unsupported(x, weight, bias, *settings, row_invariant=True) is None:
        return few_rows.launch(x, weight, bias, *settings, row_invariant=True)
    products = kernel.row_invariant_products(x, weight)
    if choice.why_unsupported(products, bias, settings, len(weight)):
        return kernel.launch(products, bias, *settings, len(weight), row_invariant)
    return choice.launch(products, bias, settings, len(weight))  # as small-batch decode chooses


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(−x)); an element's bits depend on the element alone.

    torch's own function computes the elements that fill no vector, or that end a thread's share, by another exponential
    on a CPU, so that the weights of a token would depend on how many tokens there are.
    """
    return (1 + (-x).exp()).reciprocal()


def route(
    logits: Tensor,
    bias: Tensor | None,
    n_chosen: int,
    n_group: int,
    topk_group: int,
    best: int,
    scoring_func: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Choose K experts by logits [T, E] → weights [T, K], experts [T, K]; arguments as of `gate`."""
    is_sigmoid = scoring_func == "sigmoid"
    affinity = sigmoid(logits) if is_sigmoid else logits.softmax(-1)
    experts = top_experts(affinity if bias is None else affinity + bias, n_chosen, n_group, topk_group, best)
    weights = sigmoid(logits.gather(1, experts)) if is_sigmoid else affinity.gather(1, experts)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + EPS)
    return weights * routed_scaling_factor, experts


@operator()
def gate_backward(
    dweights: Tensor | None,
    dlogits: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    x: Tensor,
    weight: Tensor,
    scoring_func: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and weight.

    Args:
        dweights: [T, K] float32, the gradient of the weights; None: zeros.
        dlogits: [T, E] float32, the gradient of what else reads the logits; None: zeros.
        logits, experts: results of `gate`; the others are its arguments.

    Returns:
        dx [T, D] in x's dtype, dweight [E, D] float32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or scoring_func is not sigmoid or softmax.
    """
    _check_backward(dweights, dlogits, logits, experts, x, weight, scoring_func)
    dy = route_backward(dweights, dlogits, logits, experts, scoring_func, norm_topk_prob, routed_scaling_factor)
    return _logits_backward(dy, x, weight)


@gate_backward.register_fake
def _(dweights, dlogits, logits, experts, x, weight, scoring_func, norm_topk_prob, routed_scaling_factor):
    return x.new_empty(x.shape), x.new_empty(weight.shape, dtype=torch.float32)


@gate_backward.register_flops
def _(dweights, dlogits, logits, experts, x, weight, *_, **__):
    return 4 * x.numel() * weight.shape[0]  # the gradients of both


@gate_backward.register_kernel("cuda")
def _(dweights, dlogits, logits, experts, x, weight, scoring_func, norm_topk_prob, routed_scaling_factor):
    from octile.kernels.triton import gate as kernel

    _check_backward(dweights, dlogits, logits, experts, x, weight, scoring_func)
    settings = scoring_func, norm_topk_prob, routed_scaling_factor
    if x.dtype != torch.bfloat16:
        return _logits_backward(kernel.launch_backward(dweights, dlogits, logits, experts, *settings), x, weight)
    return backends.run("gate_backward", dweights, dlogits, logits, experts, x, weight, *settings)


def route_backward(
    dweights: Tensor | None,
    dlogits: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    scoring_func: str,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> Tensor:
    """Compute the whole gradient of the logits, [T, E]; arguments as of `gate_backward`."""
    if dweights is None:
        return torch.zeros_like(logits) if dlogits is None else dlogits
    is_sigmoid = scoring_func == "sigmoid"
    affinity = sigmoid(logits.gather(1, experts)) if is_sigmoid else logits.softmax(-1)
    chosen = affinity if is_sigmoid else affinity.gather(1, experts)
    d = dweights * routed_scaling_factor
    if norm_topk_prob:
        total = chosen.sum(-1, keepdim=True) + EPS
        d = d / total + (-d * ((chosen / total) / total)).sum(-1, keepdim=True)
    if is_sigmoid:
        d = torch.ops.aten.sigmoid_backward(d, chosen)
    dy = torch.zeros_like(logits).scatter_(1, experts, d)
    if not is_sigmoid:
        dy = torch.ops.aten._softmax_backward_data(dy, affinity, -1, logits.dtype)
    return dy if dlogits is None else dy + dlogits


@operator()
def bfloat16_terms(t: Tensor, order: list[int]) -> Tensor:
    """Split t into BF16 terms whose sum is t exactly, and stack them: the first is t rounded, each next the rest.

    Args:
        t: [M, N], float32, bfloat16 or float16.
        order: the terms, 0 to 2, that the result consists of; a term may occur repeatedly.

    Returns:
        bfloat16 [len(order) · M, N].

    Raises:
        TypeError: t has another dtype.
        ValueError: t is not a matrix, or order is empty or names another term.
    """
    _check_terms(t, order)
    rest, terms = t.float(), []
    for _ in range(TERMS):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return torch.cat([terms[i] for i in order])


@bfloat16_terms.register_fake
def _(t, order):
    return t.new_empty(len(order) * t.shape[0], t.shape[1], dtype=torch.bfloat16)


@bfloat16_terms.register_kernel("cuda")
def _(t, order):
    from octile.kernels.triton import gate as kernel

    _check_terms(t, order)
    return kernel.launch_terms(t, order)


def _row_invariant_logits(x: Tensor, weight: Tensor) -> Tensor:
    return row_invariant_matmul_nt(x[None], weight[None].float(), torch.float32)[0]


def _logits(x: Tensor, weight: Tensor) -> Tensor:
    with without_autocast(x.device):
        return F.linear(x.float(), weight.float())


def _logits_backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    with without_autocast(dy.device):
        return (dy @ weight.float()).to(x.dtype), dy.mT @ x.float()


def check_gate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n_chosen: int,
    n_group: int,
    topk_group: int,
    best: int,
    scoring_func: str,
    name: str = "weight",
) -> None:
    """Raise TypeError or ValueError if arguments of `gate`, whose weight has this name, do not fit together."""
    _check_operands(x, weight, scoring_func, name)
    check_choice(name, weight.shape[0], n_chosen, n_group, topk_group, best)
    if bias is not None:
        check_input_dtype("bias", bias)
        _check_shape("bias", bias, (len(weight),), x)


def _check_backward(
    dweights: Tensor | None,
    dlogits: Tensor | None,
    logits: Tensor,
    experts: Tensor,
    x: Tensor,
    weight: Tensor,
    scoring_func: str,
) -> None:
    _check_operands(x, weight, scoring_func)
    t, n_experts = len(x), len(weight)
    _check_float32("logits", logits, (t, n_experts), x)
    if experts.dtype != torch.int64:
        raise TypeError(f"experts must be int64, not {experts.dtype}")
    if experts.dim() != 2 or len(experts) != t or not 1 <= experts.shape[1] <= n_experts:
        raise ValueError(f"experts must be [{t}, K] with K from 1 to {n_experts}, not {tuple(experts.shape)}")
    check_device("x", x, "experts", experts)
    if dweights is not None:
        _check_float32("dweights", dweights, tuple(experts.shape), x)
    if dlogits is not None:
        _check_float32("dlogits", dlogits, (t, n_experts), x)


def _check_operands(x: Tensor, weight: Tensor, scoring_func: str, name: str = "weight") -> None:
    for matrix, t in (("x", x), (name, weight)):
        check_input_dtype(matrix, t)
        if t.dim() != 2:
            raise ValueError(f"{matrix} must be a matrix, not {tuple(t.shape)}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} must end in the D = {weight.shape[1]} of {name} {tuple(weight.shape)}")
    check_device("x", x, name, weight)
    check_scoring(scoring_func)


def check_scoring(scoring_func: str) -> None:
    """Raise ValueError if scoring_func is not sigmoid or softmax."""
    if scoring_func not in ("sigmoid", "softmax"):
        raise ValueError(f"scoring_func must be sigmoid or softmax, not {scoring_func!r}")


def _check_float32(name: str, t: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if t.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {t.dtype}")
    _check_shape(name, t, shape, x)


def _check_shape(name: str, t: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if t.shape != shape:
        raise ValueError(f"{name} must be {shape}, not {tuple(t.shape)}")
    check_device("x", x, name, t)


def _check_terms(t: Tensor, order: list[int]) -> None:
    check_input_dtype("t", t)
    if t.dim() != 2:
        raise ValueError(f"t must be a matrix, not {tuple(t.shape)}")
    if not order or not all(0 <= i < TERMS for i in order):
        raise ValueError(f"order must name terms from 0 to {TERMS - 1}, not be {order}")


def top_experts(scores: Tensor, n_chosen: int, n_group: int, topk_group: int, best: int) -> Tensor:
    """Choose the experts with the highest scores.

    Args:
        scores: [T, E] float32, E at most 4096.
        n_chosen: K, at most the experts of `topk_group` groups.
        n_group: groups of equally many consecutive experts.
        topk_group: groups from which a token's experts come: those with the highest sums of their best scores.
        best: 1 or 2, how many scores of a group are summed; at most its experts.

    Returns:
        experts [T, K] int64, the highest score first.

    Raises:
        TypeError: scores has another dtype.
        ValueError: scores is not a matrix, or the numbers do not fit it or each other.
    """
    _check_scores(scores, n_chosen, n_group, topk_group, best)
    if topk_group < n_group:
        scores_TGe = scores.unflatten(1, (n_group, -1))
        group_TG = scores_TGe.sort(dim=-1, descending=True).values[..., :best].sum(-1)
        groups_TI = _highest(group_TG, topk_group).sort(dim=-1).values  # in order, so that ties go to the lower expert
        group = scores_TGe.shape[-1]
        experts_TS = (groups_TI[..., None] * group + torch.arange(group, device=scores.device)).flatten(1)
        return experts_TS.gather(1, _highest(scores.gather(1, experts_TS), n_chosen))
    return _highest(scores, n_chosen)


def _highest(scores: Tensor, n: int) -> Tensor:
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :n].contiguous()


def _check_scores(scores: Tensor, n_chosen: int, n_group: int, topk_group: int, best: int) -> None:
    if scores.dtype != torch.float32:
        raise TypeError(f"scores must be float32, not {scores.dtype}")
    if scores.dim() != 2:
        raise ValueError(f"scores must be a matrix [T, E] with E from 1 to {MAX_EXPERTS}, not {tuple(scores.shape)}")
    check_choice("scores", scores.shape[1], n_chosen, n_group, topk_group, best)


def check_choice(name: str, experts: int, n_chosen: int, n_group: int, topk_group: int, best: int) -> None:
    """Raise ValueError unless so many experts, those of a tensor of this name, can be chosen from in this way."""
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"{name} must have from 1 to {MAX_EXPERTS} experts, not {experts}")
    if n_group < 1 or experts % n_group:
        raise ValueError(f"n_group must divide the {experts} experts of {name}, not be {n_group}")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group must be from 1 to n_group, {n_group}, not {topk_group}")
    group = experts // n_group
    if not 1 <= n_chosen <= topk_group * group:
        raise ValueError(f"n_chosen must be from 1 to {topk_group * group}, not {n_chosen}")
    if best not in (1, 2) or best > group:
        raise ValueError(f"best must be 1 or 2 and at most the {group} experts of a group, not {best}")
