"""The balance of the experts within each sequence, a loss that keeps a gate from preferring a few of them.

    f_i = E / (K · S) · Σ_t [i is among the experts that are counted for token t]
    P_i = 1 / S · Σ_t s'_{i,t}        s'_{i,t} = s_{i,t} / Σ_j s_{j,t}

The loss of a sequence is Σ_i f_i · P_i; s is the sigmoid of a logit, or the softmax of a token's logits. The sums are
over the S tokens of the sequence. All the sigmoids of a token may be 0 in FP32, but their logarithms are finite, so
that s' is computed as softmax(log s). On a GPU sums are in another order than in torch, but always in the same. The
losses of Hopper's kernel and the portable one are at most 2⁻²⁰ of the loss apart.

Source: DeepSeek-V3 (arXiv 2412.19437) equations 17 to 20; DeepSeek-V2 (arXiv 2405.04434) equations 23 to 25.
Shapes: B sequences, S tokens of each, T = B·S tokens, E experts, K chosen ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels import backends
from octile.ops.gate import check_choice, check_scoring, top_experts
from octile.ops.operator import operator
from octile.ops.permute import count_tokens
from octile.ops.quantize import check_device


@operator()
def sequence_balance(
    logits: Tensor, experts: Tensor | None, n_chosen: int, batch: int, scoring_func: str
) -> tuple[Tensor, Tensor]:
    """Compute the mean loss of the sequences.

    Args:
        logits: [T, E] float32, for `batch` sequences of equal length, one after the other; T is at least 1.
        experts: int64 [T, K], the experts that are counted; None: the K with the highest logits.
        n_chosen: K.
        batch: B.
        scoring_func: sigmoid or softmax.

    Returns:
        loss [] float32; f [B, E] float32, which the gradient needs.

    Raises:
        TypeError: logits or experts has another dtype.
        ValueError: shapes, devices or numbers do not fit together, or scoring_func is another one.
    """
    _check(logits, batch, scoring_func)
    _check_experts(logits, experts, n_chosen)
    counted = top_experts(logits, n_chosen, 1, 1, 1) if experts is None else experts
    counts = count_tokens(counted, logits.shape[1], batch)
    f = counts * logits.shape[1] / counts.sum(1, keepdim=True)
    return balance_of(logits, f, scoring_func), f


@sequence_balance.register_fake
def _(logits, experts, n_chosen, batch, scoring_func):
    return logits.new_empty(()), logits.new_empty(batch, logits.shape[1])


@sequence_balance.register_kernel("cuda")
def _(logits, experts, n_chosen, batch, scoring_func):
    _check(logits, batch, scoring_func)
    _check_experts(logits, experts, n_chosen)
    return backends.run("sequence_balance", logits, experts, n_chosen, batch, scoring_func)


def balance_of(logits: Tensor, f: Tensor, scoring_func: str) -> Tensor:
    """Compute the mean loss of the sequences from f [B, E], in torch's functions."""
    shares = _log_affinity(logits, scoring_func).softmax(-1)
    return (f * shares.unflatten(0, (len(f), -1)).mean(1)).sum(1).mean()


@operator()
def sequence_balance_backward(dloss: Tensor, logits: Tensor, f: Tensor, scoring_func: str) -> Tensor:
    """Compute the gradient of the logits; f has none.

    Args:
        dloss: [] float32, the gradient of the loss.
        logits, scoring_func: as in `sequence_balance`.
        f: its result.

    Returns:
        dlogits [T, E] float32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or scoring_func is another one.
    """
    _check_backward(dloss, logits, f, scoring_func)
    batch, length = len(f), len(logits) // len(f)
    d = (dloss / batch * f / length).repeat_interleave(length, 0)
    shares = _log_affinity(logits, scoring_func).softmax(-1)
    if scoring_func == "softmax":
        return torch.ops.aten._softmax_backward_data(d, shares, -1, logits.dtype)
    return shares * (d - (d * shares).sum(-1, keepdim=True)) * (-logits).sigmoid()


@sequence_balance_backward.register_fake
def _(dloss, logits, f, scoring_func):
    return logits.new_empty(logits.shape)


@sequence_balance_backward.register_kernel("cuda")
def _(dloss, logits, f, scoring_func):
    from octile.kernels.triton import sequence_balance as kernel  # late: a machine without a GPU has no Triton

    _check_backward(dloss, logits, f, scoring_func)
    return kernel.launch_backward(dloss, logits, f, scoring_func)


def _log_affinity(logits: Tensor, scoring_func: str) -> Tensor:
    """Return what softmax makes the shares of."""
    return F.logsigmoid(logits) if scoring_func == "sigmoid" else logits


def _check(logits: Tensor, batch: int, scoring_func: str) -> None:
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, not {logits.dtype}")
    if logits.dim() != 2 or not len(logits):
        raise ValueError(f"logits must be a matrix [T, E] with T of at least 1, not {tuple(logits.shape)}")
    if batch < 1 or len(logits) % batch:
        raise ValueError(f"batch must divide the {len(logits)} tokens of logits, not be {batch}")
    check_scoring(scoring_func)


def _check_experts(logits: Tensor, experts: Tensor | None, n_chosen: int) -> None:
    check_choice("logits", logits.shape[1], n_chosen, 1, 1, 1)
    if experts is None:
        return
    if experts.dtype != torch.int64:
        raise TypeError(f"experts must be int64, not {experts.dtype}")
    if experts.shape != (len(logits), n_chosen):
        raise ValueError(f"experts must be {(len(logits), n_chosen)}, not {tuple(experts.shape)}")
    check_device("logits", logits, "experts", experts)


def _check_backward(dloss: Tensor, logits: Tensor, f: Tensor, scoring_func: str) -> None:
    for name, t in (("dloss", dloss), ("f", f)):
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {t.dtype}")
        check_device("logits", logits, name, t)
    if dloss.dim():
        raise ValueError(f"dloss must be a scalar, not {tuple(dloss.shape)}")
    if f.dim() != 2 or f.shape[1:] != logits.shape[1:]:
        raise ValueError(f"f must be [B, {logits.shape[-1]}], not {tuple(f.shape)}")
    _check(logits, len(f), scoring_func)
