"""The state of AdamW or Muon for one parameter: a dictionary of tensors.

    step                              float32 []; AdamW's
    exp_avg, exp_avg_sq               AdamW's moments, of the parameter's shape, in the dtypes of `OptimizerFormats`
    momentum_buffer                   Muon's momentum, in the dtype of `exp_avg`
    master                            only if the parameter is not its own master
    exp_avg_scale, ...                float32 [], for each that is float16 or float8_e4m3fn: value = data · scale

The subnormal values of a scaled moment are not rounded to nearest (`subnormals`, see storage.py), for two reasons:

- A first moment without further gradients must decay to zero; if it stopped while the second moment decays, their
  quotient would drive the weight away. It is rounded toward zero.
- A second moment that became 0 while the first moment did not would make a step explode. It is rounded up.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from octile.optim.storage import Scaled, overwrite_
from octile.recipe import OptimizerFormats

KINDS = ("master", "exp_avg", "exp_avg_sq")  # of a parameter that AdamW updates
MATRIX_KINDS = ("master", "momentum_buffer")  # of one that Muon updates
SCALED_DTYPES = (torch.float16, torch.float8_e4m3fn)

_SUBNORMALS: dict[str, Literal["nearest", "toward_zero", "up"]] = {
    "master": "nearest",
    "exp_avg": "toward_zero",
    "exp_avg_sq": "up",
}


def dtype_of(formats: OptimizerFormats, kind: str) -> torch.dtype:
    """The torch dtype that a field of `formats` names; of Muon's momentum that of the first moment."""
    return getattr(torch, getattr(formats, "exp_avg" if kind == "momentum_buffer" else kind))


def has_scales(formats: OptimizerFormats) -> bool:
    """Whether a master, moment or gradient is stored with a scale."""
    return any(dtype_of(formats, kind) in SCALED_DTYPES for kind in (*KINDS, "gradient"))


def stored_dtypes(param: Tensor, formats: OptimizerFormats, kinds: Sequence[str] = KINDS) -> dict[str, torch.dtype]:
    """The dtypes of a parameter's moments, and of its master unless that is the parameter itself."""
    is_master = dtype_of(formats, "master") == param.dtype == torch.float32
    return {kind: dtype_of(formats, kind) for kind in kinds if not (kind == "master" and is_master)}


def new_state(param: Tensor, formats: OptimizerFormats, kinds: Sequence[str] = KINDS) -> dict[str, Tensor]:
    """The state before the first step, on the parameter's device: zero moments, and a master if one is needed."""
    state = {"step": torch.zeros((), device=param.device)} if kinds == KINDS else {}
    for kind, dtype in stored_dtypes(param, formats, kinds).items():
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


def check_saved(
    saved: dict[str, Any], param: Tensor, formats: OptimizerFormats, index: int, kinds: Sequence[str] = KINDS
) -> None:
    """Refuse a saved state that does not fit the parameter and the formats.

    Raises:
        ValueError: the set of tensors, a shape or a dtype is another.
    """
    wanted = new_state(torch.empty_like(param, device="meta"), formats, kinds)
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
        check_decay(name, kind, beta, formats)


def check_decay(name: str, kind: str, rate: float, formats: OptimizerFormats) -> None:
    """Refuse a decay rate, as `check_decays` does, of one moment.

    Raises:
        ValueError: the moment would not decay.
    """
    dtype = dtype_of(formats, kind)
    epsilon = torch.finfo(dtype).eps
    if (1 - rate) * (1 + epsilon) <= epsilon / 2:
        raise ValueError(
            f"{name}={rate} never lets a {str(dtype).removeprefix('torch.')} {kind} decay; "
            f"needs less than {1 - epsilon / 2 / (1 + epsilon):.5f} or a wider format"
        )


def _described(value: Any) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
