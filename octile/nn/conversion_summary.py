"""What a conversion reached: how many layers, and which shares of the parameters and of the FLOPs are quantized.

Counted are fprop, dgrad and wgrad of linear layers, gates and experts, of the experts those that a token is sent to.
Each of the three has as many operations. Attention's scores depend on the length of the text and are left out.
"""

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from octile.nn.eager_kernels import FusedKernels
from octile.nn.linear import RecipeHolder
from octile.recipe import GEMMS, Recipe

log = logging.getLogger("octile")


def log_or_print(text: str) -> None:
    """Log a text if logging is set up for octile, else print it to stderr."""
    if log.isEnabledFor(logging.INFO) or log.level != logging.NOTSET:
        log.info(text)
    else:
        print(text, file=sys.stderr)


class Shares(NamedTuple):
    """Shares from 0 to 1.

    Attributes:
        parameters: share of all parameters of the model, each counted once.
        flops: share of the floating-point operations of a token's fprop, dgrad and wgrad.
    """

    parameters: float
    flops: float


class ConversionSummary(str):
    """The text that `convert` prints, with what it says.

    Attributes:
        converted: the number of linear layers that were converted; experts count as the layers that they stack.
        skipped: reason → the number of layers that were not.
        quantized: the shares of the model that are quantized.
        fused: how many modules have fused kernels in eager mode.
        recomputes_transposed_weights: whether the backward pass quantizes the transposed weights again.
    """

    converted: int
    skipped: Mapping[str, int]
    quantized: Shares
    fused: FusedKernels
    recomputes_transposed_weights: bool

    @classmethod
    def make(
        cls,
        text: str,
        converted: int,
        skipped: Mapping[str, int],
        quantized: Shares,
        fused: FusedKernels,
        recomputes_transposed_weights: bool,
    ) -> Self:
        """Return the text with its attributes; it ends with those that are not zero."""
        if quantized.flops:
            text += f"; quantized: {quantized.parameters:.1%} of the parameters, {quantized.flops:.1%} of the FLOPs"
        if recomputes_transposed_weights:
            text += "; transposed weights: recomputed"
        if any(fused):
            text += f"; fused in eager mode: {fused.norms} norms, {fused.rotary_embeddings} rotary embeddings"
        summary = cls(text)
        summary.converted, summary.skipped, summary.quantized = converted, skipped, quantized
        summary.fused, summary.recomputes_transposed_weights = fused, recomputes_transposed_weights
        return summary


class _Gemm(NamedTuple):
    """The GEMMs of a weight: their floating-point operations per token, and the share of these that is quantized."""

    weight: Tensor
    flops: float
    is_layer_quantized: bool
    quantized: float


def quantized_shares(model: nn.Module) -> Shares:
    """Count which shares of a model are quantized."""
    gemms = list(_gemms(model, None, "", 1))
    quantized = {id(gemm.weight): gemm.weight.numel() for gemm in gemms if gemm.is_layer_quantized}
    parameters = sum(p.numel() for p in model.parameters())
    flops = sum(gemm.flops for gemm in gemms)
    return Shares(
        sum(quantized.values()) / parameters if parameters else 0.0,
        sum(gemm.flops * gemm.quantized for gemm in gemms) / flops if flops else 0.0,
    )


def _gemms(module: nn.Module, parent: nn.Module | None, name: str, uses: float) -> Iterator[_Gemm]:
    """Yield the GEMMs of a module that a token uses so many times."""
    experts = _stacked_experts(module)
    if isinstance(module, nn.ModuleList) and name == "experts":
        experts = len(module)
    if experts:
        uses *= _chosen_experts(module, parent, experts) / experts
    recipe = recipe_of(module)
    is_quantized = recipe is not None and recipe.formats is not None
    for weight in gemm_weights(module):
        quantized = 0.0 if recipe is None or not is_quantized else 1 - len(recipe.high_precision) / len(GEMMS)
        yield _Gemm(weight, 2 * len(GEMMS) * uses * weight.numel(), is_quantized, quantized)
    for child_name, child in module.named_children():
        yield from _gemms(child, module, child_name, uses)


def recipe_of(module: nn.Module) -> Recipe | None:
    """Return the recipe of a layer or of stacked experts; None: it has none."""
    holder = _recipe_holder(module)
    return None if holder is None else holder.recipe


def _recipe_holder(module: nn.Module) -> RecipeHolder[Any] | None:
    """Return what holds a module's recipe: itself or, for transformers' experts, a submodule without parameters."""
    if isinstance(module, RecipeHolder):
        return module
    children = (child for child in module.children() if isinstance(child, RecipeHolder))
    return next((child for child in children if not any(True for _ in child.parameters())), None)


def gemm_weights(module: nn.Module) -> list[Tensor]:
    """Return a module's own weights that a GEMM reads: [N, K] or stacked."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return []
    if _stacked_experts(module):
        return [p for p in module.parameters(recurse=False) if p.dim() == 3]
    return [p for name, p in module.named_parameters(recurse=False) if p.dim() == 2 and name.endswith("weight")]


def _stacked_experts(module: nn.Module) -> int:
    """Return the number of experts in a module's own stacked weights [E, N, K], 0 if it has none."""
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d | nn.Bilinear):
        return 0
    experts = max([len(p) for p in module.parameters(recurse=False) if p.dim() == 3], default=0)
    is_embedding = experts == 1 and _recipe_holder(module) is None  # of positions, which no GEMM reads
    return 0 if is_embedding else experts


def _chosen_experts(module: nn.Module, parent: nn.Module | None, experts: int) -> int:
    """Return how many of the experts a token is sent to; all of them where nothing says so."""
    owners = [owner for owner in (module, parent) if owner is not None]
    gates = [getattr(owner, name, None) for owner in owners for name in ("gate", "router")]
    configs = [getattr(owner, "config", None) for owner in owners]
    attributes = [(o, name) for o in (*owners, *gates) for name in ("n_chosen", "top_k")]
    attributes += [(c, name) for c in configs for name in ("num_experts_per_tok", "moe_topk", "top_k_experts")]
    found = (getattr(owner, name, None) for owner, name in attributes)
    return next((k for k in found if isinstance(k, int) and 0 < k <= experts), experts)
