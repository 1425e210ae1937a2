"""Preflight: predict which layers of a model would lose too much in 8 bits, before training with a recipe.

    found = octile.lab.preflight(model, batches)            # [(inputs, labels), …]; the model returns its loss
    found.recipe.write(Path("recipe.toml"))
    model = octile.convert(model, Recipe.read(Path("recipe.toml")))         # or octile train --recipe recipe.toml

A copy of the model runs a forward and a backward pass on each batch in high precision (BF16 on a GPU, FP32 on a CPU).
The operands of its GEMMs are captured, quantized as the recipe says, and multiplied on the tensor core model
(`octile.lab.tensor_core`), for a sample of the outputs. If the error of a GEMM is too large in any batch, the recipe
gets an exception that leaves this GEMM in BF16. `octile.lab.preflight_check` compares the prediction with a real step.
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
from octile.lab.what_if import SAMPLE, Error, SampledGemm, sample_rows, values
from octile.nn.conversion import apply_recipe
from octile.nn.delayed_scaling import quantize_unscaled
from octile.recipe import GemmName, OperandFormat, Recipe
from octile.scaled import ScaledTensor, quantize

MIN_SNR_DB = 20.0  # the RMS error is a tenth of the outputs' RMS
NOT_FINITE = "use finite weights, or another text"  # the remedy where an operand has NaN or Inf

Loss = Callable[[nn.Module, Any], Tensor]
GemmKey = tuple[str, GemmName]


@dataclass(frozen=True)
class Risk:
    """The predicted error of a GEMM, in the batch and for the expert in which it is largest.

    Attributes:
        layer: the layer's name.
        weight: the layer's name without an expert's number.
        module: the name of the module that holds the layer's recipe.
        batch: the batch in which the error is largest, counted from 0.
        gemm: fprop, dgrad or wgrad.
        quantization, accumulation, total: errors of the sampled outputs, by channel.
        blame: the operand whose quantization alone causes more error.
        flushed: the share of that operand's nonzero values that become zero.
        by_batch: the noise over signal in each batch in which the GEMM has outputs; of experts, the largest.
    """

    layer: str
    weight: str
    module: str
    batch: int
    gemm: GemmName
    quantization: Error
    accumulation: Error
    total: Error
    blame: str
    flushed: float
    by_batch: tuple[float, ...] = ()


@dataclass(frozen=True)
class Preflight:
    """The results of `preflight`.

    Attributes:
        risks: the predicted error of every GEMM, the largest first.
        recipe: the recipe with the advised exceptions.
        least_snr_db: GEMMs with a lower SNR are exceptions.
        silent: GEMMs whose sampled outputs are all zeros in every batch.
    """

    risks: Sequence[Risk]
    recipe: Recipe
    least_snr_db: float
    silent: Sequence[GemmKey]

    def is_excepted(self, risk: Risk) -> bool:
        """Whether the advice is to leave this GEMM in high precision."""
        return risk.gemm in dict(self.recipe.exceptions).get(risk.module, frozenset())

    def batches_below(self, risk: Risk) -> int:
        """The number of batches in which this GEMM has a lower SNR than `least_snr_db`."""
        return sum(noise > max_noise(self.least_snr_db) for noise in risk.by_batch)

    @property
    def disputed(self) -> list[Risk]:
        """The GEMMs that are below `least_snr_db` in some batches and not in others, so that their advice is unsure."""
        return [risk for risk in self.risks if 0 < self.batches_below(risk) < len(risk.by_batch)]


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
    """Predict the error of every GEMM under a recipe.

    Args:
        model: a model with linear layers that `octile.convert` would convert. It is not changed, and keeps its training
            or evaluation mode; in evaluation mode a DeepSeek model has no multi-token prediction loss.
        batches: a few batches; each holds the model's arguments as a tuple, a dictionary, or one tensor.
        recipe: `Recipe.deepseek_v3()` if not given.
        loss: loss(model, batch) → scalar; if not given, the model's return value or its `.loss`.
        least_snr_db: GEMMs with a lower SNR are advised to stay in high precision.
        arch, promote_every: the tensor core, as in `octile.lab.tensor_core_matmul`.
        sample, seed: the number of rows of each operand to multiply, and the seed with which they are drawn.

    Raises:
        TypeError: the model returns no loss.
        ValueError: as `check_recipe`; there is no batch; an operand is not finite; the model has no layer to convert.
    """
    recipe = recipe or Recipe.deepseek_v3()
    check_recipe(recipe)
    reference = apply_recipe(copy.deepcopy(model), _high_precision(model))
    worst: dict[GemmKey, Risk] = {}
    noises: dict[GemmKey, dict[int, float]] = {}
    silent: dict[GemmKey, None] = {}
    for number, batch in enumerate(batches):
        for captured in capture_operands(reference, batch, loss):
            weight = captured.layer if captured.expert is None else captured.layer.rpartition(".")[0]
            key = weight, captured.gemm
            sampled = SampledGemm.draw(captured, sample, seed, NOT_FINITE)
            if not sampled.exact.any():
                silent[key] = None
                continue
            risk = _risk(sampled, recipe, weight, _module_of(reference, weight), number, arch, promote_every)
            worst[key] = max(worst.get(key, risk), risk, key=lambda r: r.total.noise)
            batch_noises = noises.setdefault(key, {})
            batch_noises[number] = max(batch_noises.get(number, 0.0), risk.total.noise)
    if not worst:
        raise ValueError("batches must hold at least one whose GEMMs are not all zeros")
    found = (replace(risk, by_batch=tuple(noises[key].values())) for key, risk in worst.items())
    risks = sorted(found, key=lambda r: -r.total.noise)
    excepted: dict[str, set[GemmName]] = {}
    for risk in risks:
        if risk.total.noise > max_noise(least_snr_db):
            excepted.setdefault(risk.module, set()).add(risk.gemm)
    exceptions = tuple((module, frozenset(gemms)) for module, gemms in sorted(excepted.items()))
    always_silent = [key for key in silent if key not in worst]
    return Preflight(risks, replace(recipe, exceptions=exceptions), least_snr_db, always_silent)


def max_noise(least_snr_db: float) -> float:
    """Return the noise over signal at an SNR in dB."""
    return 10 ** (-least_snr_db / 10)


def capture_operands(model: nn.Module, batch: Any, loss: Loss | None = None) -> tuple[CapturedGemm, ...]:
    """Return the operands of all GEMMs of one forward and backward pass of a converted model."""
    with capturing(model) as recorder:
        (loss or model_loss)(model, batch).backward()
    model.zero_grad(set_to_none=True)
    return recorder.gemms()


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the model's return value for a batch, or its `.loss`.

    Raises:
        TypeError: it is not a scalar.
    """
    if isinstance(batch, Mapping):
        returned = model(**batch)
    else:
        returned = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = getattr(returned, "loss", returned)
    if not isinstance(found, Tensor) or found.numel() != 1:
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"model must return a scalar loss, or an object with .loss, not {shape}: pass loss=")
    return found


def error_by_channel(found: Tensor, reference: Tensor) -> Error:
    """Return the error of outputs [M, N] with each channel (column) divided by its RMS, without columns of zeros.

    Otherwise a few channels, which are often much larger than the others, would hide the errors of the others.
    """
    size = reference.square().mean(0).sqrt()
    return Error.between(found[:, size > 0] / size[size > 0], reference[:, size > 0] / size[size > 0])


def check_recipe(recipe: Recipe) -> None:
    """Check that a preflight can predict errors under a recipe, and advise exceptions from it.

    Raises:
        ValueError: the recipe has no GEMM in 8 bits, has delayed scaling or loss scaling, takes no exceptions or has
            some already.
    """
    formats = recipe.formats
    if formats is None:
        raise ValueError(f"recipe {recipe.name!r} has no GEMM in 8 bits, so there is nothing to predict")
    if formats.is_delayed:
        raise ValueError(
            f"recipe {recipe.name!r} has delayed scaling, which needs past steps, and a preflight has none"
        )
    if recipe.loss_scale is not None:
        raise ValueError(f"recipe {recipe.name!r} has dynamic loss scaling, which needs a training run")
    if recipe.batch_invariant:
        raise ValueError(
            f"recipe {recipe.name!r} has all linear layers in FP8, so that none can be advised to stay in BF16: use "
            "--recipe deepseek_v3, whose formats and predicted errors are the same"
        )
    if recipe.exceptions or recipe.high_precision:
        raise ValueError(
            f"recipe must have no exceptions yet, but the given variant of {recipe.name!r} has some: leave out its "
            "[[keep]] tables"
        )


def _high_precision(model: nn.Module) -> Recipe:
    on_gpu = any(parameter.is_cuda for parameter in model.parameters())
    return Recipe.bf16() if on_gpu else Recipe.float32()


def _module_of(model: nn.Module, weight: str) -> str:
    owner = layer_weights(model).modules[weight]
    return next(name for name, module in model.named_modules() if module is owner)


def _risk(
    sampled: SampledGemm, recipe: Recipe, weight: str, module: str, batch: int, arch: str, promote_every: int | None
) -> Risk:
    captured = sampled.captured
    whole_a, whole_b = quantize_as_recipe(recipe, captured)
    a, b = sample_rows(whole_a, sampled.rows_a), sample_rows(whole_b, sampled.rows_b)
    before_a, before_b = captured.a[sampled.rows_a].double(), captured.b[sampled.rows_b].double()
    quantized = values(a) @ values(b).mT
    noise_a, noise_b = (
        error_by_channel(y, sampled.exact).noise for y in (values(a) @ before_b.mT, before_a @ values(b).mT)
    )
    sums = quantized
    if torch.int8 not in (a.data.dtype, b.data.dtype):  # INT8 sums are exact
        sums = tensor_core_scaled_matmul(
            a.data, a.scale, a.block, b.data, b.scale, b.block, arch, promote_every
        ).double()
    blamed = 0 if noise_a >= noise_b else 1
    before, after = ((captured.a, whole_a), (captured.b, whole_b))[blamed]
    nonzero = before != 0
    return Risk(
        captured.layer,
        weight,
        module,
        batch,
        captured.gemm,
        error_by_channel(quantized, sampled.exact),
        error_by_channel(sums, quantized),
        error_by_channel(sums, sampled.exact),
        OPERANDS[captured.gemm][blamed],
        (((after.data.float() == 0) & nonzero).sum() / nonzero.sum().clamp(min=1)).item(),
    )


def quantize_as_recipe(recipe: Recipe, captured: CapturedGemm) -> tuple[ScaledTensor, ScaledTensor]:
    """Quantize both operands as the recipe does; most requantize wgrad's x from the x that fprop saved."""
    formats = recipe.formats
    assert formats is not None
    if captured.gemm == "fprop":
        return _quantize(captured.a, formats.x), _quantize(captured.b, formats.w)
    if captured.gemm == "dgrad":
        if formats.w.block[0] == 1:  # along the dimension that dgrad sums over, see `GemmFormats`
            return _quantize(captured.a, formats.dy), _quantize(captured.b, formats.w)
        return _quantize(captured.a, formats.dy), _quantize(captured.b.mT, formats.w).mT
    x = captured.b.mT
    if formats.requantizes_x and formats.wgrad_x != formats.x:
        x = _quantize(x, formats.x).dequantize()
    return _quantize(captured.a.mT, formats.wgrad_dy).mT, _quantize(x, formats.wgrad_x).mT


def _quantize(t: Tensor, fmt: OperandFormat) -> ScaledTensor:
    t = t.contiguous()
    return quantize_unscaled(t, fmt) if fmt.amax == "unscaled" else quantize(t, fmt.block, fmt.fmt, fmt.scale)
