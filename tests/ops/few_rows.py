"""Arguments of the operators of few rows."""

import torch
from torch import Tensor

from octile.formats import TILE
from octile.ops.latent_cache import PAGE
from octile.ops.quantize import quantize
from tests.ops.paged_caches import filled_cache


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def product(
    m: int, k: int, n: int, norm: torch.dtype | None, add: bool, seed: int = 0
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None]:
    """Draw x [m, k] bfloat16, a norm's weight, an FP8 weight [n, k] with its scale, and rows to add."""
    of = generator(seed)
    x = (torch.randn(m, k, generator=of) * torch.exp2(4 * torch.randn(m, 1, generator=of))).bfloat16()
    weight, scale = quantize(torch.randn(n, k, generator=of), 128, 128, "e4m3", False)
    norm_weight = None if norm is None else (torch.rand(k, generator=of) + 0.5).to(norm)
    return x, norm_weight, weight, scale, torch.randn(m, n, generator=of).bfloat16() if add else None


def careful_values(*shape: int) -> Tensor:
    """Draw float32 [..., K] whose scales of 1×128 tiles are those that kernels divide by with more instructions.

    A scale is one to four units below a number with 8 significant bits, as octile/kernels/cuda/quantize/scale.cuh says.
    """
    of = generator(sum(shape))
    *rows, k = shape
    tiles = *rows, k // TILE[1]
    leading = torch.randint(0x3F81, 0x3F91, tiles, generator=of)  # 1 to 1.13: 448 times the scale has no fewer bits
    scale = ((leading << 16) - torch.randint(1, 5, tiles, generator=of)).int().view(torch.float32)
    values = torch.rand(*tiles, TILE[1], generator=of) * 2 - 1
    values[..., 5] = 1
    values = (values * 448 * scale[..., None]).view(*shape)
    low_bits = quantize(values.view(-1, k), *TILE, "e4m3", False)[1].view(torch.int32) & 0xFFFF
    assert (low_bits >= 0x10000 - 4).all()
    return values


def queries(m: int, n_heads: int, nope_dim: int, latent_dim: int = 512, rope_dim: int = 64) -> tuple[Tensor, ...]:
    """Draw q, kv, w_k, a norm's weight, cosines and sines."""
    of = generator(m)
    q = torch.randn(m, n_heads * (nope_dim + rope_dim), generator=of).bfloat16()
    kv = torch.randn(m, latent_dim + rope_dim, generator=of).bfloat16()
    w_k = (torch.randn(n_heads, latent_dim, nope_dim, generator=of) * nope_dim**-0.5).bfloat16()
    angle = torch.randn(m, rope_dim // 2, generator=of)
    return q, kv, w_k, torch.rand(latent_dim, generator=of) + 0.5, angle.cos(), angle.sin()


def paged(lengths: list[int], n_heads: int, values: int = 128) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Draw absorbed queries, a filled cache in bfloat16, pages in scattered order, lengths, and w_v."""
    of, m = generator(n_heads), len(lengths)
    n_pages = max(-(-max(lengths) // PAGE), 1)
    q = torch.randn(m, n_heads, 576, generator=of).bfloat16()
    pages = torch.randperm(m * n_pages, generator=of).int().view(m, n_pages)
    w_v = (torch.randn(n_heads, values, 512, generator=of) * 512**-0.5).bfloat16()
    cache = filled_cache(m * n_pages, 512, 64, torch.bfloat16)
    return q, cache, pages, torch.tensor(lengths, dtype=torch.int32), w_v


def attention(
    lengths: list[int], n_heads: int, nope_dim: int, values: int = 128, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor | float]:
    """Draw the arguments of `latent_attention`, by their names; each row is written to the last of its positions."""
    names = "q", "kv", "w_k", "norm_weight", "cos", "sin"
    drawn = dict(zip(names, queries(len(lengths), n_heads, nope_dim), strict=True))
    _, _, pages, of_lengths, w_v = paged(lengths, n_heads, values)
    last = (of_lengths - 1).clamp(min=0)[:, None].long()
    slots = (pages.long().gather(1, last // PAGE) * PAGE + last % PAGE)[:, 0].where(of_lengths > 0, -1)
    cache = filled_cache(pages.numel(), 512, 64, dtype)
    of_cache = {"slots": slots, "cache": cache, "pages": pages, "lengths": of_lengths}
    return drawn | of_cache | {"w_v": w_v, "eps": 1e-6, "scale": 0.05}


def attention_of_last_bits(
    length: int, n_heads: int, nope_dim: int = 128, values: int = 128
) -> dict[str, Tensor | float]:
    """Draw arguments of `latent_attention` for one row, of which all sums almost cancel.

    So BF16 results have few of the leading bits of what is summed, and show in which order it was.
    """
    drawn = attention([length], n_heads, nope_dim, values)
    q, w_k, w_v, cache = (drawn[name] for name in ("q", "w_k", "w_v", "cache"))
    cancel(q.unflatten(-1, (n_heads, -1))[..., :nope_dim], w_k)
    cancel(cache[..., :512], w_v)
    cache[:, 1::2] = cache[:, ::2]  # keys in pairs, with values of other signs
    cache[:, 1::2, :512] *= -1
    drawn["norm_weight"] = near_ties(drawn["kv"][:, :512], drawn["norm_weight"], drawn["eps"])
    return drawn


def cancel(x: Tensor, weight: Tensor) -> None:
    """Change x [..., K] and weight [..., K] so that the second half of their product is almost minus the first one."""
    half = x.shape[-1] // 2
    x[..., half:], weight[..., half:] = x[..., :half], -weight[..., :half]
    weight[..., -1] *= 1 + 2**-7


def near_ties(latent: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return weights of RMSNorm near those given, with which channels of one row lie next to ties of rounding to BF16.

    So every second channel or so shows the last bit of the factor 1 / √(mean(x²) + eps).
    """
    unit = latent[0].double() * (latent[0].double().square().mean() + eps).rsqrt()
    bits = (unit * weight.double()).float().view(torch.int32)
    tie = ((bits & ~0xFFFF) | 0x8000).view(torch.float32).double()
    return (tie / unit).float().where(unit != 0, weight.float())


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether BF16 results differ by roundings only: each by two units of the last place of its row's largest."""
    found, expected = found.float(), expected.float()
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return False
    finite = expected.isfinite()
    found, expected = found.where(finite, 0.0), expected.where(finite, 0.0)
    return bool(((found - expected).abs() <= 2**-7 * expected.abs().amax(-1, keepdim=True)).all())
