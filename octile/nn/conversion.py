"""`convert`: replace the linear layers of a model by FP8 layers, and report which were converted and which were not."""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any

from torch import nn

from octile.nn.conversion_summary import ConversionSummary, quantized_shares
from octile.nn.fused.fusion import FusableModule
from octile.nn.fused.shared_quantization import share_among_children
from octile.nn.linear import Linear, check_recipe, with_class
from octile.nn.mlp import SwiGLU
from octile.nn.moe import Experts
from octile.nn.structure import swiglu_class
from octile.recipe import Recipe

log = logging.getLogger("octile")

Filter = Callable[[str, nn.Module], bool]

# Linear layers that DeepSeek-V3 (§3.3.1) computes in high precision, by the last part of their names, with their roles.
HIGH_PRECISION = {
    "lm_head": "output head",
    "head": "output head",
    "classifier": "output head",
    "score": "output head",
    "gate": "gate",
    "router": "gate",
    "eh_proj": "MTP projection",
}
LEFT_OUT = "left out by filter"
STACKED = "stacked weights that octile cannot convert"

# Packages whose stacked experts are converted, with the module whose `stacked_experts(module)` says how. It is imported
# only where the package is in use.
INTEGRATIONS = {"transformers": "octile.integrations.transformers"}


def convert(model: nn.Module, recipe: Recipe | None = None, filter: Filter | None = None) -> nn.Module:
    """Replace the model's linear layers by `octile.nn.Linear` around the same parameters, in place.

    Output heads, gates, the MTP projection and weights tied to an embedding are not converted, nor is anything that is
    not a linear layer: embeddings, norms, attention. Modules with a method `use_recipe`, such as `Experts`, get the
    recipe, and so do the stacked experts of transformers (`octile.integrations.transformers`); other stacked weights
    [E, N, K] are not converted and count as E layers. A module that computes SwiGLU of three converted layers, or of
    two with gate and up in one, becomes an `MLP` or `GateUpMLP` of the same layers; layers of one module that read its
    input, such as attention's q, k and v, quantize it once. The summary ("converted n of m
    linear layers to deepseek_v3, skipped k: why") goes to the logger `octile` if logging is set up, else to stderr.

    Args:
        model: any module; if it is itself an `nn.Linear`, the new layer is returned.
        recipe: `Recipe.deepseek_v3()` if not given.
        filter: called with the name and the module of each layer (and of experts, which are one module); if it
            returns False, the layer is not converted.

    Returns:
        The model; `model.conversion_summary` is the summary, a text with its numbers as attributes
        (`octile.nn.conversion_summary.ConversionSummary`), among them the shares of the parameters and of the FLOPs.

    Raises:
        TypeError: model is not a torch.nn.Module, or recipe not a Recipe.
        ValueError: the model has no linear layer, or an exception of the recipe matches no converted layer.
    """
    model = apply_recipe(model, recipe, filter)
    if log.isEnabledFor(logging.INFO) or log.level != logging.NOTSET:
        log.info(model.conversion_summary)
    else:
        print(model.conversion_summary, file=sys.stderr)
    return model


def apply_recipe(model: nn.Module, recipe: Recipe | None = None, filter: Filter | None = None) -> nn.Module:
    """Do what `convert` does, without printing the summary."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    check_recipe(recipe)
    recipe = recipe or Recipe.deepseek_v3()
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = list(model.named_modules(remove_duplicate=False))  # a layer with two names is replaced under both
    replacements: dict[nn.Module, nn.Module] = {}
    converted, skipped = 0, Counter[str]()
    reached: list[str] = []
    experts = {module: _experts(module) for _, module in named}

    for name, module in named:
        holder = experts[module]
        if module in replacements:
            model = _replace(model, name, replacements[module])
        elif isinstance(module, nn.Linear):
            reason = _reason_to_skip(name, module, tied, filter)
            replacements[module] = module if reason else Linear.from_linear(module, recipe.for_layer(name))
            reached += [] if reason else [name]
            model = _replace(model, name, replacements[module])
            converted += not reason
            skipped.update([reason] if reason else [])
        elif holder is not None:
            replacements[module] = module
            reason = getattr(holder, "why_unsupported", None)
            if reason is None and filter is not None and not filter(name, module):
                reason = LEFT_OUT
            if reason is None:
                holder.use_recipe(recipe.for_layer(name))
                reached.append(name)
                converted += holder.linear_layers
            else:
                skipped[reason] += holder.linear_layers
        else:
            replacements[module] = module
            skipped.update({STACKED: _stacked(module)})

    model = _fuse(model, named)
    total = converted + skipped.total()
    if total == 0:
        raise ValueError(f"model {type(model).__name__} has no linear layer to convert")
    for pattern, _ in recipe.exceptions:
        if not any(fnmatchcase(name, pattern) for name in reached):
            raise ValueError(
                f"recipe {recipe.name!r} has an exception for {pattern!r}, which matches no converted layer"
            )
    why = ", ".join(f"{n} × {reason}" for reason, n in skipped.most_common() if n)
    exceptions = f" (exceptions: {len(recipe.exceptions)})" if recipe.exceptions else ""
    summary = f"converted {converted} of {total} linear layers to {recipe.name}{exceptions}, skipped {skipped.total()}"
    summary += f": {why}" if why else ""
    if recipe.has_smooth_swiglu and not any(isinstance(module, SwiGLU | Experts) for module in model.modules()):
        summary += "; nothing is smoothed, no octile.nn.MLP or Experts was found"
    summary = ConversionSummary.make(summary, converted, +skipped, quantized_shares(model))
    object.__setattr__(model, "conversion_summary", summary)
    return model


def _fuse(model: nn.Module, named: list[tuple[str, nn.Module]]) -> nn.Module:
    """Have other people's modules compute their converted layers together, where octile's own modules do so."""
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module in named:
        layers = [child for child in module._modules.values() if isinstance(child, Linear)]
        if isinstance(module, FusableModule | nn.Sequential) or len(layers) < 2:
            continue
        kind = swiglu_class(module)
        if kind is not None and all(isinstance(module._modules[layer], Linear) for layer in kind.fusable_layers):
            model = _replace(model, name, replacements.setdefault(module, with_class(kind, module)))
        elif name and len({layer.in_features for layer in layers}) < len(layers):
            share_among_children(module)
    return model


def _reason_to_skip(name: str, layer: nn.Linear, tied: set[int], filter: Filter | None) -> str | None:
    if type(layer) not in (nn.Linear, Linear):
        return f"{type(layer).__name__} (a subclass of nn.Linear)"
    if id(layer.weight) in tied:
        return "tied to an embedding"
    last = name.rpartition(".")[2]
    if last in HIGH_PRECISION:
        return HIGH_PRECISION[last]
    if filter is not None and not filter(name, layer):
        return LEFT_OUT
    return None


def _experts(module: nn.Module) -> Any:
    """Return what gives a recipe to a module with stacked experts: often itself; None for any other module."""
    if isinstance(module, nn.Linear):
        return None
    if hasattr(module, "use_recipe"):
        return module
    integrations = (import_module(name) for package, name in INTEGRATIONS.items() if package in sys.modules)
    found = (integration.stacked_experts(module) for integration in integrations)
    return next((holder for holder in found if holder is not None), None)


def _stacked(module: nn.Module) -> int:
    """Count the matrices in a module's own stacked weights [E, N, K]; those of torch's convolutions do not count."""
    if isinstance(module, nn.Conv1d | nn.ConvTranspose1d | nn.Bilinear):
        return 0
    return sum(len(p) for p in module.parameters(recurse=False) if p.dim() == 3 and len(p) > 1)


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
    return model
