"""Sampling of the next tokens: for each row the largest of logit / temperature + noise, a function of the row alone.

The Gumbel-max trick: with independent Gumbel noise for every token of the vocabulary the largest sum is a sample of
softmax(logits / temperature). The noise is a hash of seed, position and token, so it needs no state. Every row is
computed alone, by elementwise operations and comparisons, so no bit depends on how many rows there are. Seeds,
positions and temperatures are on the logits' device, so a CUDA graph can sample.

A GPU's logarithms may differ from a CPU's in their last bits.

Sources: the Gumbel-max trick: Maddison et al., A* Sampling (arXiv 1411.0030) §2; counter-based random numbers: Salmon
et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011); the finalizers of SplitMix64 and MurmurHash3.
Shapes: L rows, V vocabulary.
"""

import math

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype

# instead of the token of a row: its logits have a NaN; they have no NaN but +Inf; all are -Inf
NOT_A_NUMBER, POSITIVE_INFINITY, ALL_MASKED = NO_TOKEN = -1, -2, -3


@operator()
def sample_tokens(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> Tensor:
    """Choose the next token of each row.

    Args:
        logits: [L, V] float32, bfloat16 or float16, rows contiguous, V from 1 to below 2**31. A token of -Inf is
            masked: it is never chosen.
        seeds: int64 [L].
        positions: int64 [L], of the chosen tokens in their texts.
        temperature: float32 [L]; where it is 0, the most likely token is chosen, the first of equally likely ones.

    Returns:
        int64 [L]; negative where the logits choose no token: NOT_A_NUMBER if they have a NaN, otherwise
        POSITIVE_INFINITY if they have +Inf, and ALL_MASKED if all are -Inf.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together.
    """
    _check(logits, seeds, positions, temperature)
    if not len(logits):
        return logits.new_empty(0, dtype=torch.int64)
    logits = logits.float()
    most_likely_L = logits.argmax(-1)
    highest_L1 = logits.gather(1, most_likely_L[:, None])  # NaN if there is one
    is_greedy_L1 = temperature[:, None] == 0
    tokens_L = most_likely_L
    if not is_greedy_L1.all():
        z_LV = (logits - highest_L1) / temperature[:, None].masked_fill(is_greedy_L1, 1.0)
        noise_LV = gumbel(torch.arange(logits.shape[1], device=logits.device), sampling_keys(seeds, positions))
        tokens_L = torch.where(is_greedy_L1[:, 0], most_likely_L, (z_LV + noise_LV).argmax(-1))
    highest_L = highest_L1[:, 0]
    tokens_L = tokens_L.masked_fill(highest_L.isnan(), NOT_A_NUMBER)
    tokens_L = tokens_L.masked_fill(highest_L == math.inf, POSITIVE_INFINITY)
    return tokens_L.masked_fill(highest_L == -math.inf, ALL_MASKED)


@sample_tokens.register_fake
def _(logits, seeds, positions, temperature):
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


@sample_tokens.register_kernel("cuda")
def _(logits, seeds, positions, temperature):
    from octile.kernels.triton import sample_tokens as kernel  # late: a machine without a GPU has no Triton

    _check(logits, seeds, positions, temperature)
    return kernel.launch(logits, seeds, positions, temperature)


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
    uniform = ((x & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    # −log of an exponential number: where it is large, the uniform one is small and has all its digits
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right as if it were unsigned."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _check(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> None:
    check_input_dtype("logits", logits)
    for name, t, dtype in (
        ("seeds", seeds, torch.int64),
        ("positions", positions, torch.int64),
        ("temperature", temperature, torch.float32),
    ):
        if t.dtype != dtype:
            raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, not {t.dtype}")
    if logits.dim() != 2 or not 1 <= logits.shape[1] < 2**31 or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [L, V] with V from 1 and rows contiguous, not {tuple(logits.shape)} with strides "
            f"{logits.stride()}"
        )
    for name, t in (("seeds", seeds), ("positions", positions), ("temperature", temperature)):
        if t.shape != logits.shape[:1]:
            raise ValueError(f"{name} must be ({len(logits)},), one for each row of logits, not {tuple(t.shape)}")
        check_device("logits", logits, name, t)
