"""Sampling of the next tokens: for each row the largest of logit / temperature + noise, a function of the row alone.

The Gumbel-max trick: with independent Gumbel noise for every token of the vocabulary the largest sum is a sample of
softmax(logits / temperature). The noise is a hash of seed, position and token, so it needs no state. Every row is
computed alone, by elementwise operations, comparisons and sums of integers, so no bit depends on how many rows there
are. What a row asks for is on the logits' device, so a CUDA graph can sample.

min_p, top_k and top_p leave the most likely tokens of a row, in this order. A token's weight is its probability as a
share of the most likely one's, in fixed point: an integer up to 2**30. So sums of weights are exact, and tokens are
ordered by weight, of equal weights by number. Where a row leaves out tokens, those of weight 0 are left out, too.

A GPU's logarithms and exponentials may differ from a CPU's in their last bits. So a token at the border may be left out
on one device alone.

Sources: the Gumbel-max trick: Maddison et al., A* Sampling (arXiv 1411.0030) §2; counter-based random numbers: Salmon
et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); the finalizers of SplitMix64 and MurmurHash3; top_p:
Holtzman et al. (arXiv 1904.09751); min_p: Nguyen et al. (arXiv 2407.01082).
Shapes: L rows, V vocabulary.
"""

import math

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype

# instead of the token of a row: its logits have a NaN; they have no NaN but +Inf; all are -Inf
NOT_A_NUMBER, POSITIVE_INFINITY, ALL_MASKED = NO_TOKEN = -1, -2, -3


FIXED_POINT = 2**30  # weight of the most likely token


@operator()
def sample_tokens(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    truncates: bool = True,
) -> Tensor:
    """Choose the next token of each row.

    Args:
        logits: [L, V] float32, bfloat16 or float16, rows contiguous, V from 1 to below 2**31. A token of -Inf is
            masked: it is never chosen.
        seeds: int64 [L].
        positions: int64 [L], of the chosen tokens in their texts.
        temperature: float32 [L], finite; where it is 0, the most likely token is chosen, the first of equally likely.
        top_k: int64 [L], at least 0: a token is sampled from this many most likely ones; 0 is all.
        top_p: float64 [L], above 0, at most 1: from the fewest most likely ones of these that have this share of their
            probability; 1 is all.
        min_p: float64 [L], from 0 to 1: from those alone that have this share of the most likely one's probability; 0
            is all. It comes before `top_k`.
        truncates: False: top_k, top_p and min_p leave all tokens, whatever they are; a GPU takes three kernels less.

    Returns:
        int64 [L]; negative where the logits choose no token: NOT_A_NUMBER if they have a NaN, otherwise
        POSITIVE_INFINITY if they have +Inf, and ALL_MASKED if all are -Inf.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together.
    """
    _check(logits, seeds, positions, temperature, top_k, top_p, min_p)
    if not len(logits):
        return logits.new_empty(0, dtype=torch.int64)
    logits, vocabulary = logits.float(), logits.shape[1]
    most_likely_L = logits.argmax(-1)
    highest_L1 = logits.gather(1, most_likely_L[:, None])  # NaN if there is one
    is_greedy_L1 = temperature[:, None] == 0
    tokens_L = most_likely_L
    if not is_greedy_L1.all():
        z_LV = (logits - highest_L1) / temperature[:, None].masked_fill(is_greedy_L1, 1.0)
        truncates_L = (temperature != 0) & (((top_k > 0) & (top_k < vocabulary)) | (top_p < 1) | (min_p > 0))
        rows = truncates_L.nonzero()[:, 0]
        if truncates and len(rows):
            is_candidate_LV = _candidates(z_LV[rows], top_k[rows], top_p[rows], min_p[rows])
            z_LV[rows] = z_LV[rows].masked_fill(~is_candidate_LV, -math.inf)
        noise_LV = gumbel(torch.arange(vocabulary, device=logits.device), sampling_keys(seeds, positions))
        tokens_L = torch.where(is_greedy_L1[:, 0], most_likely_L, (z_LV + noise_LV).argmax(-1))
    highest_L = highest_L1[:, 0]
    tokens_L = tokens_L.masked_fill(highest_L.isnan(), NOT_A_NUMBER)
    tokens_L = tokens_L.masked_fill(highest_L == math.inf, POSITIVE_INFINITY)
    return tokens_L.masked_fill(highest_L == -math.inf, ALL_MASKED)


@sample_tokens.register_fake
def _(logits, seeds, positions, temperature, top_k, top_p, min_p, truncates=True):
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@sample_tokens.register_kernel("cuda")
def _(logits, seeds, positions, temperature, top_k, top_p, min_p, truncates=True):
    from octile.kernels.triton import sample_tokens as kernel  # late: a machine without a GPU has no Triton

    _check(logits, seeds, positions, temperature, top_k, top_p, min_p)
    return kernel.launch(logits, seeds, positions, temperature, top_k, top_p, min_p, FIXED_POINT, truncates)


def _candidates(z_LV: Tensor, top_k_L: Tensor, top_p_L: Tensor, min_p_L: Tensor) -> Tensor:
    """Return which tokens min_p, top_k and top_p leave, bool [L, V]; z is (logit - highest) / temperature."""
    weights_LV = (z_LV.exp() * FIXED_POINT).long()
    weights_LV.masked_fill_(weights_LV < (min_p_L * FIXED_POINT).long()[:, None], 0)
    weights_LV, tokens_LV = weights_LV.sort(dim=-1, descending=True, stable=True)  # of equal ones the first token first
    is_beyond_LV = torch.arange(z_LV.shape[1], device=z_LV.device) >= top_k_L[:, None]
    weights_LV.masked_fill_(is_beyond_LV & (top_k_L > 0)[:, None], 0)
    sums_LV = weights_LV.cumsum(-1)
    is_candidate_LV = (weights_LV > 0) & (sums_LV - weights_LV < top_p_L[:, None] * sums_LV[:, -1:])
    return torch.zeros_like(is_candidate_LV).scatter_(1, tokens_LV, is_candidate_LV)


def sampling_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Hash seed and position of each row to int32 [L, 2], by the finalizer of SplitMix64.

    Args:
        seeds, positions: int64 [L].
    """
    x = seeds
    for y in (torch.zeros_like(positions), positions):
        x = x + (y + 1) * _signed(0x9E3779B97F4A7C15)  # modulo 2^64
        x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
        x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
        x = x ^ _shifted(x, 31)
    return x.contiguous().view(torch.int32).view(-1, 2)


def gumbel(tokens: Tensor, keys_L2: Tensor) -> Tensor:
    """Return independent Gumbel noise, float32 [L, V], a function of token and key.

    Args:
        tokens: int64 [V] or [L, V].
        keys_L2: int32 [L, 2].
    """
    x = (
        tokens.to(torch.int32) * -1640531527 ^ keys_L2[:, :1]
    )  # the finalizer of MurmurHash3, with the second key inside
    x ^= (x >> 16) & 0xFFFF
    x *= -2048144789
    x += keys_L2[:, 1:]
    x ^= (x >> 13) & 0x7FFFF
    x *= -1028477387
    x ^= (x >> 16) & 0xFFFF
    # below 1, to which the largest hashes are rounded: with noise of −Inf a token that is alone would not be chosen
    uniform = (((x & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31).clamp_(max=1 - 2.0**-24)
    # −log of an exponential number: where it is large, the uniform one is small and has all its digits
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _check(
    logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> None:
    check_input_dtype("logits", logits)
    numbers = {
        "seeds": (seeds, torch.int64),
        "positions": (positions, torch.int64),
        "temperature": (temperature, torch.float32),
        "top_k": (top_k, torch.int64),
        "top_p": (top_p, torch.float64),
        "min_p": (min_p, torch.float64),
    }
    for name, (t, dtype) in numbers.items():
        if t.dtype != dtype:
            raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, not {t.dtype}")
    if logits.dim() != 2 or not 1 <= logits.shape[1] < 2**31 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [L, V] with V from 1 and rows contiguous, not {tuple(logits.shape)} with strides "
            f"{logits.stride()}"
        )
    for name, (t, _) in numbers.items():
        if t.shape != logits.shape[:1]:
            raise ValueError(f"{name} must be ({len(logits)},), one for each row of logits, not {tuple(t.shape)}")
        check_device("logits", logits, name, t)
