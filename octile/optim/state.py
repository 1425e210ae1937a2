"""The state of AdamW for one parameter: a dictionary of tensors.

    step                              float32 []
    exp_avg, exp_avg_sq               the moments, of the parameter's shape, in the dtypes of `OptimizerFormats`
    master                            only if the parameter is not its own master
    exp_avg_scale, ...                float32 [], for each that is float16 or float8_e4m3fn: value = data · scale

The subnormal values of a scaled moment are not rounded to nearest (`subnormals`, see storage.py), for two reasons:

- A first moment without further gradients must decay to zero; if it stopped while the second moment decays, their
  quotient would drive the weight away. It is rounded toward zero.
- A second moment that became 0 while the first moment did not would make a step explode. It is rounded up.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from octile.optim.storage import Scaled, overwrite_
from octile.recipe import OptimizerFormats

KINDS = ("master", "exp_avg", "exp_avg_sq")
SCALED_DTYPES = (torch.float16, torch.float8_e4m3fn)

_SUBNORMALS: dict[str, Literal["nearest", "toward_zero", "up"]] = {
    "master": "nearest",
    "exp_avg": "toward_zero",
    "exp_avg_sq": "up",
}


def dtype_of(formats: OptimizerFormats, kind: str) -> torch.dtype:
    """The torch dtype that a field of `formats` names."""
    return getattr(torch, getattr(formats, kind))


def has_scales(formats: OptimizerFormats) -> bool:
    """Whether a master, moment or gradient is stored with a scale."""
    return any(dtype_of(formats, kind) in SCALED_DTYPES for kind in (*KINDS, "gradient"))


def new_state(param: Tensor, formats: OptimizerFormats) -> dict[str, Tensor]:
    """The state before the first step, on the parameter's device: zero moments, and a master if one is needed."""
    state = {"step": torch.zeros((), device=param.device)}
    for kind in KINDS:
        dtype = dtype_of(formats, kind)
        if kind == "master" and dtype == param.dtype == torch.float32:
            continue
        state[kind] = torch.zeros_like(param, dtype=dtype)
        if dtype in SCALED_DTYPES:
            state[f"{kind}_scale"] = torch.ones((), device=param.device)
    if "master" in state:
        store_(state, "master", param.detach().float())
    return state


def load(state: dict[str, Tensor], kind: str) -> Tensor:
    """The stored tensor itself; if it has a scale, its values as a new float32 tensor."""
    scale = state.get(f"{kind}_scale")
    return state[kind] if scale is None else Scaled(state[kind], scale).load()


def store_(state: dict[str, Tensor], kind: str, values: Tensor, skip: Tensor | None = None) -> None:
    """Overwrite the stored tensor with values, unless `skip` (bool []) is true.

    Does nothing if `values` is that tensor, updated in place.
    """
    scale = state.get(f"{kind}_scale")
    if scale is not None:
        Scaled(state[kind], scale).store_(values, _SUBNORMALS[kind], skip)
    elif values is not state[kind]:
        overwrite_(state[kind], values, skip)


def check_saved(saved: dict[str, Any], param: Tensor, formats: OptimizerFormats, index: int) -> None:
    """Refuse a saved state that does not fit the parameter and the formats.

    Raises:
        ValueError: the set of tensors, a shape or a dtype is another.
    """
    wanted = new_state(torch.empty_like(param, device="meta"), formats)
    if saved.keys() != wanted.keys():
        raise ValueError(f"state_dict has {sorted(saved)} for parameter {index}; its formats need {sorted(wanted)}")
    for key, tensor in wanted.items():
        if _described(saved[key]) != _described(tensor):
            raise ValueError(
                f"state_dict has {key} {_described(saved[key])} for parameter {index}; needs {_described(tensor)}"
            )


def check_decays(betas: tuple[float, float], formats: OptimizerFormats) -> None:
    """Refuse a β so close to 1 that a moment, rounded to nearest, would not decay from 1 + epsilon.

    Raises:
        ValueError: the change (1 − β)(1 + epsilon) is at most epsilon / 2, half a spacing.
    """
    for name, kind, beta in (("betas[0]", "exp_avg", betas[0]), ("betas[1]", "exp_avg_sq", betas[1])):
        epsilon = torch.finfo(dtype_of(formats, kind)).eps
        if (1 - beta) * (1 + epsilon) <= epsilon / 2:
            raise ValueError(
                f"{name}={beta} never lets a {getattr(formats, kind)} {kind} decay; "
                f"needs less than {1 - epsilon / 2 / (1 + epsilon):.5f} or a wider format"
            )


def _described(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
