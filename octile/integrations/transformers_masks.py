"""Causal attention without a mask in compiled models of Hugging Face transformers.

Where no token is padded or packed, `scaled_dot_product_attention` gets `is_causal` instead of a mask, so that its
fastest kernels can run. With a mask attention takes three times as long on an H200. transformers 5 decides so, but not
while a model is traced as a whole, for two reasons. `octile.convert` undoes both:

- torch before 2.14 says there that the model is being exported, and an exported model must keep its mask. A function
  in transformers' registry of masks makes the same decision, and asks torch in another way.
- Without a cache (`use_cache=False`, the default of `Trainer`, or activation checkpointing) texts may be packed, which
  the positions show, but not while they are traced. Where a model is called without positions it counts them itself,
  and nothing is packed. Hooks of the model see that, and what looks for packed texts is not called. Behind a graph
  break the mask stays.

Source: `transformers.masking_utils`, `_ignore_causal_mask_sdpa` and `find_packed_sequence_indices`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

NAME = "sdpa"  # transformers' attention by scaled_dot_product_attention, and its masks
MASKS = {
    "create_causal_mask",
    "create_chunked_causal_mask",
    "create_masks_for_generate",
    "create_sliding_window_causal_mask",
}

_counted_in = ""  # the trace of a model that counts the positions itself, while its forward pass is traced


def skip_causal_masks(model: nn.Module) -> None:
    """Have transformers leave out masks of causal attention in a model that is compiled as a whole.

    Functions of somebody else's in transformers stay. A second call changes nothing.
    """
    try:
        from transformers import masking_utils
    except ImportError:  # before version 5 there may be no registry
        return
    registry = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    if registry[NAME] is masking_utils.sdpa_mask:
        registry.register(NAME, _unless_causal(masking_utils.sdpa_mask))
    find: Any = masking_utils.find_packed_sequence_indices
    if find.__module__ == masking_utils.__name__ and not hasattr(find, "__wrapped__"):
        masking_utils.find_packed_sequence_indices = _unless_counted(find)  # type: ignore[assignment]
    for module in model.modules():
        if _can_count_positions(module) and _begin not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_begin, with_kwargs=True)
            module.register_forward_hook(_end, always_call=True)


def _can_count_positions(module: nn.Module) -> bool:
    """Whether a module's forward pass makes masks, and positions from 0 on if it gets none."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "position_ids" not in code.co_varnames:
        return False
    return "arange" in code.co_names and not MASKS.isdisjoint(code.co_names)


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _counted_in
    is_counted = len(args) <= 1 and kwargs.get("position_ids") is None  # input_ids may be given by position
    _counted_in = _trace() if is_counted and _is_compiling() else ""


def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    global _counted_in
    _counted_in = ""


@torch.compiler.assume_constant_result
def _trace() -> str:
    """Name the trace that calls this; "" outside of one. Behind a graph break another trace begins.

    At a graph break `_counted_in` is written, and other models and threads see it until the model is done.
    """
    return str(torch._guards.CompileContext.current_compile_id() or "")


def _unless_causal(make: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Wrap transformers' `sdpa_mask`, so that it makes no mask that is causal."""

    @functools.wraps(make)
    def sdpa_mask(**given: Any) -> Tensor | None:
        return None if _is_compiling() and _is_causal(**given) else make(**given)

    return sdpa_mask


def _unless_counted(find: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Wrap transformers' search for packed texts, so that it finds none where the model counts the positions itself."""

    @functools.wraps(find)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        is_counted = _is_compiling() and _counted_in != "" and _counted_in == _trace()
        return None if is_counted else find(position_ids)

    return find_packed_sequence_indices


def _is_compiling() -> bool:
    return torch.compiler.is_dynamo_compiling() and not _is_exporting()


def _is_exporting() -> bool:
    # not torch.compiler.is_exporting(), which torch before 2.14 replaces by True where it compiles
    return getattr(torch.compiler, "_is_exporting_flag", True)


def _is_causal(
    q_length: int | None = None,
    cache_position: Tensor | None = None,
    kv_length: int | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **_: Any,
) -> bool:
    """Whether each query sees all keys up to its own, as `is_causal` of torch means it.

    transformers 5.0 gives the queries' positions, cache_position, instead of their number.
    """
    if q_length is None and cache_position is not None:
        q_length = cache_position.shape[0]
    if attention_mask is not None or not allow_is_causal_skip or q_length is None or q_length != kv_length:
        return False
    return local_size is None or kv_length < local_size
