"""Where the rows of a mixture of experts go, and what moves them there and back.

    count_tokens          how many tokens go to each expert
    routing_plan          where each token's rows go, sorted by expert, and the rows of an expert by token
    weighted_routing_plan the same of tokens that nobody has counted, and the weight of each row
    permute               copies the quantized row of a token to its K rows among those sorted by expert
    unpermute             sums the K rows of a token, times their weights if they have some
    unpermute_add_        adds these sums to rows
    unpermute_backward    the gradients of rows and weights

On a GPU the plan is a counting sort. Each program counts the experts of a block of entries, the counts are summed over
the blocks, and an entry's row is the first row of its expert plus the number of entries of the same expert before it.
Only integers are added, so the result depends on no order.

The row indices are on the device, so nothing waits for the host. Each row is written by one program, so the order of
sums is fixed. Without weights each of `permute` and `unpermute` is the gradient of the other: `permute` takes gradients
to the experts, and `unpermute` sums what they return. Where rows are quantized, the gate's weights are not applied here
but to the input of the experts' last GEMM (`octile.ops.swiglu`).

Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.3: dispatch in FP8, combine in BF16.
Shapes: T tokens, D model width, K experts per token, E experts, R = T·K rows.
"""

import torch
from torch import Tensor

from octile.formats import GEMM_FORMATS, STORAGE_DTYPES, TILE
from octile.kernels import backends
from octile.kernels.cuda.routing import launcher
from octile.kernels.memory_layout import new_scale
from octile.ops.gate import MAX_EXPERTS
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, check_scale


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
    if experts.numel():
        lowest, highest = experts.aminmax()
        if lowest < 0 or highest >= n_experts:
            raise RuntimeError(f"experts must be from 0 to {n_experts - 1}, not {lowest} to {highest}")
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


@operator()
def weighted_routing_plan(experts: Tensor, weights: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count and sort the rows of all tokens as `routing_plan` does, and sort their weights: of few rows in one kernel.

    Args:
        experts: int64 or int32 [T, K], as in `count_tokens`.
        weights: float32 [T, K], of the chosen experts.
        n_experts: E, at most 4096.

    Returns:
        row_ids [T, K], order [R] and offs [E], int32, as `routing_plan` returns them; row_weights [R] float32, the
        weight of each row.

    Raises:
        TypeError: experts or weights has another dtype.
        ValueError: experts is not a matrix, the numbers or the weights do not fit it, or they are on different devices.
        RuntimeError: on a CPU, an expert is not from 0 to n_experts − 1.
    """
    _check_weighted_plan(experts, weights, n_experts)
    return _weighted_plan(experts, weights, n_experts)


@weighted_routing_plan.register_fake
def _(experts, weights, n_experts):
    t, k = experts.shape
    plan = (experts.new_empty(shape, dtype=torch.int32) for shape in ((t, k), (t * k,), (n_experts,)))
    return *plan, weights.new_empty(t * k)


@weighted_routing_plan.register_kernel("cuda")
def _(experts, weights, n_experts):
    _check_weighted_plan(experts, weights, n_experts)
    run = _weighted_plan if launcher.why_not_weighted_plan(experts, n_experts) else launcher.weighted_routing_plan
    return run(experts, weights, n_experts)


def _weighted_plan(experts: Tensor, weights: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    row_ids, order, offs = routing_plan(experts, count_tokens(experts, n_experts)[0])
    return row_ids, order, offs, weights.flatten().index_select(0, order)


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


def _check_weighted_plan(experts: Tensor, weights: Tensor, n_experts: int) -> None:
    _check_experts(experts, n_experts)
    if weights.dtype != torch.float32:
        raise TypeError(f"weights must be float32, not {weights.dtype}")
    if weights.shape != experts.shape:
        raise ValueError(f"weights must be {list(experts.shape)} like experts, not {list(weights.shape)}")
    check_device("experts", experts, "weights", weights)


def _check_integers(name: str, t: Tensor) -> None:
    if t.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, not {t.dtype}")


@operator()
def permute(data: Tensor, scale: Tensor, row_ids: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Copy row t of a matrix in 1×128 tiles to the rows row_ids[t] of the result.

    Args:
        data: float8_e4m3fn, float8_e5m2 or int8 [T, D].
        scale: float32 [T, ⌈D/128⌉].
        row_ids: int32 [T, K], row indices, a permutation of 0 … T·K − 1.
        order: int32 [T·K], its inverse, as `routing_plan` returns both.

    Returns:
        data [T·K, D] and scale [T·K, ⌈D/128⌉], laid out as `quantize` returns them.

    Raises:
        TypeError: data, scale, row_ids or order has another dtype.
        ValueError: data or row_ids is not a matrix, or shapes or devices do not fit together.
    """
    _check_permute(data, scale, row_ids, order)
    rows = order // row_ids.shape[1]  # the token of each row of the result
    moved = data.view(torch.uint8).index_select(0, rows).view(data.dtype)
    return moved, new_scale(moved, *TILE).copy_(scale.index_select(0, rows))


@permute.register_fake
def _(data, scale, row_ids, order):
    moved = data.new_empty(row_ids.shape[0] * row_ids.shape[1], data.shape[1])
    return moved, new_scale(moved, *TILE)


@permute.register_kernel("cuda")
def _(data, scale, row_ids, order):
    from octile.kernels.triton import permute as kernel  # late: a machine without a GPU has no Triton

    _check_permute(data, scale, row_ids, order)
    return kernel.launch(data, scale, row_ids, order)


@operator()
def unpermute(y: Tensor, row_ids: Tensor, add: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Sum the rows row_ids[t] of y for each token t, in FP32: add first, then the rows in the order of row_ids.

    Args:
        y: [T·K, D], float32, bfloat16 or float16.
        row_ids: int32 [T, K], as in `permute`.
        add: [T, D] in y's dtype, to be added, such as the shared expert's output; None: zeros.
        weight: float32 [T, K], by which the rows are multiplied; None: 1.

    Returns:
        sums [T, D] in y's dtype, rounded once.

    Raises:
        TypeError: y, row_ids, add or weight has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_unpermute(y, row_ids, add, weight)
    total_TD = y.new_zeros(row_ids.shape[0], y.shape[1], dtype=torch.float32)
    if add is not None:
        total_TD.copy_(add)
    for k, row_ids_T in enumerate(row_ids.unbind(1)):
        row_TD = y.index_select(0, row_ids_T).float()
        total_TD += row_TD if weight is None else row_TD * weight[:, k, None]
    return total_TD.to(y.dtype)


@unpermute.register_fake
def _(y, row_ids, add=None, weight=None):
    return y.new_empty(row_ids.shape[0], y.shape[1])


@unpermute.register_kernel("cuda")
def _(y, row_ids, add=None, weight=None):
    from octile.kernels.triton import permute as kernel

    _check_unpermute(y, row_ids, add, weight)
    return kernel.launch_back(y, row_ids, add, weight)


@operator(writes=("x",))
def unpermute_add_(
    x: Tensor, y: Tensor, row_ids: Tensor, add: Tensor | None = None, weight: Tensor | None = None
) -> None:
    """Add `unpermute(y, row_ids, add, weight)` to x, with the bits of that sum: both are rounded.

    Args:
        x: [T, D] in y's dtype, contiguous. The result is written to it.
        y, row_ids, add, weight: as in `unpermute`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or x is not contiguous.
    """
    _check_unpermute_add(x, y, row_ids, add, weight)
    x.add_(unpermute(y, row_ids, add, weight))


@unpermute_add_.register_kernel("cuda")
def _(x, y, row_ids, add=None, weight=None):
    from octile.kernels.triton import permute as kernel

    _check_unpermute_add(x, y, row_ids, add, weight)
    kernel.launch_add(x, y, row_ids, add, weight)


@operator()
def unpermute_backward(dsum: Tensor, y: Tensor, row_ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of the rows and of the weights of `unpermute`, in FP32. That of add is dsum itself.

    Args:
        dsum: [T, D], float32, bfloat16 or float16, the gradient of the sums.
        y, row_ids, weight: as in `unpermute`.

    Returns:
        the gradient of y, [T·K, D] in y's dtype, rounded once; that of weight, float32 [T, K], each a sum over D in
        unspecified order.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_unpermute_backward(dsum, y, row_ids, weight)
    dy, dweight, dsum = y.new_empty(y.shape), weight.new_empty(weight.shape), dsum.float()
    for k, row_ids_T in enumerate(row_ids.unbind(1)):
        dy.index_copy_(0, row_ids_T.long(), (dsum * weight[:, k, None]).to(y.dtype))
        dweight[:, k] = (dsum * y.index_select(0, row_ids_T).float()).sum(1)
    return dy, dweight


@unpermute_backward.register_fake
def _(dsum, y, row_ids, weight):
    return y.new_empty(y.shape), weight.new_empty(weight.shape)


@unpermute_backward.register_kernel("cuda")
def _(dsum, y, row_ids, weight):
    from octile.kernels.triton import permute as kernel

    _check_unpermute_backward(dsum, y, row_ids, weight)
    return kernel.launch_back_backward(dsum, y, row_ids, weight)


def _check_permute(data: Tensor, scale: Tensor, row_ids: Tensor, order: Tensor) -> None:
    if data.dtype not in map(STORAGE_DTYPES.get, GEMM_FORMATS):
        raise TypeError(f"data must be float8_e4m3fn, float8_e5m2 or int8, not {data.dtype}")
    if data.dim() != 2:
        raise ValueError(f"data must be a matrix [T, D], not {tuple(data.shape)}")
    check_scale("data", data, scale, *TILE)
    _check_row_ids(row_ids, "data", data)
    if row_ids.shape[0] != data.shape[0]:
        raise ValueError(
            f"row_ids must have a row for each of the {data.shape[0]} rows of data, not {row_ids.shape[0]}"
        )
    if order.dtype != torch.int32:
        raise TypeError(f"order must be int32, not {order.dtype}")
    if order.shape != (row_ids.numel(),):
        raise ValueError(f"order must be [{row_ids.numel()}], one for each entry of row_ids, not {list(order.shape)}")
    check_device("data", data, "order", order)


def _check_unpermute_backward(dsum: Tensor, y: Tensor, row_ids: Tensor, weight: Tensor) -> None:
    _check_unpermute(y, row_ids, None, weight)
    check_input_dtype("dsum", dsum)
    _check_sums("dsum", dsum, y, row_ids)


def _check_unpermute(y: Tensor, row_ids: Tensor, add: Tensor | None, weight: Tensor | None) -> None:
    check_input_dtype("y", y)
    if y.dim() != 2:
        raise ValueError(f"y must be a matrix [T·K, D], not {tuple(y.shape)}")
    _check_row_ids(row_ids, "y", y)
    if y.shape[0] != row_ids.shape[0] * row_ids.shape[1]:
        raise ValueError(
            f"y must have a row for each of the {tuple(row_ids.shape)} entries of row_ids, not {y.shape[0]} rows"
        )
    if weight is not None:
        if weight.dtype != torch.float32:
            raise TypeError(f"weight must be float32, not {weight.dtype}")
        if weight.shape != row_ids.shape:
            raise ValueError(f"weight must be {tuple(row_ids.shape)} as row_ids, not {tuple(weight.shape)}")
        check_device("y", y, "weight", weight)
    if add is not None:
        _check_addend("add", add, y, row_ids)


def _check_unpermute_add(x: Tensor, y: Tensor, row_ids: Tensor, add: Tensor | None, weight: Tensor | None) -> None:
    _check_unpermute(y, row_ids, add, weight)
    _check_addend("x", x, y, row_ids)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, not of the strides {x.stride()}")


def _check_addend(name: str, addend: Tensor, y: Tensor, row_ids: Tensor) -> None:
    if addend.dtype != y.dtype:
        raise TypeError(f"{name} must be {y.dtype} as y, not {addend.dtype}")
    _check_sums(name, addend, y, row_ids)


def _check_sums(name: str, sums: Tensor, y: Tensor, row_ids: Tensor) -> None:
    if sums.shape != (row_ids.shape[0], y.shape[1]):
        raise ValueError(f"{name} must be {(row_ids.shape[0], y.shape[1])}, not {tuple(sums.shape)}")
    check_device("y", y, name, sums)


def _check_row_ids(row_ids: Tensor, name: str, t: Tensor) -> None:
    if row_ids.dtype != torch.int32:
        raise TypeError(f"row_ids must be int32, not {row_ids.dtype}")
    if row_ids.dim() != 2:
        raise ValueError(f"row_ids must be [T, K], not {tuple(row_ids.shape)}")
    check_device(name, t, "row_ids", row_ids)
