"""Launcher of Hopper's choice of experts by logits, for gates whose rows do not depend on each other.

Small-batch decode chooses with the same code (`octile.kernels.cuda.few_rows.mixture`), and so to the same bits.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.launch import overlaps
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel, address_of
from octile.routing import EPS

MAX_EXPERTS, MAX_CHOSEN, MAX_GROUPS = 256, 32, 32
WARPS = 8  # of a thread block, each of which has a row
MAX_KEYS = 1024

Choice = tuple[int, int, int, int, str, bool, float]  # as `octile.ops.gate.gate` takes it, from n_chosen on

_prepared: BoundedCache[PreparedKernel] = BoundedCache(MAX_KEYS)


def why_unsupported(products: Tensor, bias: Tensor | None, choice: Choice, n_experts: int) -> str | None:
    """Return why this kernel does not choose experts by products; None: it does. Arguments as of `launch`."""
    if (why := why_too_many(n_experts, choice)) is not None:
        return why
    if not products.is_contiguous() or not products.numel():
        return "the products are empty, or not contiguous"
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return "the bias is not float32, or not contiguous"
    return request.why_not_on(products.device)


def why_too_many(n_experts: int, choice: Choice) -> str | None:
    """Return why a warp does not choose from so many experts; None: it does."""
    n_chosen, n_group = choice[:2]
    if n_experts > MAX_EXPERTS or n_chosen > MAX_CHOSEN or n_group > MAX_GROUPS:
        return f"{n_experts} experts, {n_chosen} chosen or {n_group} groups are too many"
    return None


def launch(products: Tensor, bias: Tensor | None, choice: Choice, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Add the parts of products [T, P·E] float32, and choose K experts of each row.

    Returns:
        weights [T, K] float32, experts [T, K] int64, logits [T, E] float32.
    """
    (t, columns), n_chosen, factor = products.shape, choice[0], choice[-1]
    key = t, columns, n_experts, choice[:-1], bias is None, overlaps(), products.device
    prepared = _prepared[key]
    if prepared is None:
        kernel = specialize.load("choose_experts", plan(columns, n_experts, choice, bias is not None), products.device)
        prepared = _prepared[key] = PreparedKernel(kernel, -(-t // WARPS), 1, 32 * WARPS, 0, overlaps())
    weights = products.new_empty(t, n_chosen)
    experts = products.new_empty(t, n_chosen, dtype=torch.int64)
    logits = products if columns == n_experts else products.new_empty(t, n_experts)
    results = logits.data_ptr(), weights.data_ptr(), experts.data_ptr()
    prepared.launch_at((products.data_ptr(), address_of(bias), *results, factor, EPS, t))()
    return weights, experts, logits


def plan(columns: int, n_experts: int, choice: Choice, biased: bool) -> dict[str, int | bool]:
    """Return the constants of the kernel for products of so many columns."""
    made = {"parts": columns // n_experts, "warps": WARPS, "shared_bytes": 0, "programmatic": overlaps()}
    return constants(n_experts, *choice[:-1], biased) | made


def constants(
    n_experts: int, n_chosen: int, n_group: int, topk_group: int, best: int, scoring_func: str, norm_topk_prob: bool,
    biased: bool,
) -> dict[str, int | bool]:  # fmt: skip
    """Return the constants by which choice.cuh chooses."""
    return {
        "experts": n_experts, "chosen": n_chosen, "groups": n_group, "top_groups": topk_group, "best": best,
        "softmax": scoring_func == "softmax", "normalize": norm_topk_prob, "biased": biased,
    }  # fmt: skip
