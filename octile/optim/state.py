"""What AdamW keeps of one parameter between steps: a dictionary of tensors, named by kind.

    step                              float32 []
    exp_avg, exp_avg_sq               the moments, of the parameter's shape, in the dtypes of `OptimizerFormats`
    master                            only where the parameter is not its own master
    exp_avg_scale, ...                float32 [], beside each that is float16 or float8_e4m3fn: value = data · scale

How the smallest numbers of a scaled moment are rounded (`tiny`, see storage.py) follows from what rounding to nearest
would do. A first moment that gets no more gradient must die out, so it goes toward zero: were it stuck while the second
moment fades, their quotient would drive the weight away. A second moment that became 0 beside a first moment that did
not would let a step explode, so it goes up.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from octile.optim.storage import Scaled
from octile.recipe import OptimizerFormats

KINDS = ("master", "exp_avg", "exp_avg_sq")
SCALED_DTYPES = (torch.float16, torch.float8_e4m3fn)

_TINY: dict[str, Literal["nearest", "toward_zero", "up"]] = {
    "master": "nearest",
    "exp_avg": "toward_zero",
    "exp_avg_sq": "up",
}


def dtype_of(formats: OptimizerFormats, kind: str) -> torch.dtype:
    """The torch dtype that a field of `formats` names."""
    return getattr(torch, getattr(formats, kind))


def has_scales(formats: OptimizerFormats) -> bool:
    """Whether anything is stored with a scale."""
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
    """The stored tensor itself, or where it has a scale its values, a new float32 tensor."""
    scale = state.get(f"{kind}_scale")
    return state[kind] if scale is None else Scaled(state[kind], scale).load()


def store_(state: dict[str, Tensor], kind: str, values: Tensor) -> None:
    """Overwrites the stored tensor; nothing to do where `values` is that tensor itself, updated in place."""
    scale = state.get(f"{kind}_scale")
    if scale is not None:
        Scaled(state[kind], scale).store_(values, _TINY[kind])
    elif values is not state[kind]:
        state[kind].copy_(values)


def check_saved(saved: dict[str, Any], param: Tensor, formats: OptimizerFormats, index: int) -> None:
    """Refuses a saved state that is not this parameter's in these formats.

    Raises:
        ValueError: another set of tensors, another shape or dtype.
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
    """Refuses a β so near to 1 that a moment, rounded to nearest, would not decay from 1 + epsilon.

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
