"""Attention of training and of prompts by flash-attn-4, an optional library of CuTe kernels (the extra `flash-attn-4`).

It takes cuDNN's place in causal attention in BF16 where forward and backward together, as in training, were measured to
be faster. TFLOP/s forward · backward on one H100, and cuDNN's time of both over that of the library:

    heads, channels of q and v, tokens    flash-attn-4    cuDNN        both
    32, 192 and 128, 2 × 4096             662 · 422       543 · 402    1.083
    32, 192 and 128, 4 × 1024             369 · 256       367 · 238    1.060
    32, 192 and 128, 8 × 512              220 · 157       257 · 143    1.044
    32, 128 and 128, 2 × 4096             598 · 517       545 · 436    1.162
    32, 128 and 128, 4 × 1024             353 · 298       389 · 264    1.075
    32, 128 and 128, 8 × 512              212 · 177       277 · 163    1.003

`why_not` is this rule. A server's prompts with 192 and 128 channels are computed by it where a step has 1024 rows of
them, whatever their lengths. ms on one H200, 16 heads:

    rows of the prompts                 flash-attn-4    octile's Triton kernel    cuDNN
    2 × 4,096                           0.26            0.52                      0.34
    3,700, 2,300, 1,400, 700 and 92     0.21            0.46                      –
    1,024, after 3,072 cached keys      0.08            0.16                      –

Texts that training packs into sequences are computed by it where they have 256 tokens or more on average. Texts of
4,096 tokens take 0.5 to 0.7 of the Triton kernels' time of both passes, of 256 tokens 0.8 to 1, of 68 tokens 1.2 to
1.3; between 68 and 256 nothing was measured. Empty texts cost little: 60 texts of 273 tokens on average, and 196 empty
ones, take 0.95 to 0.98.

Thread blocks of the backward pass add their parts of dq in no fixed order, so its bits differ from run to run:
deterministic mode excludes the library, as it does cuDNN.

The functions are those that its autograd function calls. torch's own module for the library (`torch.nn.attention._fa4`,
torch 2.13) does not call this version: it expects two results of the forward function, which returns five. The kernels
compile at their first use in a process, for some seconds, and then serve all batches, heads and lengths. A server uses
them before its first request.

Source: https://github.com/Dao-AILab/flash-attention, flash_attn/cute/interface.py.
Shapes: B batch, S sequence, T rows, L keys, H heads, X channels of a query and a key, V of a value.
"""

import functools
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

PACKAGE, MIN_VERSION = "flash-attn-4", "4.0.0b36"
MODULE = "flash_attn.cute.interface"
FUNCTIONS = "_flash_attn_fwd", "_flash_attn_bwd"  # private, so that a later version may not have them
CHANNELS = ((192, 128), (128, 128))  # of q and v
MIN_TOKENS = 1024  # of a sequence; at 512 the gain is small or none, and forward alone is slower
SUPPORTED = f"causal attention in BF16 with 192/128 or 128 channels and at least {MIN_TOKENS} tokens"
CHANNELS_OF_PROMPTS = CHANNELS[:1]  # 128 channels were not measured with prompts
MIN_ROWS = 1024  # of all texts: for fewer, some µs a layer are not worth a compilation
MAX_TEXTS = 256  # for more the library has other kernels, which no server compiles before its first request
MIN_MEAN_ROWS = 256  # of packed texts, empty ones not counted; those of 68 rows are slower than with Triton
SUPPORTED_PROMPTS = f"up to {MAX_TEXTS} prompts in BF16 with 192/128 channels and at least {MIN_ROWS} rows together"
SUPPORTED_PACKED = (
    f"up to {MAX_TEXTS} packed texts (in every sequence as many as in that with the most) in BF16 with 192/128 or 128 "
    f"channels, at least {MIN_ROWS} rows, and {MIN_MEAN_ROWS} a text on average"
)
INSTALL = f'pip install "octile[{PACKAGE}]"'


@functools.cache
def why_not_on(device: torch.device) -> str | None:
    """Return why the library is not used on a device at all; None: it is."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "it was measured on Hopper (sm_90) only"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return f"it is not installed: {INSTALL}"
    if TorchVersion(found) < MIN_VERSION:
        return f"{found} is installed, which is older than {MIN_VERSION}: {INSTALL}"
    return None


def _why_not_in_place_of_cudnn(device: torch.device) -> str | None:
    if reason := why_not_on(device):
        return reason
    if not (torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()):
        return "torch's sdpa_kernel excludes FlashAttention or cuDNN"
    return None


# torch's compiler calls it and does not trace it: `torch.compiler.assume_constant_result`, which would import it
vars(_why_not_in_place_of_cudnn)["_dynamo_marked_constant"] = True


def why_not(q: Tensor, v: Tensor, causal: bool) -> str | None:
    """Return why q [B, S, H, X] and v [B, S, H, V] are left to another kernel; None: the library computes them."""
    if reason := _why_not_in_place_of_cudnn(q.device):
        return reason
    if not causal or not _has_kernels(q, v, CHANNELS) or q.shape[1] < MIN_TOKENS:
        return f"it is used for {SUPPORTED} only"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward pass adds in no fixed order"
    return None


def why_not_prompts(q: Tensor, v: Tensor, row_starts: Tensor) -> str | None:
    """Return why prompts, q [T, H, X] and v [L, H, V], are left to another kernel; None: the library computes them."""
    if reason := why_not_on(q.device):
        return reason
    if not _has_kernels(q, v, CHANNELS_OF_PROMPTS) or len(q) < MIN_ROWS or len(row_starts) - 1 > MAX_TEXTS:
        return f"it is used for {SUPPORTED_PROMPTS} only"
    return None


def why_not_packed(q: Tensor, v: Tensor, cu_seqlens: Tensor, mean_seqlen: int | None) -> str | None:
    """Return why packed texts, q [T, H, X] and v [T, H, V], are left to another kernel.

    Args:
        q, v: queries and values.
        cu_seqlens: the borders of the texts, int32 [N + 1]; which of them are empty is known on the GPU alone.
        mean_seqlen: the mean rows of a text; None: unknown, so that all N texts count as not empty.
    """
    if reason := why_not_on(q.device):
        return reason
    texts = len(cu_seqlens) - 1
    is_long = len(q) >= MIN_MEAN_ROWS * texts if mean_seqlen is None else mean_seqlen >= MIN_MEAN_ROWS
    if not _has_kernels(q, v, CHANNELS) or len(q) < MIN_ROWS or texts > MAX_TEXTS or not is_long:
        return f"it is used for {SUPPORTED_PACKED} only"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward pass adds in no fixed order"
    return None


def _has_kernels(q: Tensor, v: Tensor, channels: tuple[tuple[int, int], ...]) -> bool:
    return q.dtype == torch.bfloat16 and (q.shape[-1], v.shape[-1]) in channels


@functools.cache
def load() -> Any:
    """Import the library's functions, which takes some seconds.

    Raises:
        ImportError: it is installed, but cannot be imported, or a function is missing.
    """
    # of the compiler, about an argument of each kernel that is always None here
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted to a JitArgument")
    try:
        module = import_module(MODULE)
        attrgetter(*FUNCTIONS)(module)
        return module
    except Exception as error:  # its shared libraries raise OSError, for example
        raise ImportError(
            f"{PACKAGE} {version(PACKAGE)} is installed, but cannot be imported ({type(error).__name__}: {error}): "
            f"repair it ({INSTALL}) or remove it (pip uninstall {PACKAGE})"
        ) from error


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Run the forward kernel for sequences [B, S, H, …], or within packed texts [T, H, …].

    Args:
        q, k, v, scale: as in `octile.ops.attention.attention`; with cu_seqlens as in `packed_attention`.
        cu_seqlens: the borders of packed texts; None: q, k and v are sequences.

    Returns:
        o in the shape of v, contiguous, and lse [B, H, S] or [H, T] float32.
    """
    texts = _packed(q, cu_seqlens)
    o, lse, *_ = load()._flash_attn_fwd(q, k, v, **texts, softmax_scale=scale, causal=True, return_lse=True)
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernels of what `forward` computed; returns dq, dk and dv, contiguous."""
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    texts = _packed(q, cu_seqlens)
    load()._flash_attn_bwd(q, k, v, o, do, lse, **texts, softmax_scale=scale, causal=True, dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


def forward_prompts(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_starts: Tensor, key_starts: Tensor, scale: float
) -> None:
    """Run the forward kernel for prompts, as `octile.ops.attention.ragged_attention`, and write the result to out."""
    texts = _texts(row_starts, key_starts, len(q), len(k))
    load()._flash_attn_fwd(q, k, v, **texts, softmax_scale=scale, causal=True, out=out)


def _packed(q: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    return {} if cu_seqlens is None else _texts(cu_seqlens, cu_seqlens, len(q), len(q))


def _texts(row_starts: Tensor, key_starts: Tensor, rows: int, keys: int) -> dict[str, Any]:
    """The library's arguments for several texts.

    Their sum is given as the longest length. A length of up to 128 would choose another kernel, and that of packed
    texts is known on the GPU alone.
    """
    return {"cu_seqlens_q": row_starts, "cu_seqlens_k": key_starts, "max_seqlen_q": rows, "max_seqlen_k": keys}
