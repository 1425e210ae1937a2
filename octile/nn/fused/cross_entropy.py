"""Cross-entropy of a head's logits: on a GPU one kernel each way, which reads the logits in the dtype that they have.

On a CPU, in transforms, on subclasses of Tensor and in other dtypes it is torch's own, of the logits in FP32, since
octile has no kernel for it there. Second derivatives are torch's, too.

Shapes: any leading dimensions, V classes.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from octile.nn.double_backward import creates_graph, differentiable_gradients
from octile.nn.fused.elementwise import can_use_operators
from octile.ops import cross_entropy as operators
from octile.ops.cross_entropy import IGNORED


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of the rows that count, in nats; differentiable.

    Args:
        logits: [..., V].
        labels: int64 [...], from 0 to V − 1, or −100: the row does not count.

    Returns:
        float32 []; NaN if no row counts, as in torch.

    Raises:
        IndexError: on the CPU, a label is out of range. On a GPU the loss is then NaN.
    """
    if not can_use_kernel(logits):
        return F.cross_entropy(_as_matrix(logits).float(), labels.flatten(), ignore_index=IGNORED)
    return mean_loss(cross_entropies(logits, labels), labels)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each row, float32 [...], 0 where it does not count; arguments as in `cross_entropy`."""
    matrix, classes = _as_matrix(logits), labels.flatten()
    losses = _CrossEntropy.apply(matrix, classes) if can_use_kernel(logits) else _cross_entropy(matrix, classes)
    return losses.view(labels.shape)


def _as_matrix(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def mean_loss(losses: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of the losses [...] of the rows that count, by their labels [...]."""
    return losses.sum() / (labels != IGNORED).sum()


def _cross_entropy(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    return F.cross_entropy(logits_MV.float(), labels_M, ignore_index=IGNORED, reduction="none")


def can_use_kernel(logits: Tensor) -> bool:
    """Whether octile's kernels compute the losses of logits, or of what a head reads."""
    return logits.is_cuda and can_use_operators(logits)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        losses_M, lse_M = operators.cross_entropy(logits_MV, labels_M)
        ctx.save_for_backward(logits_MV, labels_M, lse_M)
        return losses_M

    @staticmethod
    def backward(ctx: Any, dlosses_M: Tensor) -> tuple[Tensor | None, None]:
        logits_MV, labels_M, lse_M = ctx.saved_tensors
        if creates_graph():
            (gradient,) = differentiable_gradients(lambda x: _cross_entropy(x, labels_M), (logits_MV,), (dlosses_M,))
            return gradient, None
        return operators.cross_entropy_backward(dlosses_M, logits_MV, labels_M, lse_M), None
