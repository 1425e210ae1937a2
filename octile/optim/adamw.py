"""AdamW with FP32 master weights, low-precision moments and FP32 arithmetic.

AdamW in FP32 stores 16 bytes per parameter: the weight, its gradient and two moments. The weight is a sum of many small
steps and needs FP32; the moments do not. Two published choices:

    DeepSeek-V3 (arXiv 2412.19437 §3.3.3)   12 bytes   BF16 moments, FP32 weight and gradient
    FP8-LM (arXiv 2310.18313 §2)             6 bytes   FP16 master and second moment, E4M3 first moment and gradient,
                                                       each with one scale per tensor

The error of BF16 moments, which are rounded to nearest even after each step:

- A stored v lies within the values that the recurrences v± ← (1 ± 2⁻⁸)(β₂·v± + (1 − β₂)·g²) give. For gradients of
  steady size that is 2⁻⁸/(1 − β₂) = 8% of v, 4% of the step, at β₂ = 0.95, and it is systematic: v stops moving
  when g² comes that close to it. For gradients that vary like noise the errors average out: the change of the weights
  in 50 steps differs by 0.3% (relative L2) from that with FP32 moments, and by 5% with FP8-LM's formats.
- A moment decays only if its change exceeds half a spacing. With β₂ = 0.999 a BF16 v never decreases; such combinations
  are refused.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from octile.ops.adamw import check_gradient_scale, check_skip
from octile.ops.quantize import check_device
from octile.optim import gradient
from octile.optim.state import (
    KINDS,
    check_decays,
    check_saved,
    dtype_of,
    has_scales,
    load,
    new_state,
    store_,
    stored_dtypes,
)
from octile.optim.storage import overwrite_, shard
from octile.optim.update import UpdateGroup, adamw_
from octile.recipe import OptimizerFormats

DEEPSEEK_V3 = OptimizerFormats()
PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay and a choice of storage formats.

    A float32 parameter is its own master weight. A parameter of another dtype, or any parameter with
    `formats.master="float16"`, is a copy of the master in the optimizer's state, rounded to the parameter's dtype after
    each step. Loading other weights into the model later does not change that master.

    The gradient is read from `param.main_grad` if it exists and otherwise from `param.grad`. With
    `formats.gradient="float8_e4m3fn"` each gradient is moved to `param.scaled_grad` when autograd has computed it.
    FP8-LM's factor against overflow in an all-reduce is not needed, because each gradient has its own scale.

    On a CPU moments are converted to FP32 in batches, so that temporaries stay small; on a GPU one kernel updates all
    parameters with the same dtypes. Formats with a scale are converted a whole tensor at a time, because the new scale
    is known only at the end. Parameters are updated in place, which increments `param._version`. Of parameters that
    FSDP2 shards each process updates its part; the state is sharded as they are.

    Args:
        params: parameters or groups of them (`param_groups(model, weight_decay)`): contiguous, of float32, bfloat16 or
            float16.
        lr, eps, weight_decay: at least 0; each group may have its own, and lr may be set before each step. If lr is a
            tensor [] on the parameters' device, a CUDA graph of the step reads its current value.
        betas: β₁ and β₂, in [0, 1).
        formats: the storage formats. The default is DeepSeek-V3's.

    Raises:
        TypeError: a parameter has another dtype.
        ValueError: a number is out of its range, a parameter is not contiguous, or a β is so close to 1 that a moment
            in its format would never decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        formats: OptimizerFormats = DEEPSEEK_V3,
    ) -> None:
        self.formats = formats
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "formats": self.formats}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with its own settings; see torch.optim.Optimizer. Raises as the constructor does."""
        _unguarded(super().add_param_group)(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group, self.formats)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self.formats.gradient != "float32":
            for param in group["params"]:
                gradient.store_scaled(param, dtype_of(self.formats, "gradient"))

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        skip: Tensor | None = None,
        gradient_scale: Tensor | None = None,
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss; its result is returned.
            skip: bool [] on the parameters' device: if true, parameters and state keep their values. The host does not
                wait for it, and a CUDA graph of the step reads its current value.
            gradient_scale: float32 [] on the parameters' device: the factor of all gradients, such as `clip_factor`.
                The gradients keep their values.

        Raises:
            TypeError: skip is not bool, or gradient_scale no tensor.
            ValueError: skip does not have the shape [], or gradient_scale is not float32 [], or one of them lies on
                another device than a parameter.
            RuntimeError: a parameter has two gradients (see `gradient_of`), or one in a main_grad buffer although
                `formats.gradient` is FP8.
        """
        if skip is not None:
            check_skip(skip)
        if gradient_scale is not None:
            check_gradient_scale(gradient_scale)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found: list[Found] = []
        for group in self.param_groups:
            found += [Found(p, g, group) for p in group["params"] if (g := self._gradient(p)) is not None]
        for name, value in (("skip", skip), ("gradient_scale", gradient_scale)):
            if value is not None:
                for param, _, _ in found:
                    check_device("a parameter", param, name, value)
        # formats with a scale are loaded as FP32, a tensor at a time
        for together in [[one] for one in found] if has_scales(self.formats) else [found]:
            self._update(together, skip, gradient_scale)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete all gradients; `main_grad` buffers are set to zero."""
        _unguarded(super().zero_grad)(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                gradient.reset(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict()` bit for bit.

        torch's own method casts the state to the parameters' dtype; here it must have the dtypes of `formats`.

        Raises:
            ValueError: the parameters, shapes or formats are not this optimizer's; nothing is changed then.
        """
        own = [(p, self._kinds(group)) for group in self.param_groups for p in group["params"]]
        params = [param for param, _ in own]
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        if len(saved_ids) != len(params):
            raise ValueError(f"state_dict has {len(saved_ids)} parameters, this optimizer {len(params)}")
        saved = {p: state_dict["state"][i] for i, p in zip(saved_ids, params, strict=True) if i in state_dict["state"]}
        for i, (param, kinds) in enumerate(own):
            if param in saved:
                check_saved(saved[param], param, self.formats, i, kinds)

        _unguarded(super().load_state_dict)({**state_dict, "state": {}})
        for param, state in saved.items():
            self.state[param] = {key: value.to(param.device, copy=True) for key, value in state.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as torch.optim.Optimizer does."""
        return dict(_unguarded(super().state_dict)())

    def bytes_per_parameter(self) -> dict[str, float]:
        """The mean bytes per parameter of master, gradient, exp_avg and exp_avg_sq.

        They add up to 16 for AdamW in FP32. Not counted are the scales, 4 bytes per tensor, and the weights in the
        module where they are not the masters.
        """
        params = [(p, self._kinds(group)) for group in self.param_groups for p in group["params"]]
        used: Counter[str] = Counter(dict.fromkeys(("master", "gradient", "exp_avg", "exp_avg_sq"), 0))
        for param, kinds in params:
            for kind in kinds:
                used[kind] += param.numel() * dtype_of(self.formats, kind).itemsize
            used["gradient"] += param.numel() * self._gradient_dtype(param).itemsize
        return {kind: n / sum(p.numel() for p, _ in params) for kind, n in used.items()}

    def state_bytes(self) -> int:
        """The bytes of moments, and of masters that are not the parameters, once all parameters had a gradient."""
        params = [(p, self._kinds(group)) for group in self.param_groups for p in group["params"]]
        return sum(
            p.numel() * sum(dtype.itemsize for dtype in stored_dtypes(p, self.formats, kinds).values())
            for p, kinds in params
        )

    def _kinds(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The tensors of the state of a group's parameters."""
        return KINDS

    def _gradient(self, param: Tensor) -> gradient.Gradient | None:
        found = gradient.gradient_of(param)
        if isinstance(found, Tensor) and self.formats.gradient != "float32":
            raise RuntimeError(
                f"gradient={self.formats.gradient!r} needs gradients that autograd computes, but a parameter of shape "
                f"{tuple(param.shape)} has a {found.dtype} gradient from elsewhere (main_grad, or set by hand)"
            )
        return found

    def _gradient_dtype(self, param: Tensor) -> torch.dtype:
        if self.formats.gradient != "float32":
            return dtype_of(self.formats, "gradient")
        return param.dtype if getattr(param, "main_grad", None) is None else torch.float32

    def _update(self, found: list["Found"], skip: Tensor | None, gradient_scale: Tensor | None) -> None:
        """Update some parameters: load the stored state as FP32, compute the step, store the state."""
        groups: dict[Any, UpdateGroup] = {}
        loaded: list[dict[str, Tensor]] = []
        for param, grad, settings in found:
            if not self.state[param]:
                self.state[param] = new_state(param, self.formats)
            state = self.state[param]
            values = {kind: load(state, kind) for kind in KINDS if kind in state}
            loaded.append(values)
            is_copy = values.get("master") is not None and "master_scale" not in state
            numbers = (settings[key] for key in ("lr", "betas", "eps", "weight_decay"))
            group = groups.setdefault(
                (id(settings), param.device, is_copy), UpdateGroup([], [], [], [], [], [], *numbers)
            )
            group.weights.append(shard(values.get("master", param)))
            group.gradients.append(shard(gradient.load(grad)))
            group.exp_avgs.append(shard(values["exp_avg"]))
            group.exp_avg_sqs.append(shard(values["exp_avg_sq"]))
            group.copies.extend([shard(param)] if is_copy else [])
            group.steps.append(state["step"])
        for group in groups.values():
            if skip is None:
                torch._foreach_add_(group.steps, 1)
            else:  # alpha selects the overload that does not read its tensor on the host
                torch._foreach_add_(group.steps, skip.logical_not().float(), alpha=1.0)
        adamw_(list(groups.values()), skip, gradient_scale)

        for (param, _, _), values in zip(found, loaded, strict=True):
            state = self.state[param]
            for kind in values:
                store_(state, kind, values[kind], skip)
            if "master_scale" in state:
                overwrite_(param, load(state, "master"), skip)
        increment_version([param for param, _, _ in found])  # the kernels do not increment the versions


class Found(NamedTuple):
    """A parameter with its gradient and the settings of its group."""

    param: Tensor
    gradient: gradient.Gradient
    group: dict[str, Any]


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: matrices with weight decay; norms, biases and other 1-D parameters without.

    Weight decay shrinks a matrix, which the norm after it compensates; nothing compensates the gain of a norm. Shared
    parameters occur once, frozen ones not at all, and an empty group is left out.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _unguarded(method: Any) -> Callable[..., Any]:
    """Return a method of torch's optimizer without its guard against being compiled, or unchanged if it has none.

    The guard imports torch's compiler when it is first called, which takes one to six seconds of a run's start.
    """
    function = getattr(method, "__func__", None)
    code = getattr(function, "__code__", None)
    if function is None or code is None or code.co_filename != torch._compile.__file__:
        return cast(Callable[..., Any], method)
    return MethodType(function.__wrapped__, method.__self__)


def _check_group(group: dict[str, Any], formats: OptimizerFormats) -> None:
    for key in ("lr", "eps", "weight_decay"):
        if not group[key] >= 0:
            raise ValueError(f"{key} must be at least 0, not {group[key]}")
    for i, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            raise ValueError(f"betas[{i}] must be in [0, 1), not {beta}")
    check_decays(group["betas"], formats)
    for param in group["params"]:
        if has_scales(formats) and shard(param) is not param:
            raise ValueError(
                f"formats must be float32 or bfloat16 for a parameter of shape {tuple(param.shape)} that is a DTensor: "
                "the scale of FP8 and FP16 is that of the whole tensor"
            )
        if param.dtype not in PARAMETER_DTYPES:
            raise TypeError(
                f"a parameter of shape {tuple(param.shape)} is {param.dtype}; needs one of {PARAMETER_DTYPES}"
            )
        if not param.is_contiguous():
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} must be contiguous, its strides are {param.stride()}"
            )
