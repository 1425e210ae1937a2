"""Checks that every operator must pass, and helpers of their tests."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

WITHOUT_ALLCLOSE = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
CHECKS = ["test_schema", *WITHOUT_ALLCLOSE]


def assert_well_formed(operator: Any, arguments: Sequence[Any], checks: Collection[str] = CHECKS) -> None:
    """Run torch's own checks: schema, fake, autograd, compilation. That of the schema cannot compare FP8."""
    has_fp8 = any(isinstance(a, Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)
    own = [check for check in checks if not (has_fp8 and check == "test_schema")]
    torch.library.opcheck(operator.overload, arguments, test_utils=own)


def assert_fake_is_true(operator: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Check that results on meta tensors have the shapes, dtypes and strides of real ones."""
    meta = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    for m, real in zip(_each(meta), _each(operator(*arguments)), strict=True):
        assert (m.shape, m.dtype, m.stride()) == (real.shape, real.dtype, real.stride())


def _each(results: Any) -> Sequence[Tensor]:
    return results if isinstance(results, tuple) else (results,)


def untile_128x4(tiles: Tensor, mn: int, k: int) -> Tensor:
    """The inverse of `octile.ops.scale_layouts.tile_128x4`: [MN, k]."""
    shape = (-(-mn // 128), -(-k // 4), 32, 4, 4)
    return tiles.view(shape).permute(0, 3, 2, 1, 4).flatten(3, 4).flatten(0, 2)[:mn, :k]
