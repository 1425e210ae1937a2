"""The kernel of decode rows' latents equals the reference: bit for bit but for the norm's sum of squares."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.cuda.quantize.launcher import norm_parts
from octile.kernels.triton import decode_latents as kernel
from octile.ops.latent_cache import read_latents, write_and_rotate
from tests.kernels.triton.comparison import extreme
from tests.kernels.triton.gpus import any_gpu, every_cache
from tests.ops.paged_caches import new_cache

pytestmark = pytest.mark.usefixtures("gpu")
SLOTS = torch.tensor([130, -1, 5, 64, 192])  # one is not written, and one is not in the cache


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("heads", [1, 5, 16, 40])
@pytest.mark.parametrize("sizes", [(512, 64, 192), (136, 6, 40), (96, 32, 32)], ids=str)
@every_cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_reference(sizes: tuple[int, int, int], cache_dtype: torch.dtype, dtype: torch.dtype, heads: int):
    (c, r, x), t = sizes, len(SLOTS)
    torch.manual_seed(heads)
    joined = torch.randn(t, heads * x + c + r).to(dtype)  # as one GEMM projects them
    q, latent, rope = joined[:, : heads * x].unflatten(1, (heads, x)), joined[:, -c - r : -r], joined[:, -r:]
    weight, angle = torch.rand(c).to(dtype), torch.randn(t, r // 2)
    caches = [new_cache(3, c, r, cache_dtype) for _ in range(2)]
    absorbed = [torch.full((t, heads, c + r), 7.0, dtype=dtype) for _ in range(2)]
    rest = latent, rope, weight, 1e-6, angle.cos(), angle.sin(), q
    kernel.launch(caches[0], SLOTS, *rest, absorbed[0])
    write_and_rotate.reference(caches[1], SLOTS.clamp(max=191).masked_fill(SLOTS == 192, -1), *rest, absorbed[1])
    assert torch.equal(*absorbed)
    found, expected = (read_latents(cache, torch.arange(3 * 64), c, torch.float32) for cache in caches)
    assert torch.equal(found[:, c:], expected[:, c:])
    spacing = 2**-3 if cache_dtype == torch.uint8 else 2**-7 if torch.bfloat16 in (dtype, cache_dtype) else 2**-20
    torch.testing.assert_close(found[:, :c], expected[:, :c], rtol=spacing, atol=1e-6)


@any_gpu
def test_extreme_values_rotate_as_in_the_reference():
    q, angle = extreme(4, 2 * 8)[:, None].bfloat16(), torch.randn(4, 4)
    found, expected = (torch.zeros(4, 1, 24, dtype=torch.bfloat16) for _ in range(2))
    cache, slots = new_cache(1, 16, 8, torch.bfloat16), torch.arange(4)
    rest = (
        torch.zeros(4, 16).bfloat16(),
        torch.zeros(4, 8).bfloat16(),
        torch.ones(16),
        1e-6,
        angle.cos(),
        angle.sin(),
        q,
    )
    kernel.launch(cache, slots, *rest, found)
    write_and_rotate.reference(cache, slots, *rest, expected)
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@any_gpu
def test_no_rows_launch_nothing():
    cache, empty = new_cache(1, 16, 8, torch.bfloat16), torch.zeros(0, 4)
    q, absorbed = torch.zeros(0, 2, 12).bfloat16(), torch.zeros(0, 2, 24).bfloat16()
    latent, rope = torch.zeros(0, 16).bfloat16(), torch.zeros(0, 8).bfloat16()
    kernel.launch(
        cache, torch.zeros(0, dtype=torch.int64), latent, rope, torch.ones(16), 1e-6, empty, empty, q, absorbed
    )
    assert not cache.any()


@triton.jit
def sum_of_squares(x, out, C: tl.constexpr, UNITS: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, kernel._sum_of_squares(x + row * C, C, UNITS, 1))


def as_rms_norm_adds(x: Tensor, units: int) -> Tensor:
    """The sums of squares of rows that one warp of rms_norm.cu has: BF16 squares are exact in FP32."""
    padded = torch.zeros(len(x), units * 256)
    padded[:, : x.shape[1]] = x
    sums = torch.zeros(len(x), 32)
    for of_lanes in padded.view(len(x), units, 32, 8).unbind(1):
        for channel in of_lanes.unbind(2):
            sums = sums + channel * channel
    for half in (16, 8, 4, 2, 1):
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


@any_gpu
@pytest.mark.parametrize("c", [8, 136, 512, 1000])
def test_squares_are_added_in_the_order_of_rms_norm(c: int):
    torch.manual_seed(c)
    x, out = (torch.randn(20, c) * torch.randn(20, c).exp()).bfloat16(), torch.zeros(20)
    units, warps = norm_parts(c)
    assert warps == 1
    sum_of_squares[(len(x),)](x, out, C=c, UNITS=units)
    assert torch.equal(out, as_rms_norm_adds(x.float(), units))
