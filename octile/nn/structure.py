"""Recognition of other people's modules by what they compute, on a few numbers, and not by their names."""

import copy
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octile.nn.fused.fusion import is_forward_replaced
from octile.nn.mlp import MLP, GateUpMLP, SwiGLU

# signs, zeros, small values and values beyond any limit that a model clamps its activations to, in every combination
_VALUES = (-1000.0, -30.0, -3.0, -0.5, 0.0, 0.25, 1.0, 6.0, 25.0, 1000.0)


def is_swiglu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether activation computes silu(gate) · up from rows that have the values of gate first: [R, 2I] → [R, I]."""
    gate, up = _gate_and_up()
    try:
        with torch.no_grad():
            result = activation(torch.cat((gate, up), dim=-1))
    except Exception:  # of another library, and about the numbers that are tried here
        return False
    return _equal(result, F.silu(gate) * up)


def swiglu_class(module: nn.Module) -> type[SwiGLU] | None:
    """Return which of octile's feed-forward layers computes what a module does with its linear layers; None: neither.

    The module may have these layers, named as in the published checkpoints, and an activation, and nothing else that
    holds parameters. Its forward pass is run with functions in place of the layers, which return a few numbers.
    """
    kind = next((kind for kind in (MLP, GateUpMLP) if _has_layers(module, kind)), None)
    return kind if kind is not None and _computes_swiglu(module, kind) else None


def _has_layers(module: nn.Module, kind: type[SwiGLU]) -> bool:
    layers = [module._modules.get(name) for name in kind.fusable_layers]
    others = [child for name, child in module._modules.items() if name not in kind.fusable_layers]
    tensors = [*module._parameters, *module._buffers]
    tensors += [name for child in others if child for name in child.state_dict()]
    return all(isinstance(layer, nn.Linear) for layer in layers) and not tensors and not is_forward_replaced(module)


def _computes_swiglu(module: nn.Module, kind: type[SwiGLU]) -> bool:
    if len(inspect.signature(type(module).forward).parameters) != 2:  # self and x
        return False
    gate, up = _gate_and_up()
    x, y = torch.arange(30.0, device="cpu").view(10, 3), torch.arange(40.0, device="cpu").view(10, 4)
    results = (gate, up, y) if kind is MLP else (torch.cat((gate, up), dim=-1), y)
    expected = (x, x, F.silu(gate) * up) if kind is MLP else (x, F.silu(gate) * up)
    inputs: dict[str, object] = {}

    def layer(name: str, result: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda t: (inputs.__setitem__(name, t), result)[1]  # type: ignore[func-returns-value]

    tried = copy.copy(module)
    others = {name: copy.deepcopy(child) for name, child in module._modules.items() if name not in kind.fusable_layers}
    stand_ins = {name: layer(name, result) for name, result in zip(kind.fusable_layers, results, strict=True)}
    tried.__dict__ |= {"_modules": others | stand_ins, "training": True}  # so that dropout shows
    for child in others.values():
        if child is not None:
            child.train()
    try:
        with torch.no_grad():
            found = type(module).forward(tried, x)
    except Exception:  # of another library, and about the numbers that are tried here
        return False
    read = all(_equal(inputs.get(name), t) for name, t in zip(kind.fusable_layers, expected, strict=True))
    return read and _equal(found, y)


def _gate_and_up() -> tuple[Tensor, Tensor]:
    """Return gate and up [10, 10], so that their elements are all pairs of the values."""
    values = torch.tensor(_VALUES, device="cpu", dtype=torch.float32)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.contiguous(), up.contiguous()


def _equal(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.device != expected.device:
        return False
    return torch.allclose(found.float(), expected, rtol=1e-5, atol=1e-30)
