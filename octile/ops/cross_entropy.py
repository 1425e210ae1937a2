"""Cross-entropy of logits and labels, row by row, and the gradient of the logits.

    loss[i]        log Σ_j exp(logits[i, j]) − logits[i, label[i]]
    dlogits[i, j]  dloss[i] · (exp(logits[i, j] − lse[i]) − [j = label[i]])

In torch's functions the traffic of a BF16 logit is 36 bytes: the conversion to FP32 moves 6, the logarithmic softmax 8,
its gradient 4, the gradient of the logits 12, and its conversion to BF16 6. Here it is 6: the forward pass reads the
logits and saves the logarithm of each row's sum, `lse`; the backward pass reads them again, recomputes the softmax and
writes the result.

The reference computes in FP32 and rounds dlogits once. The order in which the exponentials of a row are summed is
unspecified, and a GPU's exponential and logarithm differ from the CPU's. Its lse differs from the reference by at most
2⁻²⁰ · (1 + |lse|), and for a given lse its exp(logits − lse) by a share of at most (8 + |logits − lse|) · 2⁻²³.

The logits are not overwritten by their gradient, although that would save their size in memory: a second backward pass
through the same graph (`retain_graph=True`) reads them again.

Shapes: logits [M, V]; a row is a position, whose label is the index of the correct class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES, check_device, check_input_dtype

IGNORED = -100  # the label of a row that has no loss; torch's default


@operator()
def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss of each row in nats.

    Args:
        logits: [M, V], float32, bfloat16 or float16, any strides, V at least 1.
        labels: int64 [M], from 0 to V − 1, or −100: the row is ignored.

    Returns:
        losses [M] float32, 0 for ignored rows; lse [M] float32, log Σ exp(logits), for backward. Both are NaN for a row
        with a NaN or +Inf, as in torch.

    Raises:
        TypeError: logits or labels has another dtype.
        ValueError: shapes or devices do not fit together.
        IndexError: on the CPU, a label is out of range. On a GPU nothing waits for the labels: the loss and the
            gradient of such a row are NaN.
    """
    _check(logits, labels)
    x = logits.float()
    losses = F.cross_entropy(x, labels, ignore_index=IGNORED, reduction="none")
    largest = x.amax(-1)
    return losses, largest + (x - largest[:, None]).exp().sum(-1).log()


@cross_entropy.register_fake
def _(logits, labels):
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return losses, torch.empty_like(losses)


@cross_entropy.register_kernel("cuda")
def _(logits, labels):
    from octile.kernels.triton import cross_entropy as kernel  # late: a machine without a GPU has no Triton

    _check(logits, labels)
    return kernel.launch(logits, labels, IGNORED)


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the logarithm of the softmax of logits [M, V], float32: bit for bit 0 minus the loss of each label."""
    if not logits.is_cuda:
        return logits.float().log_softmax(-1)
    _, lse = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
    return logits.float() - lse[:, None]


@operator()
def cross_entropy_backward(
    dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the gradient of the logits in FP32, rounded once.

    Args:
        dlosses: float32 [M], any strides: the gradients of the losses.
        logits, labels: as in the forward pass.
        lse: float32 [M], from the forward pass.
        dtype: that of the result: float32, bfloat16 or float16; None: that of logits.

    Returns:
        dlogits [M, V], contiguous; zeros in ignored rows, whatever the logits and dlosses are there.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
        IndexError: as in `cross_entropy`.
    """
    _check_backward(dlosses, logits, labels, lse, dtype)
    counted = labels != IGNORED
    outside = labels[counted & ((labels < 0) | (labels >= logits.shape[1]))]
    if len(outside):
        raise IndexError(f"labels must be from 0 to {logits.shape[1] - 1}, or {IGNORED}, not {int(outside[0])}")
    p = (logits.float() - lse[:, None]).exp()
    p.scatter_add_(1, labels.where(counted, 0)[:, None], torch.full_like(p[:, :1], -1.0))
    return (p * dlosses[:, None]).where(counted[:, None], 0).to(dtype or logits.dtype).contiguous()


@cross_entropy_backward.register_fake
def _(dlosses, logits, labels, lse, dtype=None):
    return logits.new_empty(logits.shape, dtype=dtype or logits.dtype)


@cross_entropy_backward.register_kernel("cuda")
def _(dlosses, logits, labels, lse, dtype=None):
    from octile.kernels.triton import cross_entropy as kernel

    _check_backward(dlosses, logits, labels, lse, dtype)
    return kernel.launch_backward(dlosses, logits, labels, lse, IGNORED, dtype or logits.dtype)


def _check_backward(dlosses: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, dtype: torch.dtype | None) -> None:
    _check(logits, labels)
    if dtype is not None and dtype not in INPUT_DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or None, not {dtype}")
    for name, t in (("dlosses", dlosses), ("lse", lse)):
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {t.dtype}")
        _check_rows(name, t, logits)


def _check(logits: Tensor, labels: Tensor) -> None:
    check_input_dtype("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"logits must be a matrix [M, V] with V at least 1, not {tuple(logits.shape)}")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels must be int64, not {labels.dtype}")
    _check_rows("labels", labels, logits)


def _check_rows(name: str, t: Tensor, logits: Tensor) -> None:
    if t.shape != logits.shape[:1]:
        raise ValueError(f"{name} must be ({len(logits)},), one for each row of logits, not {tuple(t.shape)}")
    check_device("logits", logits, name, t)
