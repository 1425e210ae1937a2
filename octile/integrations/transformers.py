"""Stacked experts of Hugging Face transformers in a recipe's formats, through its registry of experts functions.

transformers 5 stacks the experts of a layer in two parameters, gate_up_proj [E, 2I, D] and down_proj [E, D, I], or
transposed, as in gpt-oss, and looks up in `ALL_EXPERTS_FUNCTIONS` the function that computes them. `octile.convert`
registers `experts_forward` there under the name "octile" and sets it in the model's configuration. Classes, parameters
and checkpoints stay what they are, and `model.set_experts_implementation` sets another function, which is reported.

Models that were made from one configuration object share its setting. One that is not converted has its experts
computed as before, and a setting for one is for all: give each its own copy of the configuration. What was set before
is known of the object alone, since transformers saves every attribute of a configuration: in a copy of a converted
model, or after pickling, experts that a filter has left out are computed by `grouped_mm`.

Llama-4's experts are not in the registry: all of them compute all tokens, multiplied by scores that are 0 for those
not chosen. They get a subclass of their class, of the same name, with another forward pass.

Where the activation is SwiGLU, and recipe and sizes allow it, the experts are one function, as in `octile.nn.MoE`:
their rows are dispatched in FP8, and SwiGLU's output is recomputed. Otherwise they are grouped GEMMs before and after
the model's own activation, with biases where the model has them. Transposed weights are copied into the layout of the
GEMMs in each forward pass and are not cached; their gradients have the parameters' layout.

Source: `transformers.integrations.moe`. Shapes: T tokens, D model, E experts, K chosen experts, I intermediate.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.elementwise import swiglu
from octile.nn.fused.feed_forward import Routed, can_fuse_size, experts_feed_forward
from octile.nn.fused.fusion import Activations, activations_of, has_other_activation
from octile.nn.linear import RecipeHolder, history_for
from octile.nn.made_class import MadeClass, make_subclass
from octile.nn.main_grad import check_main_grad
from octile.nn.moe import expert_of_rows, experts_layers
from octile.nn.structure import is_swiglu
from octile.ops.permute import count_tokens
from octile.ops.quantize import INPUT_DTYPES
from octile.recipe import Recipe

LLAMA4 = ("transformers.models.llama4.modeling_llama4", "Llama4TextExperts")  # the module of a class, and its name
QUANTIZED = "stacked experts that are quantized already"
DEFAULT: str | None = "grouped_mm"  # the function that transformers' models have if nothing is said
NAME = "octile"  # of the function in transformers' registry, and of the submodule that holds its recipe

_implementations: dict[int, str | None] = {}  # id of a configuration → the name that it had before `NAME`


class ExpertsRecipe(nn.Module, RecipeHolder[Recipe | None]):
    """The recipe of an experts module of transformers, with its amax histories: a submodule without parameters.

    Attributes:
        recipe: None: the experts are computed as before.
        has_swiglu: whether their activation was SwiGLU when they were converted.
        activations: what it called then.
        implementation: the name in transformers' registry of the function that computed them before.
    """

    def __init__(self, has_swiglu: bool, activations: Activations):
        super().__init__()
        self.recipe = None
        self.has_swiglu, self.activations, self.implementation = has_swiglu, activations, DEFAULT
        self.gate_up_history: AmaxHistory | None = None
        self.down_history: AmaxHistory | None = None

    def extra_repr(self) -> str:
        """The name of the recipe, for the printed module."""
        return f"recipe={self.recipe and self.recipe.name}"


def _set_recipe(experts: Any, recipe: Recipe) -> None:
    holder = experts._modules[NAME]
    holder.recipe = recipe
    holder.gate_up_history = history_for(recipe, experts.gate_up_proj)
    holder.down_history = history_for(recipe, experts.down_proj)
    holder.train(experts.training)


class StackedExperts:
    """An experts module of transformers as `octile.convert` sees it.

    Args:
        experts: whose class transformers' registry computes.

    Attributes:
        linear_layers: how many linear layers its stacked weights stand for.
        why_unsupported: why it cannot be converted; None: it can.
    """

    def __init__(self, experts: Any):
        self.experts = experts
        self.linear_layers: int = (2 + experts.has_gate) * experts.num_experts
        self.why_unsupported = _why_unsupported(experts)

    def use_recipe(self, recipe: Recipe) -> None:
        """Have the registry compute the experts by this recipe, and clear the amax history of delayed scaling."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
        experts, config = self.experts, self.experts.config
        if NAME not in experts._modules:
            experts.add_module(NAME, ExpertsRecipe(is_swiglu(experts._apply_gate), activations_of(experts)))
            experts.register_forward_pre_hook(_report_another_function)
        if config._experts_implementation != NAME:
            if id(config) not in _implementations:
                weakref.finalize(config, _implementations.pop, id(config))
            _implementations[id(config)] = config._experts_implementation
        holder = experts._modules[NAME]
        holder.implementation = _implementations.get(id(config), holder.implementation)
        _set_recipe(experts, recipe)
        config._experts_implementation = NAME


class Llama4Experts:
    """Llama-4's experts module as `octile.convert` sees it; attributes as those of `StackedExperts`."""

    def __init__(self, experts: Any):
        self.experts = experts
        self.linear_layers: int = 3 * experts.num_experts
        is_quantized = not {experts.gate_up_proj.dtype, experts.down_proj.dtype} <= set(INPUT_DTYPES)
        self.why_unsupported = QUANTIZED if is_quantized else None

    def use_recipe(self, recipe: Recipe) -> None:
        """Have octile compute the experts by this recipe, and clear the amax history of delayed scaling."""
        experts = self.experts
        if NAME not in experts._modules:
            has_swiglu = is_swiglu(partial(_llama4_gate, experts))
            experts.add_module(NAME, ExpertsRecipe(has_swiglu, activations_of(experts)))
            cls: Any = type(experts)
            experts.__class__ = _llama4_class(cls)
        _set_recipe(experts, recipe)


def stacked_experts(module: nn.Module) -> StackedExperts | Llama4Experts | None:
    """Return how a recipe gets to an experts module of transformers; None for any other module.

    transformers before version 5 has no registry, and no module that it computes.
    """
    if any((c.__module__, c.__name__) == LLAMA4 for c in type(module).__mro__):
        return Llama4Experts(module)
    is_registered = hasattr(type(module), "_apply_gate") and hasattr(module, "has_gate") and hasattr(module, "config")
    return StackedExperts(module) if is_registered else None


def experts_forward(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute an experts module by its recipe, or as before if it has none: what transformers' registry calls.

    Args:
        experts: the module.
        hidden_states: [T, D].
        top_k_index: int64 [T, K], the experts of each token.
        top_k_weights: [T, K], by which the results of a token's experts are summed.

    Returns:
        [T, D] in the dtype of hidden_states.
    """
    holder = experts._modules.get(NAME)
    if holder is None or holder.recipe is None:
        return _former(experts, holder)(experts, hidden_states, top_k_index, top_k_weights)
    recipe, gate_up, down = holder.recipe, experts.gate_up_proj, experts.down_proj
    if experts.is_transposed:
        gate_up, down = _transposed(gate_up), _transposed(down)
    dispatcher = LocalDispatcher()
    plan = dispatcher.plan(top_k_index, count_tokens(top_k_index, len(down))[0])
    has_swiglu = _has_swiglu(experts)
    is_fused = has_swiglu and not experts.has_bias and recipe.can_fuse_swiglu
    if is_fused and can_fuse_size(down.shape[-1]):
        x, weights_TK = quantize_block_input(hidden_states, recipe), top_k_weights.float()
        dtype = result_dtype(hidden_states)
        y_TD = experts_feed_forward(x, gate_up, down, weights_TK, None, Routed(dispatcher, plan), dtype)
    else:
        x_RD = dispatcher.dispatch(hidden_states, plan)
        histories = holder.gate_up_history, holder.down_history
        activation = swiglu if has_swiglu else experts._apply_gate
        if experts.has_bias:
            expert_R = expert_of_rows(plan.offs_E, len(x_RD))
            activation = _biased(activation, experts.gate_up_proj_bias, expert_R)
        y_RD = experts_layers(x_RD, plan.offs_E, gate_up, down, recipe, *histories, activation)
        if experts.has_bias:
            y_RD = y_RD + experts.down_proj_bias[expert_R].to(y_RD.dtype)
        y_TD = dispatcher.combine(y_RD, top_k_weights, plan)
    return y_TD.to(hidden_states.dtype)


@functools.cache
def _llama4_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of Llama-4's experts that computes by a recipe rows [E · T, D], T for each expert."""

    @functools.wraps(cls.forward)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        holder, n_experts = self._modules[NAME], len(self.down_proj)
        rows = hidden_states.shape[0] // n_experts
        offs_E = rows * torch.arange(1, n_experts + 1, device=hidden_states.device, dtype=torch.int32)
        weights = _transposed(self.gate_up_proj), _transposed(self.down_proj)
        histories = holder.gate_up_history, holder.down_history
        activation = swiglu if _has_swiglu(self) else partial(_llama4_gate, self)
        return experts_layers(hidden_states, offs_E, *weights, holder.recipe, *histories, activation)

    return make_subclass(cls, (MadeClass,), {"forward": forward}, _llama4_class, cls)


def _has_swiglu(experts: Any) -> bool:
    """Whether converted experts have SwiGLU, and nobody has replaced it or given it hooks since."""
    holder = experts._modules[NAME]
    return holder.has_swiglu and not has_other_activation(experts, holder.activations)


def _llama4_gate(experts: Any, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _transposed(weight_EKN: Tensor) -> Tensor:
    """Copy stacked weights [E, K, N] as [E, N, K]; differentiable.

    The copy's `main_grad` is a view of the weights' own, so that layers add their gradient to it in FP32. The gradient
    that autograd returns has the copy's dtype.

    Raises:
        TypeError, ValueError: as `check_main_grad`.
    """
    check_main_grad(weight_EKN)
    copy_ENK = _TransposedCopy.apply(weight_EKN)
    main_grad = getattr(weight_EKN, "main_grad", None)
    if main_grad is not None:
        copy_ENK.main_grad = main_grad.mT
    return copy_ENK


class _TransposedCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_EKN: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return weight_EKN.mT.contiguous()

    @staticmethod
    def backward(ctx: Any, dweight_ENK: Tensor | None) -> Tensor | None:
        return None if dweight_ENK is None else dweight_ENK.mT  # None: it was added to main_grad


def _biased(activation: Callable[[Tensor], Tensor], bias_EN: Tensor, expert_R: Tensor) -> Callable[[Tensor], Tensor]:
    """Return an activation that first adds the bias of each row's expert."""
    return lambda x_RN: activation(x_RN + bias_EN[expert_R].to(x_RN.dtype))


def _report_another_function(experts: Any, args: Any) -> None:
    """Warn where another function computes converted experts: `conversion_summary` counts them in the recipe."""
    implementation = experts.config._experts_implementation
    if implementation != NAME:
        warnings.warn(
            f"converted {type(experts).__name__} are computed by transformers' {implementation!r} instead of their "
            f"recipe, since set_experts_implementation was called: model.set_experts_implementation({NAME!r}) has them "
            "computed by it. Models that were made from one configuration object share this setting: copy it for each",
            RuntimeWarning,
            stacklevel=2,
        )


def _former(experts: Any, holder: ExpertsRecipe | None) -> Callable[..., Tensor]:
    """Return the function that computed the experts before their configuration was set to octile's.

    It is that of `DEFAULT` for experts that were not converted, in a copy of the configuration.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name: Any = _implementations.get(id(experts.config), DEFAULT) if holder is None else holder.implementation
    return ALL_EXPERTS_FUNCTIONS.get_interface(name, type(experts).forward.__wrapped__)


def _why_unsupported(experts: Any) -> str | None:
    if not experts.has_gate:
        return "stacked experts without a gate projection"
    if getattr(experts, "has_post_expert_norm", False):
        return "stacked experts with a norm each"
    if getattr(experts, "_is_expert_parallel", False):
        return "stacked experts that expert parallelism has split"
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if not {gate_up.dtype, down.dtype} <= set(INPUT_DTYPES):
        return QUANTIZED
    if experts.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    n_experts, hidden, intermediate = down.shape
    if gate_up.shape != (n_experts, 2 * intermediate, hidden):
        return "stacked experts with weights of another layout"
    return None
