"""Latents and rotary channels of decode rows on a GPU equal the reference, but for a rounding of the norm."""

import pytest
import torch

from octile.ops.latent_cache import normalizes_as_rms_norm, read_latents, write_and_rotate
from octile.ops.norm import rms_norm
from tests.ops.paged_caches import new_cache


@pytest.mark.parametrize("t", [1, 9, 128])
@pytest.mark.parametrize(("heads", "sizes"), [(16, (512, 64, 192)), (40, (136, 6, 16))], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.uint8])
def test_it_is_the_reference(cache_dtype: torch.dtype, heads: int, sizes: tuple[int, int, int], t: int):
    c, r, x = sizes
    torch.manual_seed(t)
    joined = torch.randn(t, heads * x + c + r).bfloat16()  # as one GEMM projects them
    slots, angle = torch.randperm(3 * 64)[:t] - 1, torch.randn(t, r // 2)  # one is perhaps negative
    caches = []
    for device in ("cpu", "cuda"):
        cache, both = new_cache(3, c, r, cache_dtype).to(device), joined.to(device)
        q, latent, rope = both.split([heads * x, c, r], dim=1)
        absorbed = torch.zeros(t, heads, c + r, dtype=torch.bfloat16, device=device)
        weight, cos, sin = (of.to(device) for of in (torch.linspace(0.5, 2, c), angle.cos(), angle.sin()))
        q_THX = q.unflatten(1, (heads, x))
        write_and_rotate(cache, slots.to(device), latent, rope, weight, 1e-6, cos, sin, q_THX, absorbed)
        rows = read_latents(cache, torch.arange(3 * 64, device=device), c, torch.float32).cpu()
        caches.append((rows[:, c:], absorbed.cpu(), rows[:, :c]))
    (*exact, expected), (*found, latents) = caches
    assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))
    spacing, least = (2**-3, 2**-15) if cache_dtype == torch.uint8 else (2**-7, 0.0)  # of the numbers that are cached
    torch.testing.assert_close(latents, expected, rtol=spacing, atol=least)


@pytest.mark.parametrize("c", [512, 768])
@pytest.mark.parametrize("t", [1, 33, 1024])
def test_latents_have_the_bits_of_rms_norm(t: int, c: int):
    torch.manual_seed(t)
    joined = (torch.randn(t, c + 64) * torch.randn(t, 1).exp()).bfloat16().cuda()
    latent, rope, weight = joined[:, :c], joined[:, c:], torch.randn(c).bfloat16().cuda()
    if not normalizes_as_rms_norm(latent, weight):
        pytest.skip("another GPU than Hopper, where rms_norm is Triton's")
    cache, slots = new_cache(t // 64 + 1, c, 64, torch.bfloat16).cuda(), torch.arange(t, device="cuda")
    cos, sin = torch.ones(t, 32, device="cuda"), torch.zeros(t, 32, device="cuda")
    q, absorbed = joined.new_zeros(t, 16, 192), joined.new_zeros(t, 16, c + 64)
    write_and_rotate(cache, slots, latent, rope, weight, 1e-6, cos, sin, q, absorbed)
    assert torch.equal(cache.flatten(0, 1)[:t, :c], rms_norm(latent, weight, 1e-6)[0])
