"""Stacked experts of Hugging Face transformers in a recipe's formats, through its registry of experts functions.

transformers 5 stacks the experts of a layer in two parameters, gate_up_proj [E, 2I, D] and down_proj [E, D, I], and
looks up in `ALL_EXPERTS_FUNCTIONS` the function that computes them. `octile.convert` registers `experts_forward` there
under the name "octile" and sets it in the model's configuration. Classes, parameters and checkpoints stay what they
are, and `model.set_experts_implementation` sets another function.

Where the activation is SwiGLU, and recipe and sizes allow it, the experts are one function, as in `octile.nn.MoE`:
their rows are dispatched in FP8, and SwiGLU's output is recomputed. Otherwise they are grouped GEMMs before and after
the model's own activation.

Source: `transformers.integrations.moe`. Shapes: T tokens, D model, E experts, K chosen experts, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from octile.nn.delayed_scaling import AmaxHistory
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import quantize_block_input
from octile.nn.fused.elementwise import swiglu
from octile.nn.fused.feed_forward import Routed, can_fuse_size, experts_feed_forward
from octile.nn.linear import RecipeHolder, history_for
from octile.nn.moe import experts_layers
from octile.nn.structure import is_swiglu
from octile.ops.permute import count_tokens
from octile.ops.quantize import INPUT_DTYPES
from octile.recipe import Recipe

NAME = "octile"  # of the function in transformers' registry, and of the submodule that holds its recipe


class ExpertsRecipe(nn.Module, RecipeHolder[Recipe | None]):
    """The recipe of an experts module of transformers, with its amax histories: a submodule without parameters.

    Attributes:
        recipe: None: the experts are computed as before.
        has_swiglu: whether their activation is SwiGLU.
        implementation: the name in transformers' registry of the function that computed them before.
    """

    def __init__(self, has_swiglu: bool, implementation: str | None):
        super().__init__()
        self.recipe = None
        self.has_swiglu, self.implementation = has_swiglu, implementation
        self.gate_up_history: AmaxHistory | None = None
        self.down_history: AmaxHistory | None = None

    def extra_repr(self) -> str:
        """The name of the recipe, for the printed module."""
        return f"recipe={self.recipe and self.recipe.name}"


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
        experts = self.experts
        if NAME not in experts._modules:
            implementation = experts.config._experts_implementation
            experts.add_module(NAME, ExpertsRecipe(is_swiglu(experts._apply_gate), implementation))
        holder = experts._modules[NAME]
        holder.recipe = recipe
        holder.gate_up_history = history_for(recipe, experts.gate_up_proj)
        holder.down_history = history_for(recipe, experts.down_proj)
        holder.train(experts.training)
        experts.config._experts_implementation = NAME


def stacked_experts(module: nn.Module) -> StackedExperts | None:
    """Return how a recipe gets to an experts module of transformers; None for any other module.

    transformers before version 5 has no registry, and no module that it computes.
    """
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
    dispatcher = LocalDispatcher()
    plan = dispatcher.plan(top_k_index, count_tokens(top_k_index, len(down))[0])
    if holder.has_swiglu and recipe.can_fuse_swiglu and can_fuse_size(down.shape[-1]):
        x, weights_TK = quantize_block_input(hidden_states, recipe), top_k_weights.float()
        dtype = result_dtype(hidden_states)
        y_TD = experts_feed_forward(x, gate_up, down, weights_TK, None, Routed(dispatcher, plan), dtype)
    else:
        x_RD = dispatcher.dispatch(hidden_states, plan)
        histories = holder.gate_up_history, holder.down_history
        activation = swiglu if holder.has_swiglu else experts._apply_gate
        y_RD = experts_layers(x_RD, plan.offs_E, gate_up, down, recipe, *histories, activation)
        y_TD = dispatcher.combine(y_RD, top_k_weights, plan)
    return y_TD.to(hidden_states.dtype)


def _former(experts: nn.Module, holder: ExpertsRecipe | None) -> Callable[..., Tensor]:
    """Return the function that computed the experts before their configuration was set to octile's."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name: Any = "grouped_mm" if holder is None or holder.implementation == NAME else holder.implementation
    return ALL_EXPERTS_FUNCTIONS.get_interface(name, type(experts).forward.__wrapped__)  # type: ignore[attr-defined]


def _why_unsupported(experts: Any) -> str | None:
    if not experts.has_gate:
        return "stacked experts without a gate projection"
    if experts.has_bias:
        return "stacked experts with biases"
    if experts.is_transposed:
        return "stacked experts with transposed weights"
    if not getattr(experts, "is_concatenated", True):
        return "stacked experts with interleaved gates"
    if getattr(experts, "has_post_expert_norm", False):
        return "stacked experts with a norm each"
    if getattr(experts, "_is_expert_parallel", False):
        return "stacked experts that expert parallelism has split"
    gate_up, down = experts.gate_up_proj, experts.down_proj
    if not {gate_up.dtype, down.dtype} <= set(INPUT_DTYPES):
        return "stacked experts that are quantized already"
    n_experts, hidden, intermediate = down.shape
    if gate_up.shape != (n_experts, 2 * intermediate, hidden):
        return "stacked experts with weights of another layout"
    return None
