"""The plan of a mixture of experts: how many tokens go to each expert, and where each token's rows go.

Rows are sorted by expert, and the rows of an expert by token. On a GPU it is a counting sort. Each program counts the
experts of a block of entries, the counts are summed over the blocks, and an entry's row is the first row of its expert
plus the number of entries of the same expert before it. Only integers are added, so the result depends on no order.

Shapes: T tokens, K experts per token, E experts, R = T·K rows.
"""

import torch
from torch import Tensor

from octile.kernels import backends
from octile.ops.operator import operator
from octile.ops.quantize import check_device
from octile.ops.top_experts import MAX_EXPERTS


@operator()
def count_tokens(experts: Tensor, n_experts: int, batch: int = 1) -> Tensor:
    """Count the tokens of each of `batch` equally long sequences that go to each expert.

    Args:
        experts: int64 or int32 [T, K], from 0 to n_experts − 1; on a GPU others count as the nearest of these.
        n_experts: E, at most 4096.
        batch: number of sequences; divides T.

    Returns:
        counts [batch, E] int64.

    Raises:
        TypeError: experts has another dtype.
        ValueError: experts is not a matrix, or the numbers do not fit it.
        RuntimeError: on a CPU, an expert is not from 0 to n_experts − 1.
    """
    _check_experts(experts, n_experts)
    _check_batch(experts, batch)
    sequence_T = torch.arange(len(experts), device=experts.device) // max(len(experts) // batch, 1)
    index_X = (experts + sequence_T[:, None] * n_experts).flatten()  # one dimension: summed in a fixed order
    zeros_X = index_X.new_zeros(batch * n_experts)
    return zeros_X.scatter_add_(0, index_X, torch.ones_like(index_X)).view(batch, n_experts)


@count_tokens.register_fake
def _(experts, n_experts, batch=1):
    return experts.new_empty(batch, n_experts, dtype=torch.int64)


@count_tokens.register_kernel("cuda")
def _(experts, n_experts, batch=1):
    _check_experts(experts, n_experts)
    _check_batch(experts, batch)
    return backends.run("count_tokens", experts, n_experts, batch)


@operator()
def routing_plan(experts: Tensor, load: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of all tokens by expert, then by token.

    Args:
        experts: int64 or int32 [T, K], as in `count_tokens`.
        load: int64 or int32 [E], the number of tokens of each expert, as `count_tokens` returns it.

    Returns:
        row_ids [T, K], the row of each entry of experts; order [R], its inverse; offs [E], the end of each expert's
        rows; all int32.

    Raises:
        TypeError: experts or load has another dtype.
        ValueError: experts is not a matrix, load is not a vector, or they are on different devices.
    """
    _check_plan(experts, load)
    order = experts.flatten().argsort(stable=True)
    return inverse(order).view(experts.shape), order.to(torch.int32), load.cumsum(0).to(torch.int32)


@routing_plan.register_fake
def _(experts, load):
    t, k = experts.shape
    return tuple(experts.new_empty(shape, dtype=torch.int32) for shape in ((t, k), (t * k,), (load.shape[0],)))


@routing_plan.register_kernel("cuda")
def _(experts, load):
    _check_plan(experts, load)
    return backends.run("routing_plan", experts, load)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 [R]: int32 [R]."""
    rows = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return torch.empty_like(rows).scatter_(0, order, rows)


def _check_experts(experts: Tensor, n_experts: int) -> None:
    _check_integers("experts", experts)
    if experts.dim() != 2 or not experts.shape[1]:
        raise ValueError(f"experts must be a matrix [T, K] with K of at least 1, not {tuple(experts.shape)}")
    if not 1 <= n_experts <= MAX_EXPERTS:
        raise ValueError(f"the number of experts must be from 1 to {MAX_EXPERTS}, not {n_experts}")


def _check_batch(experts: Tensor, batch: int) -> None:
    if batch < 1 or len(experts) % batch:
        raise ValueError(f"batch must divide the {len(experts)} tokens of experts, not be {batch}")


def _check_plan(experts: Tensor, load: Tensor) -> None:
    _check_integers("load", load)
    if load.dim() != 1:
        raise ValueError(f"load must be [E], not {tuple(load.shape)}")
    _check_experts(experts, load.shape[0])
    check_device("experts", experts, "load", load)


def _check_integers(name: str, t: Tensor) -> None:
    if t.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, not {t.dtype}")
