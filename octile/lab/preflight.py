"""Preflight: which layers of a model would suffer in 8 bits, before a step is trained so.

    found = octile.lab.preflight(model, batches)            # [(inputs, labels), …]; the model returns its loss
    found.recipe.write(Path("recipe.toml"))
    model = octile.convert(model, Recipe.read(Path("recipe.toml")))         # or octile train --recipe recipe.toml

A copy of the model makes a forward and a backward pass for each batch in high precision (BF16 on a GPU, FP32 on a CPU).
The operands of its products are kept, cast as the recipe casts them, and multiplied on the exact model of the tensor
core (`octile.lab.tensor_core`), on a sample of the outputs. A product whose error is too large in any batch is advised
to stay in BF16. `octile.lab.preflight_check` says what a real step in 8 bits then makes of the same batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from octile.lab.capture import OPERANDS, CapturedGemm, capturing
from octile.lab.layers import layer_weights
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.lab.what_if import SAMPLE, Error, SampledGemm, sampled, values
from octile.nn.conversion import apply_recipe
from octile.nn.delayed_scaling import unscaled
from octile.recipe import GemmName, OperandFormat, Recipe
from octile.scaled import ScaledTensor, quantize

MIN_SNR_DB = 20.0  # the error's RMS is a tenth of the outputs'

Loss = Callable[[nn.Module, Any], Tensor]
Place = tuple[str, GemmName]


@dataclass(frozen=True)
class Risk:
    """What a product would lose, in the batch in which it loses most; of experts, for the one that loses most.

    Attributes:
        layer: its name. weight: the same without an expert's number. module: whose recipe decides; not an expert's own.
        batch: the one in which it loses most, counted from 0.
        quantization, accumulation, total: errors of the sampled outputs, by channel.
        blame: the operand whose cast alone does more harm.
        flushed: share of that operand's non-zero values that its cast makes zero.
    """

    layer: str
    weight: str
    module: str
    batch: int
    product: GemmName
    quantization: Error
    accumulation: Error
    total: Error
    blame: str
    flushed: float


@dataclass(frozen=True)
class Preflight:
    """What was found.

    Attributes:
        risks: of every product, the one that loses most first.
        recipe: that was asked about, with the exceptions that are advised.
        least_snr_db: products below it are exceptions.
        silent: products whose sampled outputs were all zeros in every batch.
    """

    risks: Sequence[Risk]
    recipe: Recipe
    least_snr_db: float
    silent: Sequence[Place]

    def excepted(self, risk: Risk) -> bool:
        """Whether it is advised to leave this product in high precision."""
        return risk.product in dict(self.recipe.exceptions).get(risk.module, frozenset())


def preflight(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | None = None,
    *,
    loss: Loss | None = None,
    least_snr_db: float = MIN_SNR_DB,
    arch: str = "sm_90",
    promote_every: int | None = 128,
    sample: int = SAMPLE,
    seed: int = 0,
) -> Preflight:
    """Predicts, layer by layer, what a recipe's products would lose.

    Args:
        model: any with linear layers that `octile.convert` would convert; it stays as it is, also in training or
            evaluation mode: in evaluation a DeepSeek model has no loss of its multi-token prediction.
        batches: a few; each is given to the model as its arguments: a tuple, a dictionary, or one tensor.
        recipe: `Recipe.deepseek_v3()` if not given.
        loss: loss(model, batch) → scalar; if not given, what the model returns, or its `.loss`.
        least_snr_db: products with less are advised to stay in high precision.
        arch, promote_every: of the tensor core, as in `octile.lab.tensor_core_matmul`.
        sample, seed: rows of each operand that are multiplied, and of their drawing.

    Raises:
        TypeError: the model returns no loss.
        ValueError: recipe casts nothing, scales by past steps or scales the loss, has exceptions already; there is no
            batch; an operand is not finite; the model has no layer to convert.
    """
    recipe = recipe or Recipe.deepseek_v3()
    _check(recipe)
    plain = apply_recipe(copy.deepcopy(model), _high_precision(model))
    worst: dict[Place, Risk] = {}
    silent: dict[Place, None] = {}
    for number, batch in enumerate(batches):
        for captured in operands(plain, batch, loss):
            weight = captured.layer if captured.expert is None else captured.layer.rpartition(".")[0]
            place = weight, captured.product
            at = SampledGemm.of(captured, sample, seed)
            if not at.exact.any():
                silent[place] = None
                continue
            risk = _risk(at, recipe, weight, _module_of(plain, weight), number, arch, promote_every)
            worst[place] = max(worst.get(place, risk), risk, key=lambda r: r.total.noise)
    if not worst:
        raise ValueError("batches must hold at least one whose products are not all zeros")
    risks = sorted(worst.values(), key=lambda r: -r.total.noise)
    least = 10 ** (-least_snr_db / 10)
    kept: dict[str, set[GemmName]] = {}
    for risk in risks:
        if risk.total.noise > least:
            kept.setdefault(risk.module, set()).add(risk.product)
    exceptions = tuple((module, frozenset(products)) for module, products in sorted(kept.items()))
    never = [place for place in silent if place not in worst]
    return Preflight(risks, replace(recipe, exceptions=exceptions), least_snr_db, never)


def operands(model: nn.Module, batch: Any, loss: Loss | None = None) -> tuple[CapturedGemm, ...]:
    """The operands of all products of one forward and backward pass of a converted model."""
    with capturing(model) as recorder:
        (loss or model_loss)(model, batch).backward()
    model.zero_grad(set_to_none=True)
    return recorder.products()


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """What the model returns for a batch, or its `.loss`.

    Raises:
        TypeError: that is no scalar.
    """
    if isinstance(batch, Mapping):
        returned = model(**batch)
    else:
        returned = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = getattr(returned, "loss", returned)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"model must return a loss, a scalar, or something with .loss, not {shape}: give loss=")
    return found


def error_by_channel(found: Tensor, reference: Tensor) -> Error:
    """The error of outputs [M, N] with every channel, a column, in units of its own RMS; columns of zeros are left out.

    A few channels are often much larger than the others. They would hide what happens to these.
    """
    size = reference.square().mean(0).sqrt()
    return Error.between(found[:, size > 0] / size[size > 0], reference[:, size > 0] / size[size > 0])


def _check(recipe: Recipe) -> None:
    formats = recipe.formats
    if formats is None:
        raise ValueError(f"recipe {recipe.name!r} makes no product in 8 bits, so nothing is at risk")
    if formats.is_delayed:
        raise ValueError(f"recipe {recipe.name!r} scales by past steps, and a preflight knows none")
    if recipe.loss_scale is not None:
        raise ValueError(f"recipe {recipe.name!r} scales the loss by what only a run finds")
    if recipe.exceptions or recipe.high_precision:
        raise ValueError(f"recipe {recipe.name!r} has exceptions already: give it without")


def _high_precision(model: nn.Module) -> Recipe:
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return Recipe.bf16() if on_gpu else Recipe.float32()


def _module_of(model: nn.Module, weight: str) -> str:
    owner = layer_weights(model).modules[weight]
    return next(name for name, module in model.named_modules() if module is owner)


def _risk(
    at: SampledGemm, recipe: Recipe, weight: str, module: str, batch: int, arch: str, promote_every: int | None
) -> Risk:
    captured = at.captured
    whole_a, whole_b = quantize_as_recipe(recipe, captured)
    a, b = sampled(whole_a, at.rows_a), sampled(whole_b, at.rows_b)
    before_a, before_b = captured.a[at.rows_a].double(), captured.b[at.rows_b].double()
    quantized = values(a) @ values(b).mT
    by_a, by_b = (error_by_channel(y, at.exact).noise for y in (values(a) @ before_b.mT, before_a @ values(b).mT))
    sums = quantized
    if torch.int8 not in (a.data.dtype, b.data.dtype):  # whose sums are exact
        sums = tensor_core_scaled_matmul(
            a.data, a.scale, a.block, b.data, b.scale, b.block, arch, promote_every
        ).double()
    blamed = 0 if by_a >= by_b else 1
    before, after = ((captured.a, whole_a), (captured.b, whole_b))[blamed]
    nonzero = before != 0
    return Risk(
        captured.layer,
        weight,
        module,
        batch,
        captured.product,
        error_by_channel(quantized, at.exact),
        error_by_channel(sums, quantized),
        error_by_channel(sums, at.exact),
        OPERANDS[captured.product][blamed],
        (((after.data.float() == 0) & nonzero).sum() / nonzero.sum().clamp(min=1)).item(),
    )


def quantize_as_recipe(recipe: Recipe, captured: CapturedGemm) -> tuple[ScaledTensor, ScaledTensor]:
    """Both operands as the recipe casts them; wgrad's x is made from what fprop kept."""
    formats = recipe.formats
    assert formats is not None
    if captured.product == "fprop":
        return _cast(captured.a, formats.x), _cast(captured.b, formats.w)
    if captured.product == "dgrad":
        return _cast(captured.a, formats.dy), _cast(captured.b.mT, formats.w).mT
    x = _cast(captured.b.mT, formats.x)
    if formats.wgrad_x != formats.x:
        x = _cast(x.dequantize(), formats.wgrad_x)
    return _cast(captured.a.mT, formats.wgrad_dy).mT, x.mT


def _cast(t: Tensor, cast: OperandFormat) -> ScaledTensor:
    t = t.contiguous()
    return unscaled(t, cast) if cast.amax == "unscaled" else quantize(t, cast.block, cast.fmt, cast.scale)
