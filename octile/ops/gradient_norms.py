"""The Euclidean norm of each of many tensors, in one pass over memory, for clipping.

The reference uses torch's function. A GPU sums the squares in another order, the same at each call with the same
shapes and dtypes; its norms have a relative error of at most 2⁻²⁰ against exact ones.
"""

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


@operator()
def gradient_norms(gradients: list[Tensor]) -> Tensor:
    """Compute the norms in FP32.

    Args:
        gradients: at least one tensor, float32, bfloat16 or float16, of any shapes, on one device.

    Returns:
        float32 [N]: the norm of each tensor. It is NaN if, and only if, an element is not finite, and Inf if all are
        finite but the sum of their squares exceeds FP32's range.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: there are none, or they lie on several devices.
    """
    _check(gradients)
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
    for i in (~norms.isfinite()).nonzero().flatten().tolist():
        norms[i] = torch.inf if gradients[i].isfinite().all() else torch.nan
    return norms


@gradient_norms.register_fake
def _(gradients):
    return gradients[0].new_empty(len(gradients), dtype=torch.float32)


@gradient_norms.register_kernel("cuda")
def _(gradients):
    from octile.kernels.triton import gradient_norms as kernel  # late: a machine without a GPU has no Triton

    _check(gradients)
    return kernel.launch([gradient.contiguous() for gradient in gradients])


def _check(gradients: list[Tensor]) -> None:
    if not gradients:
        raise ValueError("gradients must have at least one tensor")
    for i, gradient in enumerate(gradients):
        check_input_dtype(f"gradients[{i}]", gradient)
        check_device("gradients[0]", gradients[0], f"gradients[{i}]", gradient)
