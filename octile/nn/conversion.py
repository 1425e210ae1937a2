"""`convert`: replace the linear layers of a model by FP8 layers, and report which were converted and which were not."""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import nn

from octile.layer_roles import CONV1D, KEPT, check_keep, is_kept, why_high_precision
from octile.nn.conversion_summary import ConversionSummary, log_or_print, quantized_shares
from octile.nn.eager_kernels import use_fused_kernels
from octile.nn.fused.fusion import FusableModule, is_forward_replaced
from octile.nn.fused.layers import torchao_type
from octile.nn.fused.shared_quantization import share_among_children
from octile.nn.joined_linear import JoinedLinear
from octile.nn.linear import Linear
from octile.nn.mlp import SwiGLU, become_swiglu
from octile.nn.moe import Experts
from octile.nn.structure import called_on_one_input, is_called_in_a_row, swiglu_class
from octile.recipe import OptimizerFormats, Recipe, check_recipe

Filter = Callable[[str, nn.Module], bool]

LEFT_OUT = "left out by filter"
PATCHED = "a forward pass that another library has replaced"
STACKED = "stacked weights that octile cannot convert"
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3")  # of experts, in checkpoints

# Packages, or modules of packages, whose stacked experts are converted, with the module whose `stacked_experts(module)`
# says how. It is imported only where the package is in use.
INTEGRATIONS = {
    "transformers": "octile.integrations.transformers",
    "torchtitan.models.moe.moe": "octile.integrations.torchtitan_experts",
}
# The same of packages whose models make masks of causal attention where they are compiled: `skip_causal_masks(model)`.
MASKS = {"transformers": "octile.integrations.transformers_masks"}
# The same of packages whose `load_state_dict` may leave stacked experts as they are: `refuse_lost_experts(model)`.
LOADING = {"transformers": "octile.integrations.transformers_loading"}


def convert(
    model: nn.Module, recipe: Recipe | None = None, filter: Filter | None = None, keep: Sequence[str] = ()
) -> nn.Module:
    """Replace the model's linear layers by `octile.nn.Linear` around the same parameters, in place.

    Output heads, gates, adapters and the MTP projection, by the table in `octile.layer_roles`, and weights tied to an
    embedding are not converted, nor is anything that is not a linear layer: embeddings, norms, attention. Modules with
    a method `use_recipe`, such as `Experts`, get the recipe, and so do the stacked experts of transformers
    (`octile.integrations.transformers`) and of torchtitan (`octile.integrations.torchtitan_experts`); other stacked
    weights [E, N, K] are not converted and count as E layers. A module that computes SwiGLU of three converted layers,
    or of two with gate and up in one, becomes an `MLP`, `FeedForward` or `GateUpMLP`, too. It computes as its own class
    does where its activation, a submodule or function, is replaced later. Layers of one module that read its input,
    such as attention's q, k and v, quantize it once, and are one GEMM where every forward pass calls them
    (`octile.nn.joined_linear`). In eager mode RMSNorm layers and rotary embeddings of other libraries' models run in
    fused kernels, which round once (`octile.nn.eager_kernels`). A model of transformers that is compiled as a whole has
    no mask of causal attention (`octile.integrations.transformers_masks`). torch's encoders leave their fast path for
    inference, which would compute in high precision. The summary ("converted n of m linear layers to deepseek_v3,
    skipped k: why") goes to the logger `octile` if logging is set up, else to stderr.

    Some recipes need more of a training loop than converted layers, which a RuntimeWarning says: delayed scaling that
    `octile.nn.end_step` is called after each step, others a loss scale or formats of the optimizer's state
    (docs/recipes.md#in-a-training-loop-of-your-own).

    Args:
        model: any module; if it is itself an `nn.Linear`, the new layer is returned.
        recipe: `Recipe.deepseek_v3()` if not given.
        filter: called with the name and the module of each layer (and of experts, which are one module); if it
            returns False, the layer is not converted.
        keep: patterns of further layers that are not converted, such as "*.o_proj" or "model.layers.0"; a pattern
            matches a layer or a module that contains it. Experts are one module, in which no layer can be left out
            alone; `octile convert --keep` takes names in a folder, where each expert has layers of its own.

    Returns:
        The model; `model.conversion_summary` is the summary, a text with its numbers as attributes
        (`octile.nn.conversion_summary.ConversionSummary`), among them the shares of the parameters and of the FLOPs.

    Raises:
        TypeError: model is not a torch.nn.Module or has a weight in float64, recipe is not a Recipe, filter not a
            function, or keep not a list of patterns.
        ValueError: no layer would be converted; a pattern of keep matches none, or single layers of experts that would
            be converted; an exception of the recipe matches no converted layer. Or a parameter is a DTensor, as after
            `fully_shard`, or not initialized, as that of a lazy module.
    """
    model = apply_recipe(model, recipe, filter, keep)
    log_or_print(str(model.conversion_summary))
    for need in _needs_of_training(recipe or Recipe.deepseek_v3()):
        warnings.warn(need, RuntimeWarning, stacklevel=2)
    return model


def _needs_of_training(recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each thing that a recipe needs of a training loop besides converted layers."""
    subject = f"in training, recipe {recipe.name!r} needs"
    if recipe.has_delayed_scaling:
        yield (
            f"{subject} octile.nn.end_step(model) after each optimizer step, or its scales stay those of the tensors "
            "themselves. The model's state_dict is without the amax histories, so a resumed run begins with empty ones"
        )
    if recipe.loss_scale is not None:
        yield f"{subject} a loss scale, octile.optim.DynamicLossScale, which conversion does not add"
    if recipe.optimizer != OptimizerFormats():
        yield f"{subject} octile.optim.AdamW with formats=recipe.optimizer: another optimizer has its own formats"


def apply_recipe(
    model: nn.Module, recipe: Recipe | None = None, filter: Filter | None = None, keep: Sequence[str] = ()
) -> nn.Module:
    """Do what `convert` does, without printing the summary."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    check_recipe(recipe)
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a layer's name and module, not {filter!r}: keep takes patterns")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"model has {name}, which is not initialized: call the model once before it is converted")
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"model has the DTensor {name}: convert the model before fully_shard or parallelize_module, not after"
            )
    recipe, keep = recipe or Recipe.deepseek_v3(), keep if isinstance(keep, str) else list(keep)
    if recipe.batch_invariant:
        _check_batch_invariant(model, recipe, is_partial=filter is not None or bool(keep))
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    named = list(model.named_modules(remove_duplicate=False))  # a layer with two names is replaced under both
    experts = {module: _experts(module) for _, module in named}
    reasons: dict[nn.Module, str | None] = {}  # layers and experts → why they are not converted
    without_keep, reached, skipped = list[str](), list[str](), Counter[str]()
    for name, module in named:
        if module in reasons:
            continue
        if isinstance(module, nn.Linear) or experts[module] is not None:
            reason = _reason_to_skip(name, module, experts[module], tied, filter)
            without_keep += [] if reason else [name]
            reasons[module] = reason or (KEPT if is_kept(name, keep) else None)
            reached += [] if reasons[module] else [name]
            skipped[reasons[module] or ""] += 1 if experts[module] is None else experts[module].linear_layers
        else:
            reasons[module] = "no layer"
            skipped.update({STACKED: _stacked(module), CONV1D: _is_conv1d(module)})
    for name, module in named:
        if reasons[module] is None and any(weight.dtype == torch.float64 for weight in module.parameters()):
            raise TypeError(
                f"model has weights in float64, in {name}: octile computes with float32, bfloat16 and float16"
            )
    _check_experts(keep, [name for name, module in named if experts[module] is not None and reasons[module] is None])
    check_keep(keep, without_keep)
    total, converted = skipped.total(), skipped.pop("", 0)
    why = ", ".join(f"{n} × {reason}" for reason, n in skipped.most_common() if n)
    if total == 0:
        raise ValueError(f"model {type(model).__name__} has no linear layer to convert")
    if converted == 0:
        raise ValueError(f"model {type(model).__name__} has no linear layer that could be converted: {why}")

    _check_exceptions(recipe, reached)
    replacements: dict[nn.Module, nn.Module] = {}
    for name, module in named:
        if reasons[module] is not None:
            continue
        if module not in replacements:
            if experts[module] is not None:
                experts[module].use_recipe(recipe.for_layer(name))
                replacements[module] = module
            else:
                replacements[module] = Linear.from_linear(module, recipe.for_layer(name))
        model = _replace(model, name, replacements[module])
    _fuse(named)
    _avoid_fast_path(model)
    skip_causal_masks(model)
    for integration in _integrations(model, LOADING):
        integration.refuse_lost_experts(model)
    for module in _models_with_a_head(model):
        module.adapt_to(recipe)

    exceptions = f" (exceptions: {len(recipe.exceptions)})" if recipe.exceptions else ""
    summary = f"converted {converted} of {total} linear layers to {recipe.name}{exceptions}, skipped {skipped.total()}"
    summary += f": {why}" if why else ""
    if recipe.has_smooth_swiglu and not any(isinstance(module, SwiGLU | Experts) for module in model.modules()):
        summary += "; nothing is smoothed, no octile.nn.MLP or Experts was found"
    summary = ConversionSummary.make(
        summary,
        converted,
        +skipped,
        quantized_shares(model),
        use_fused_kernels(model),
        recipe.recomputes_transposed_weights,
    )
    object.__setattr__(model, "conversion_summary", summary)
    return model


def _check_experts(keep: Sequence[str], experts: Iterable[str]) -> None:
    """Refuse patterns that match single layers of experts: one recipe is for all of a module.

    Args:
        keep: the patterns.
        experts: names of modules of experts that are converted.

    Raises:
        ValueError: a pattern does, by the names that the layers have in checkpoints.
    """
    for name, pattern, layer in product(experts, keep, EXPERT_LAYERS):
        if is_kept(f"{name}.{layer}", [pattern]) or is_kept(f"{name}.0.{layer}", [pattern]):
            raise ValueError(
                f"keep has {pattern!r}, which matches {layer} of the experts {name}: they are one module, so name it "
                f"({name}), or only layers outside of it, such as *.mlp.{layer}"
            )


def _check_batch_invariant(model: nn.Module, recipe: Recipe, is_partial: bool) -> None:
    """Refuse a model, or a part of one, whose forward pass would not have the bits of serving.

    Raises:
        ValueError: it is none of octile's models, or one that `why_not_batch_invariant`, or layers are to be left out.
    """
    found = _models_with_a_head(model)
    if not found:
        raise ValueError(
            f"recipe {recipe.name!r} needs an octile.models.DeepseekV3, not {type(model).__name__}: other models are "
            "not served by octile"
        )
    if is_partial:
        raise ValueError(f"recipe {recipe.name!r} has all linear layers in FP8: filter and keep leave some out")
    for module in found:
        if why := module.why_not_batch_invariant():
            raise ValueError(f"recipe {recipe.name!r} cannot be applied to the model: {why}")


def _models_with_a_head(model: nn.Module) -> list[Any]:
    """Return octile's own models among the modules of a model, itself included."""
    return [module for module in model.modules() if hasattr(module, "adapt_to")]


def skip_causal_masks(model: nn.Module) -> None:
    """Have a compiled model of a package in `MASKS` leave out masks of causal attention, converted or not."""
    for integration in _integrations(model, MASKS):
        integration.skip_causal_masks(model)


def _integrations(model: nn.Module, names: Mapping[str, str]) -> list[Any]:
    """Import the modules named for the packages whose classes occur in a model."""
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    return [import_module(name) for package, name in names.items() if package in packages]


def _fuse(named: list[tuple[str, nn.Module]]) -> None:
    """Have other people's modules compute their converted layers together, where octile's own modules do so."""
    for name, module in named:
        layers = [child for child in module._modules.values() if isinstance(child, Linear)]
        if isinstance(module, FusableModule | nn.Sequential) or len(layers) < 2:
            continue
        kind = swiglu_class(module)
        if kind is not None and all(isinstance(module._modules[layer], Linear) for layer in kind.fusable_layers):
            become_swiglu(module, kind)
        elif not _join(module) and name and len({layer.in_features for layer in layers}) < len(layers):
            share_among_children(module)


def _avoid_fast_path(model: nn.Module) -> None:
    """Have torch's encoders call their converted layers: its path for inference reads the layers' weights itself.

    torch takes it where `activation_relu_or_gelu`, which nothing else reads, is not 0, and hands the encoder's layers
    nested tensors for it where `use_nested_tensor` is true.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(isinstance(m, Linear) for m in module.children()):
            module.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            layers = (layer for layer in module.layers if isinstance(layer, nn.TransformerEncoderLayer))
            module.use_nested_tensor &= all(layer.activation_relu_or_gelu for layer in layers)


def _join(module: nn.Module) -> bool:
    """Have converted layers that a module always calls on its input be one GEMM; return whether there are several."""
    called = {name: module._modules[name] for name in called_on_one_input(module)}
    names = [name for name, layer in called.items() if isinstance(layer, Linear)]
    layers = [layer for layer in called.values() if isinstance(layer, Linear)]
    alike = all((layer.in_features, layer.recipe) == (layers[0].in_features, layers[0].recipe) for layer in layers)
    if len(layers) < 2 or not alike or not layers[0].recipe.can_fuse_projections:
        return False
    joined = JoinedLinear(layers, is_called_in_a_row(module, names))
    for layer in layers:
        layer.joined = joined
    return True


def _reason_to_skip(name: str, module: nn.Module, experts: Any, tied: set[int], filter: Filter | None) -> str | None:
    """Return why a layer, or a module with experts, is not converted whatever `keep` says; None: it is."""
    if experts is not None:
        reason = getattr(experts, "why_unsupported", None)
    elif type(module) not in (nn.Linear, Linear):
        reason = f"{type(module).__name__} (a subclass of nn.Linear)"
    elif (quantized := torchao_type(module.weight)) is not None:
        reason = f"quantized by torchao ({quantized})"
    elif is_forward_replaced(module):  # a converted layer would call it
        reason = PATCHED
    elif id(module.weight) in tied:
        reason = "tied to an embedding"
    else:
        reason = why_high_precision(name, is_linear=True)
    if reason is None and filter is not None and not filter(name, module):
        return LEFT_OUT
    return reason


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`: a linear layer whose weight is [K, N]."""
    return any((c.__module__, c.__name__) == ("transformers.pytorch_utils", "Conv1D") for c in type(module).__mro__)


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


def _check_exceptions(recipe: Recipe, converted: Sequence[str]) -> None:
    """Raise ValueError if an exception of a recipe matches none of the layers that are converted, by their names."""
    for pattern, _ in recipe.exceptions:
        if not any(fnmatchcase(name, pattern) for name in converted):
            kinds = dict.fromkeys(name.rpartition(".")[2] for name in converted)
            raise ValueError(
                f"recipe {recipe.name!r} has an exception for {pattern!r}, which matches no converted layer; "
                f"their names end with {', '.join(kinds)}"
            )


def _replace(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
    return model
