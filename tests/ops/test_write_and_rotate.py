"""Tests of what decode rows do in one launch: it is what separate operators do."""

import pytest
import torch
from torch import Tensor

from octile.ops.latent_cache import write_and_rotate, write_latents
from octile.ops.norm import rms_norm
from octile.ops.rope import rotate_
from tests.ops.operators import assert_well_formed
from tests.ops.paged_caches import new_cache

C, R, N, H = 136, 6, 10, 3
SLOTS = torch.tensor([130, -1, 5])


def arguments(cache_dtype: torch.dtype, dtype: torch.dtype = torch.bfloat16, t: int = 3) -> dict[str, Tensor | float]:
    """Rows as one GEMM projects them, and the absorbed queries of ones."""
    torch.manual_seed(0)
    joined, angle = torch.randn(t, H * (N + R) + C + R).to(dtype), torch.randn(t, R // 2)
    q, latent, rope = joined.split([H * (N + R), C, R], dim=1)
    return {
        "cache": new_cache(3, C, R, cache_dtype), "slots": SLOTS[:t], "latent": latent, "rope": rope,
        "weight": torch.rand(C), "eps": 1e-6, "cos": angle.cos(), "sin": angle.sin(), "q": q.unflatten(1, (H, N + R)),
        "absorbed": torch.ones(t, H, C + R, dtype=dtype),
    }  # fmt: skip


@pytest.mark.parametrize("t", [0, 1, 3])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_separate_operators_do(dtype: torch.dtype, cache_dtype: torch.dtype, t: int):
    given = arguments(cache_dtype, dtype, t)
    q, rope, expected = given["q"].clone(), given["rope"].clone(), torch.zeros_like(given["cache"])
    before = given["q"].clone()
    write_and_rotate(*given.values())
    assert torch.equal(given["q"], before)
    rotate_(q[None], given["cos"], given["sin"])
    rotate_(rope[None, :, None], given["cos"], given["sin"])
    write_latents(expected, given["slots"], rms_norm(given["latent"], given["weight"], 1e-6)[0], rope)
    assert torch.equal(given["cache"], expected)
    assert torch.equal(given["absorbed"][..., C:], q[..., N:])
    assert (given["absorbed"][..., :C] == 1).all()


@pytest.mark.one_case
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.uint8])
def test_the_operator_is_well_formed(cache_dtype: torch.dtype):
    assert_well_formed(write_and_rotate, tuple(arguments(cache_dtype, t=1).values()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slots": SLOTS.int()}, TypeError, "slots must be int64"),
        ({"weight": torch.ones(C + 1)}, ValueError, "weight must be \\(136,\\)"),
        ({"weight": torch.ones(C).double()}, TypeError, "weight must be float32"),
        ({"cos": torch.ones(3, R // 2).double()}, TypeError, "cos must be float32, not torch.float64"),
        ({"sin": torch.ones(3, R)}, ValueError, "sin must be \\(3, 6 / 2\\), contiguous, not \\(3, 6\\)"),
        ({"sin": torch.ones(R // 2, 3).mT}, ValueError, "sin must be \\(3, 6 / 2\\), contiguous"),
        ({"q": torch.ones(3, H, N + R)}, TypeError, "q must be torch.bfloat16 as latent, not torch.float32"),
        ({"q": torch.ones(3, H, R - 1).bfloat16()}, ValueError, "q must be \\(3, H, at least 6\\)"),
        ({"q": torch.ones(3, N + R, H).bfloat16().mT}, ValueError, "channels contiguous"),
        ({"absorbed": torch.ones(3, H, C).bfloat16()}, ValueError, "absorbed must be \\(3, 3, 142\\), contiguous"),
        ({"absorbed": torch.ones(3, C + R, H).bfloat16().mT}, ValueError, "absorbed must be .*contiguous"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        write_and_rotate(*(arguments(torch.bfloat16) | change).values())
