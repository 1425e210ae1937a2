"""The recipes that are compared: those of the library by their names, and variations that change one thing.

nudged               BF16, from weights that were rounded to BF16 once: how far apart runs end that differ by no more
control              E4M3 with one scale a tensor for inputs and weights, and none for gradients. The loss is a mean
                     over 65,536 tokens, so most of a gradient's numbers are below 2⁻¹⁰, half of E4M3's smallest, and
                     become 0: layers in 8 bits hardly learn. It has to fail, and visibly
no_promotion         `per_tensor`, whose sums stay in the tensor core's own accumulator (octile's kernel for Hopper,
                     never promoted); tiles cannot do so, since each sum of 128 has scales of its own
no_e5m6              attention keeps what autograd keeps: its output in BF16
float32_scales       inputs' scales are any numbers, so what wgrad reads is rounded twice
weights_1x128        weights in tiles as activations are, each product's along what it sums over
blockwise_gradients  gradients in 128×128, which DeepSeek-V3 (arXiv 2412.19437) saw diverge (§B.2)
fp32_moments         AdamW's two moments in FP32
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.kernels import backends
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.ops.accumulator import Block, summed_by
from octile.recipe import BLOCK, TENSOR, TILE, GemmFormats, OperandFormat, OptimizerFormats, Recipe

STEP = 16  # numbers: the copy engine reads rows of whole steps, and torch's product on a CPU multiplies them


def _variations() -> dict[str, Recipe]:
    v3, per_tensor = Recipe.deepseek_v3(), Recipe.per_tensor()
    formats = v3.formats
    assert formats is not None
    unscaled = OperandFormat(block=TENSOR, amax="unscaled")
    free, block = replace(formats.x, scale="float32"), OperandFormat(block=BLOCK)
    return {
        "nudged": Recipe.bf16(),
        "control": Recipe("control", GemmFormats.per_tensor(OperandFormat(block=TENSOR), unscaled)),
        "no_promotion": per_tensor,
        "no_e5m6": replace(v3, attention_output=None),
        "float32_scales": replace(
            v3, formats=replace(formats, x=free, wgrad_x=replace(formats.wgrad_x, scale="float32"))
        ),
        "weights_1x128": replace(v3, formats=replace(formats, w=OperandFormat(block=TILE))),
        "blockwise_gradients": replace(v3, formats=replace(formats, dy=block, wgrad_dy=block)),
        "fp32_moments": replace(v3, optimizer=OptimizerFormats(exp_avg="float32", exp_avg_sq="float32")),
    }


VARIATIONS = _variations()


def recipe(name: str) -> Recipe:
    """The recipe of that name, which it bears.

    Raises:
        ValueError: there is none.
    """
    if name in VARIATIONS:
        return replace(VARIATIONS[name], name=name)
    return Recipe.named(name)


def nudge(name: str, model: nn.Module) -> None:
    """What a recipe does to a run's weights before its first step: only `nudged` does anything."""
    if name == "nudged":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())


def around(name: str) -> AbstractContextManager[object]:
    """What the steps of a recipe happen inside: for no_promotion, sums of the tensor core alone."""
    return summed_by(raw_accumulator) if name == "no_promotion" else nullcontext()


def raw_accumulator(a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block) -> Tensor:
    """a[M, K] · b[N, K]ᵀ, each with one scale, as Hopper's tensor cores sum it on their own: float32 [M, N].

    A CPU has no such accumulator: there the sum is FP32's.
    """
    (m, k), n = a.shape, b.shape[0]
    if not m or not k:
        return torch.zeros(m, n, device=a.device)
    one, other = (scale.flatten()[:1].view(1, 1) for scale in (a_scale, b_scale))
    if a.is_cuda:
        a, b = (_padded(t, 0, -k % STEP) for t in (a, b))
        out = torch.empty(m, n, device=a.device)
        operands = Operand(a, one, (m, a.shape[1])), Operand(b, other, (n, b.shape[1]))
        backends.run("gemm", GemmRequest(Schedule.DENSE, *operands, out.dtype, out, promote=False))
        return out
    a, b = (_padded(t, -len(t) % STEP, -k % STEP) for t in (a, b))
    return torch._scaled_mm(a, b.mT, one, other, out_dtype=torch.float32)[:m, :n]


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    """With so many more rows and columns of zeros, contiguous."""
    return F.pad(t.view(torch.uint8), (0, columns, 0, rows)).view(t.dtype).contiguous()
