"""What every product does first: pairs (data, scale) become operands in blocks, and everything is checked.

A recipe (gran_m, gran_n, gran_k) says that a has one scale for gran_m × gran_k values and b for gran_n × gran_k;
recipe_a and recipe_b say it as (rows, gran_k), one each.  The default is 1×128 and 128×128.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octile.ops.matmul import OUT_DTYPES, check_operand, check_pair, overlaps
from octile.ops.operator import check_tensor
from octile.ops.scale_layouts import PER_INT, unpack_ue8m0

Pair = tuple[Tensor, Tensor]
Recipe = tuple[int, int, int]
Block = tuple[int, int]


class Operand(NamedTuple):
    """What octile's operators take: data, its FP32 scales, the extents of a block."""

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
) -> tuple[Operand, Operand]:
    """a and b, checked as far as they can be without d.

    Raises:
        TypeError: no pair, data that is not E4M3, scales neither float32 nor int32 (packed UE8M0).
        ValueError: shapes, scales, recipes or devices do not fit.
    """
    check_pairs(a, b)
    block_a, block_b = blocks(b, recipe, recipe_a, recipe_b)
    left, right = operand("a", a, block_a, dims[0]), operand("b", b, block_b, dims[1])
    check_pair(left.data, right.data, torch.float32)
    return left, right


def check_pairs(a: Pair, b: Pair) -> None:
    for name, pair in (("a", a), ("b", b)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(f"{name} must be a pair (data, scale), not {type(pair).__name__}")
        check_tensor(f"{name}'s data", pair[0])
        check_tensor(f"{name}'s scale", pair[1])


def blocks(b: Pair, recipe: Recipe | None, recipe_a: Block | None, recipe_b: Block | None) -> tuple[Block, Block]:
    """The blocks that a recipe, or recipe_a and recipe_b, give a and b."""
    if (recipe_a is None) != (recipe_b is None):
        raise ValueError("recipe_a and recipe_b must be given both or not at all")
    if recipe is not None and recipe_a is not None:
        raise ValueError("recipe must not be given beside recipe_a and recipe_b")
    if recipe_a is not None and recipe_b is not None:
        check_recipe("recipe_a", recipe_a, "(rows, gran_k)")
        check_recipe("recipe_b", recipe_b, "(rows, gran_k)")
        return recipe_a, recipe_b
    if recipe is not None:
        check_recipe("recipe", recipe, "(gran_m, gran_n, gran_k)")
    gran_m, gran_n, gran_k = recipe or (1, 1 if b[1].dtype == torch.int32 else 128, 128)
    return (gran_m, gran_k), (gran_n, gran_k)


def check_recipe(name: str, recipe: Sequence[int], form: str) -> None:
    """Refuses what is not as many extents as its form has."""
    if not isinstance(recipe, tuple | list) or not all(isinstance(extent, int) for extent in recipe):
        raise TypeError(f"{name} must be {form} in integers, not {recipe!r}")
    if len(recipe) != form.count(",") + 1:
        raise ValueError(f"{name} must be {form}, not {tuple(recipe)}")
    if min(recipe) < 1:
        raise ValueError(f"{name} must be of extents of at least 1, not {tuple(recipe)}")


def operand(name: str, pair: Pair, block: Block, ndim: int) -> Operand:
    """One operand. Packed scales are unpacked."""
    data, scale = pair
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}; FP4 (two values in an int8) is not offered")
    if data.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, not the shape {tuple(data.shape)}")
    if scale.dtype == torch.int32:
        if block[0] != 1:
            raise ValueError(f"{name}'s packed scales must be one for each row, not for {block[0]}")
        columns = -(-data.shape[-1] // block[1])
        packed = (*data.shape[:-1], -(-columns // PER_INT))
        if tuple(scale.shape) != packed:
            raise ValueError(f"{name}'s scale must be {packed} where it is packed, not {tuple(scale.shape)}")
        scale = unpack_ue8m0(scale, columns)
    check_operand(name, data, scale, block, ndim)
    return Operand(data, scale, block)


def both_transposed(a: Pair, b: Pair, which: str) -> tuple[Pair, Pair]:
    """a and b, of which those that `which` names are seen from the other side."""
    check_pairs(a, b)
    left, right = (
        (turned(f"{name}'s data", pair[0]), turned(f"{name}'s scale", pair[1])) if name in which else pair
        for name, pair in (("a", a), ("b", b))
    )
    return left, right


def turned(name: str, t: Tensor) -> Tensor:
    check_tensor(name, t)
    if t.dim() < 2:
        raise ValueError(f"{name} must have 2 dimensions or more, not the shape {tuple(t.shape)}")
    return t.mT


def check_cd(
    c: Tensor | None, d: Tensor, shape: tuple[int, ...], device: torch.device, contiguous: bool = False
) -> None:
    """Refuses a result d, and what is added to it, that do not fit a product of this shape.

    Raises:
        TypeError: d is not bfloat16 or float32, or c not the same.
        ValueError: a shape or a device is wrong, or c is d in other strides.
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
        raise ValueError(f"c lies where d does, so it must have d's strides {d.stride()}, not {c.stride()}")


def begin(d: Tensor, c: Tensor | None) -> bool:
    """Writes c into d, and says whether the product is to be added to it. Everything has been checked before."""
    if c is not None and c.data_ptr() != d.data_ptr():
        d.copy_(c)
    return c is not None


def check_d(d: Tensor, shape: tuple[int, ...], device: torch.device, contiguous: bool = False) -> None:
    check_tensor("d", d)
    if d.dtype not in OUT_DTYPES:
        raise TypeError(f"d must be bfloat16 or float32, not {d.dtype}")
    if tuple(d.shape) != tuple(shape):
        raise ValueError(f"d must be {tuple(shape)}, not {tuple(d.shape)}")
    if d.device != device:
        raise ValueError(f"d lies on {d.device}, but the operands on {device}")
    if contiguous and not d.is_contiguous():
        raise ValueError(f"d must be contiguous, not of strides {d.stride()}")
    if overlaps(d):
        raise ValueError(f"d must not overlap itself, as {tuple(d.shape)} of strides {d.stride()} does")
