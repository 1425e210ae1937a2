"""The kernels that write the paged latent cache equal the reference bit for bit."""

import pytest
import torch

from octile.kernels.triton import latent_cache as kernel
from octile.ops.latent_cache import write_latents
from tests.kernels.triton.comparison import extreme
from tests.kernels.triton.gpus import every_cache
from tests.ops.paged_caches import new_cache

pytestmark = pytest.mark.usefixtures("gpu")
SLOTS = torch.tensor([130, -1, 5, 64])


@pytest.mark.one_case
@pytest.mark.parametrize("sizes", [(512, 64), (136, 6), (96, 32)], ids=str)
@every_cache
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written(sizes: tuple[int, int], cache_dtype: torch.dtype, dtype: torch.dtype):
    c, r = sizes
    both = extreme(4, c + r).to(dtype)
    latent, rope = both[:, :c], both[:, c:]
    found, expected = new_cache(3, c, r, cache_dtype), new_cache(3, c, r, cache_dtype)
    kernel.launch_write(found, SLOTS, latent, rope)
    write_latents(expected, SLOTS, latent, rope)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_a_slot_outside_the_cache_is_not_written():
    cache = new_cache(1, 64, 8, torch.bfloat16)
    kernel.launch_write(cache, torch.tensor([64]), torch.ones(1, 64), torch.ones(1, 8))
    assert not cache.any()
