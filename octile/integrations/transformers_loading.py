"""Refusal of checkpoints of transformers whose experts `load_state_dict` would not load into a converted model.

transformers 5 writes the weights of each expert alone, and `from_pretrained` stacks them. `load_state_dict` does not:
with `strict=False`, as transformers' Trainer calls it when it resumes, it loads all other weights and leaves the
experts as they are. A line of the log has their names.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octile.integrations.transformers import NAME

ONE_EXPERT = re.compile(r"\bexperts\.\d+\.")


def refuse_lost_experts(model: nn.Module) -> None:
    """Have `load_state_dict` of a converted model raise where it would leave stacked experts as they are.

    Args:
        model: a model of transformers, or one that contains such a model; others are left alone.
    """
    from transformers import PreTrainedModel

    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if found is None or not any(NAME in module._modules for module in found.modules()):
        return
    hooks: Any = found._load_state_dict_pre_hooks.values()
    if all(hook.hook is not _refuse for hook in hooks):
        found.register_load_state_dict_pre_hook(_refuse)


def _refuse(model: Any, state_dict: Mapping[str, Tensor], prefix: str, *_: Any) -> None:
    """Compare experts that the state has under other names with the model's.

    They are equal where the model was built by `from_pretrained` of the same checkpoint.

    Raises:
        ValueError: they differ, or those of the model are not here to be compared: on the meta device, or sharded.
    """
    if not any(ONE_EXPERT.search(name) for name in state_dict):
        return
    from transformers.core_model_loading import revert_weight_conversion

    for name, module in model.named_modules():
        if NAME not in module._modules:
            continue
        stacked = {f"{name}.{key}": p.detach() for key, p in module.named_parameters(recurse=False)}
        lost = {key: p for key, p in stacked.items() if prefix + key not in state_dict}
        for key, present in revert_weight_conversion(model, lost).items():
            given = state_dict.get(prefix + key)
            if given is not None and not _is_loaded(given, present):
                raise ValueError(
                    f"state_dict has {prefix + key}, but the model has the experts of {name} stacked, and "
                    "load_state_dict would leave them as they are: make the model with from_pretrained of the "
                    "checkpoint's folder and convert it, and then resume. In place of load_best_model_at_end, load the "
                    "best checkpoint's folder with from_pretrained"
                )


def _is_loaded(given: Tensor, present: Tensor) -> bool:
    is_comparable = not present.is_meta and not hasattr(present, "to_local")  # torch compares no DTensor with a tensor
    return is_comparable and torch.equal(given.to(present), present)
