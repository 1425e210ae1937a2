"""The recipes that are compared: those of the library by name, and variations that change one thing.

variation            change
nudged               BF16, starting from weights that were rounded to BF16 once; its distance from BF16 is the noise
control              E4M3 with one scale per tensor for inputs and weights, and no scale for gradients. The loss is a
                     mean over 65,536 tokens, so most gradient values are below 2⁻¹⁰, half of E4M3's smallest, and
                     become zero: FP8 layers hardly learn. It has to fail, and visibly
e5m2                 E5M2 for all operands, which has 2 bits of mantissa instead of E4M3's 3. The control near the bar:
                     it should end measurably above BF16. The bootstrap over text finds it; two seeds do not
no_promotion         `per_tensor`, accumulated in the tensor core alone (octile's Hopper kernel without promotion).
                     Tiles need promotion, because each 128 elements along K have their own scales
no_e5m6              attention saves its output for backward in BF16
float32_scales       input scales are not rounded to powers of two, so what wgrad reads is rounded twice
weights_1x128        weights in 1×128 tiles like activations, along K of each GEMM
blockwise_gradients  gradients in 128×128 blocks, which diverged for DeepSeek-V3 (arXiv 2412.19437, §B.2)
fp32_moments         AdamW's moments in FP32
gemms_alone          GEMMs in FP8, but nothing that is saved for backward in 8 bits or in E5M6
without_fprop        `gemms_alone` with the forward GEMMs in BF16; `without_dgrad` and `without_wgrad` alike
wgrad_alone          `gemms_alone` with the forward GEMMs and those of input gradients in BF16
mlp_alone            `gemms_alone` with attention's linear layers in BF16; `attention_alone` with all others
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.formats import E5M2
from octile.kernels import backends
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.ops.accumulator import Block, summed_by
from octile.recipe import BLOCK, GEMMS, TENSOR, TILE, GemmFormats, OperandFormat, OptimizerFormats, Recipe

ALIGNMENT = 16  # elements; TMA and torch's CPU GEMM need sizes that are multiples of it


def _variations() -> dict[str, Recipe]:
    v3, per_tensor = Recipe.deepseek_v3(), Recipe.per_tensor()
    formats = v3.formats
    assert formats is not None
    unscaled = OperandFormat(block=TENSOR, amax="unscaled")
    coarse = {name: replace(getattr(formats, name), fmt=E5M2) for name in ("x", "w", "dy", "wgrad_x", "wgrad_dy")}
    free, block = replace(formats.x, scale="float32"), OperandFormat(block=BLOCK)
    alone = replace(v3, attention_output=None, swiglu_inputs=None)
    return {
        "nudged": Recipe.bf16(),
        "control": Recipe("control", GemmFormats.per_tensor(OperandFormat(block=TENSOR), unscaled)),
        "e5m2": replace(v3, formats=GemmFormats(**coarse)),
        "no_promotion": per_tensor,
        "no_e5m6": replace(v3, attention_output=None),
        "float32_scales": replace(
            v3, formats=replace(formats, x=free, wgrad_x=replace(formats.wgrad_x, scale="float32"))
        ),
        "weights_1x128": replace(v3, formats=replace(formats, w=OperandFormat(block=TILE))),
        "blockwise_gradients": replace(v3, formats=replace(formats, dy=block, wgrad_dy=block)),
        "fp32_moments": replace(v3, optimizer=OptimizerFormats(exp_avg="float32", exp_avg_sq="float32")),
        "gemms_alone": alone,
        **{f"without_{gemm}": alone.without(gemm) for gemm in GEMMS},
        "wgrad_alone": alone.without("fprop").without("dgrad"),
        "mlp_alone": replace(alone, exceptions=(("*.self_attn.*", frozenset(GEMMS)),)),
        "attention_alone": replace(alone, exceptions=(("*.mlp.*", frozenset(GEMMS)),)),
    }


VARIATIONS = _variations()


def recipe(name: str) -> Recipe:
    """Return the recipe or variation of a name; its `name` is that name. Transposed weights are cached, as in training.

    Raises:
        ValueError: there is no such recipe.
    """
    found = replace(VARIATIONS[name], name=name) if name in VARIATIONS else Recipe.named(name)
    return replace(found, transposed_weights="cached")


def nudge(name: str, model: nn.Module) -> None:
    """Round the weights to BF16 once if the recipe is `nudged`; otherwise do nothing."""
    if name == "nudged":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())


def accumulator_context(name: str) -> AbstractContextManager[object]:
    """Return the context in which a recipe trains; for `no_promotion`, GEMMs accumulate in the tensor core alone."""
    return summed_by(raw_accumulator) if name == "no_promotion" else nullcontext()


def raw_accumulator(a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block) -> Tensor:
    """Return a[M, K] · b[N, K]ᵀ, each with one scale, accumulated by Hopper's tensor core without promotion: float32.

    On a CPU, which has no such accumulator, it accumulates in FP32.
    """
    (m, k), n = a.shape, b.shape[0]
    if not m or not k:
        return torch.zeros(m, n, device=a.device)
    scale_a, scale_b = (scale.flatten()[:1].view(1, 1) for scale in (a_scale, b_scale))
    if a.is_cuda:
        a, b = (_padded(t, 0, -k % ALIGNMENT) for t in (a, b))
        out = torch.empty(m, n, device=a.device)
        operands = Operand(a, scale_a, (m, a.shape[1])), Operand(b, scale_b, (n, b.shape[1]))
        backends.run("gemm", GemmRequest(Schedule.DENSE, *operands, out.dtype, out, promote=False))
        return out
    a, b = (_padded(t, -len(t) % ALIGNMENT, -k % ALIGNMENT) for t in (a, b))
    return torch._scaled_mm(a, b.mT, scale_a, scale_b, out_dtype=torch.float32)[:m, :n]


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    """Append rows and columns of zeros; contiguous."""
    return F.pad(t.view(torch.uint8), (0, columns, 0, rows)).view(t.dtype).contiguous()
