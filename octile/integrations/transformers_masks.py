"""Causal attention without a mask in compiled models of Hugging Face transformers, through its registry of masks.

Where no token is padded or packed, `scaled_dot_product_attention` gets `is_causal` instead of a mask, so that its
fastest kernels can run. transformers 5 decides so, but not while torch before 2.14 compiles the whole model: torch says
there that the model is being exported, and an exported model must keep its mask. With it attention takes three times
as long on an H200. So `octile.convert` registers a function of the same decision that asks torch in another way.

With `use_cache=False` a compiled model keeps its mask, as transformers cannot see there whether texts are packed.

Source: `transformers.masking_utils`, `_ignore_causal_mask_sdpa`.
"""

from typing import Any

import torch
from torch import Tensor

NAME = "sdpa"  # transformers' attention by scaled_dot_product_attention, and its masks


def skip_causal_masks() -> None:
    """Have transformers leave out masks of causal attention in all models of this process that are compiled as a whole.

    A function of somebody else's in the registry stays.
    """
    try:
        from transformers import masking_utils
    except ImportError:  # before version 5 there may be no registry
        return
    registry = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    if registry[NAME] is masking_utils.sdpa_mask:
        registry.register(NAME, sdpa_mask)


def sdpa_mask(**given: Any) -> Tensor | None:
    """Return the mask of `scaled_dot_product_attention`, or None if it is causal: what transformers' registry calls.

    Args:
        given: the arguments of `transformers.masking_utils.sdpa_mask`.
    """
    from transformers import masking_utils

    if torch.compiler.is_dynamo_compiling() and not _is_exporting() and _is_causal(**given):
        return None
    return masking_utils.sdpa_mask(**given)


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
