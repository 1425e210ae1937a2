"""Checks of the arguments of DeepGEMM's functions, and conversion of pairs (data, scale) to operands in blocks.

A recipe (gran_m, gran_n, gran_k) gives a one scale per gran_m × gran_k block and b one per gran_n × gran_k block.
recipe_a and recipe_b give them separately, as (rows, gran_k).  The default is 1×128 and 128×128.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from functools import wraps
from operator import index
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from octile.ops.matmul import OUT_DTYPES, check_operand, check_pair, has_overlap
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import PER_INT, unpack_ue8m0

ROWS = {"a": "M", "b": "N"}  # of each operand
Pair = tuple[Tensor, Tensor]
Recipe = tuple[int, int, int]
Block = tuple[int, int]
Gemm = TypeVar("Gemm", bound=Callable[..., None])


class ConvertedOperand(NamedTuple):
    """An operand as octile's operators take it: data, FP32 scales, and the rows and columns of a block."""

    data: Tensor
    scale: Tensor
    block: Block


def operands(
    a: Pair,
    b: Pair,
    recipe: Recipe | None,
    recipe_a: Block | None,
    recipe_b: Block | None,
    dims: tuple[int, int] = (2, 2),
) -> tuple[ConvertedOperand, ConvertedOperand]:
    """Convert a and b to operands, and check everything that does not depend on d.

    Args:
        a, b: (data, scale).
        recipe, recipe_a, recipe_b: the blocks, see above.
        dims: the number of dimensions that a and b must have.

    Raises:
        TypeError: an operand is not a pair, its data not E4M3, or its scale neither float32 nor int32 (packed UE8M0).
        ValueError: shapes, scales, recipes or devices do not fit.
    """
    check_pairs(a, b)
    block_a, block_b = _blocks(b, recipe, recipe_a, recipe_b)
    left, right = _operand("a", a, block_a, dims[0]), _operand("b", b, block_b, dims[1])
    check_pair(left.data, right.data, torch.float32)
    return left, right


def check_pairs(a: Pair, b: Pair) -> None:
    """Check that a and b are pairs of tensors.

    Raises:
        TypeError: one is not.
    """
    for name, pair in (("a", a), ("b", b)):
        check_pair_form(name, pair)
        check_tensor(f"{name}'s data", pair[0])
        check_tensor(f"{name}'s scale", pair[1])


def check_pair_form(name: str, pair: object) -> None:
    """Check that an argument called `name` is a tuple or list of two.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(pair, tuple | list):
        raise TypeError(f"{name} must be a pair (data, scale), not {type(pair).__name__}")
    if len(pair) != 2:
        raise TypeError(f"{name} must be a pair (data, scale), not a {type(pair).__name__} of {len(pair)}")


def _blocks(b: Pair, recipe: Recipe | None, recipe_a: Block | None, recipe_b: Block | None) -> tuple[Block, Block]:
    """Return the blocks that a recipe, or recipe_a and recipe_b, give a and b."""
    if (recipe_a is None) != (recipe_b is None):
        raise ValueError("recipe_a and recipe_b must be given both or not at all")
    if recipe is not None and recipe_a is not None:
        raise ValueError("recipe must not be given together with recipe_a and recipe_b")
    if recipe_a is not None and recipe_b is not None:
        rows_a, columns_a = checked_recipe("recipe_a", recipe_a, "(rows, gran_k)")
        rows_b, columns_b = checked_recipe("recipe_b", recipe_b, "(rows, gran_k)")
        return (rows_a, columns_a), (rows_b, columns_b)
    if recipe is not None:
        gran_m, gran_n, gran_k = checked_recipe("recipe", recipe, "(gran_m, gran_n, gran_k)")
    else:
        gran_m, gran_n, gran_k = 1, 1 if b[1].dtype == torch.int32 else 128, 128
    return (gran_m, gran_k), (gran_n, gran_k)


def checked_recipe(name: str, recipe: Sequence[int], form: str) -> tuple[int, ...]:
    """Return a recipe, after a check that it has as many positive integers as its form.

    Raises:
        TypeError, ValueError: it does not.
    """
    extents = checked_integers(name, recipe, f"{form} in integers")
    if len(extents) != form.count(",") + 1:
        raise ValueError(f"{name} must be {form}, not {extents}")
    if min(extents) < 1:
        raise ValueError(f"{name} must be of extents of at least 1, not {extents}")
    return extents


def checked_integers(name: str, values: Sequence[int], form: str) -> tuple[int, ...]:
    """Return an argument called `name` as integers of Python; NumPy's are taken, too.

    Raises:
        TypeError: it is not a sequence of integers. `form` says what it must be.
    """
    try:
        return tuple(checked_integer(name, value) for value in values)
    except TypeError:
        raise TypeError(f"{name} must be {form}, not {values!r}") from None


def checked_integer(name: str, value: int) -> int:
    """Return an argument called `name` as an integer of Python; NumPy's are taken, too.

    Raises:
        TypeError: it is not an integer. Tensors are refused, since those on a GPU would be read back.
    """
    if not isinstance(value, bool | Tensor):
        try:
            return index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an integer, not {value!r}")


def _operand(name: str, pair: Pair, block: Block, ndim: int) -> ConvertedOperand:
    """Check one operand; unpack its scales if they are packed."""
    data, scale = pair
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}; FP4 (two values in an int8) is not supported")
    if data.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not the shape {tuple(data.shape)}")
    if scale.dtype not in (torch.float32, torch.int32):
        raise TypeError(f"{name}'s scale must be float32, or int32 (packed UE8M0), not {scale.dtype}")
    if scale.dtype == torch.int32:
        if block[0] != 1:
            raise ValueError(f"{name}'s packed scales must be one per row, not one per {block[0]} rows")
        columns = -(-data.shape[-1] // block[1])
        packed = (*data.shape[:-1], -(-columns // PER_INT))
        if tuple(scale.shape) != packed:
            raise ValueError(f"{name}'s scale must be {packed} where it is packed, not {tuple(scale.shape)}")
        scale = unpack_ue8m0(scale, columns)
    check_operand(name, data, scale, block, ndim)
    return ConvertedOperand(data, scale, block)


def transposed_form(gemm: Gemm, name: str, transposed: str, compiled_dims: str | None = None) -> Gemm:
    """Derive the nn, tn or tt form of a GEMM from its nt form, whose operands are a[M, K] and b[N, K].

    Args:
        gemm: the nt form.
        name: name of the derived function.
        transposed: the operands that the derived function takes transposed, with their scales: "a", "b" or "ab".
        compiled_dims: the default of the argument of this name, where it is another than that of `gemm`.

    Returns:
        A function with the arguments of `gemm`.
    """
    signature = inspect.signature(gemm)
    transpose = transpose_pairs if signature.parameters["a"].annotation == Pair else _transpose_tensors

    @wraps(gemm)
    def form(a: Any, b: Any, *arguments: Any, **options: Any) -> None:
        left, right = transpose(a, b, transposed)
        try:
            gemm(left, right, *arguments, **options)
        except ValueError as error:
            raise with_given_shapes(error, transposed) from None

    if compiled_dims is not None:
        parameters = dict(signature.parameters)
        parameters["compiled_dims"] = parameters["compiled_dims"].replace(default=compiled_dims)
        signature = signature.replace(parameters=list(parameters.values()))
    form.__name__ = form.__qualname__ = name
    form.__doc__ = f"Compute `{gemm.__name__}` with {' and '.join(transposed)} given transposed."
    form.__signature__ = signature  # type: ignore[attr-defined]
    return cast(Gemm, form)


def with_given_shapes(error: ValueError, transposed: str) -> ValueError:
    """Add to an error that names the shape of a transposed operand how that operand was given.

    Args:
        error: raised for the nt form.
        transposed: as in `transposed_form`.
    """
    if not re.search(rf"\b[{transposed}]\b.*\(\d", str(error)):
        return error
    given = " and ".join(
        f"{name} as [{rows}, K], given as [K, {rows}]" for name, rows in ROWS.items() if name in transposed
    )
    return ValueError(f"{error} (shapes of {given})")


def transpose_pairs(a: Pair, b: Pair, which: str) -> tuple[Pair, Pair]:
    """Return a and b, with data and scale transposed of those that `which` names ("a", "b" or "ab")."""
    check_pairs(a, b)
    left, right = (
        (transpose_one(f"{name}'s data", pair[0]), transpose_one(f"{name}'s scale", pair[1])) if name in which else pair
        for name, pair in (("a", a), ("b", b))
    )
    return left, right


def _transpose_tensors(a: Tensor, b: Tensor, which: str) -> tuple[Tensor, Tensor]:
    left, right = (transpose_one(name, t) if name in which else t for name, t in (("a", a), ("b", b)))
    return left, right


def transpose_one(name: str, t: Tensor) -> Tensor:
    """Return the transpose of the last two dimensions of an argument called `name`.

    Raises:
        TypeError, ValueError: it is not a tensor of at least 2 dimensions.
    """
    check_tensor(name, t)
    if t.dim() < 2:
        raise ValueError(f"{name} must have 2 dimensions or more, not the shape {tuple(t.shape)}")
    return t.mT


def check_cd(
    c: Tensor | None, d: Tensor, shape: tuple[int, ...], device: torch.device, contiguous: bool = False
) -> None:
    """Check the output d and the addend c of a GEMM.

    Args:
        c: None, or a tensor to be added; it may be d itself.
        d: the output.
        shape: that both must have.
        device: on which both must be.
        contiguous: whether d must be contiguous.

    Raises:
        TypeError: d is not bfloat16 or float32, or c has another dtype.
        ValueError: a shape or a device is wrong, c shares memory with d and is not d itself, or one of them requires a
            gradient in grad mode.
    """
    check_d(d, shape, device, contiguous)
    if c is None:
        return
    check_tensor("c", c)
    if c.dtype != d.dtype:
        raise TypeError(f"c must be {d.dtype} as d is, not {c.dtype}")
    if c.shape != d.shape or c.device != d.device:
        raise ValueError(f"c must be {tuple(d.shape)} on {d.device} as d is, not {tuple(c.shape)} on {c.device}")
    if c.data_ptr() == d.data_ptr() and c.stride() != d.stride():
        raise ValueError(f"c shares d's memory, so it must have d's strides {d.stride()}, not {c.stride()}")
    if c.data_ptr() != d.data_ptr() and _share_memory(c, d):
        raise ValueError("c must be d itself or share no memory with it; pass c.clone()")
    _check_no_grad("c", c)


def _share_memory(c: Tensor, d: Tensor) -> bool:
    """Return whether elements of c and d share memory. True also where c lies among d's elements with other strides."""
    begin_c, begin_d = c.data_ptr(), d.data_ptr()
    if d.numel() == 0 or begin_c >= begin_d + _extent(d) or begin_d >= begin_c + _extent(c):
        return False
    distance, remainder = divmod(begin_c - begin_d, d.element_size())
    dims = sorted(zip(d.stride(), d.shape, strict=True), reverse=True)
    return c.stride() != d.stride() or remainder != 0 or _is_distance_of_elements(distance, dims)


def _extent(t: Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    return t.element_size() * (1 + sum(step * (size - 1) for step, size in zip(t.stride(), t.shape, strict=True)))


def _is_distance_of_elements(distance: int, dims: list[tuple[int, int]]) -> bool:
    """Return whether two elements of a tensor that does not overlap itself have this distance in memory.

    Args:
        distance: in elements, of either sign.
        dims: (stride, size) of each dimension, the largest stride first.
    """
    dims = [(step, size) for step, size in dims if size > 1]
    if not dims:
        return distance == 0
    (step, size), *inner = dims  # inner dimensions reach less than a step, so only two differences are possible
    nearest = distance // step
    return any(abs(k) < size and _is_distance_of_elements(distance - k * step, inner) for k in (nearest, nearest + 1))


def _check_no_grad(name: str, t: Tensor) -> None:
    if t.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, which is not computed; pass {name}.detach()")


def copy_c_to_d(d: Tensor, c: Tensor | None) -> bool:
    """Copy c into d, unless it is d; return whether the GEMM must be added to d. The arguments were checked before."""
    if c is not None and c.data_ptr() != d.data_ptr():
        d.copy_(c)
    return c is not None


def check_d(d: Tensor, shape: tuple[int, ...], device: torch.device, contiguous: bool = False) -> None:
    """Check the output d; see `check_cd`."""
    check_tensor("d", d)
    if d.dtype not in OUT_DTYPES:
        raise TypeError(f"d must be bfloat16 or float32, not {d.dtype}")
    if tuple(d.shape) != tuple(shape):
        raise ValueError(f"d must be {tuple(shape)}, not {tuple(d.shape)}")
    if d.device != device:
        raise ValueError(f"d must be on {device} as the operands are, not on {d.device}")
    if contiguous and not d.is_contiguous():
        raise ValueError(f"d must be contiguous, but has the strides {d.stride()}")
    if has_overlap(d):
        raise ValueError(f"d must not overlap itself, as {tuple(d.shape)} with strides {d.stride()} does")
    _check_no_grad("d", d)
