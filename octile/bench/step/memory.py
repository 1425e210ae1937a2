"""Bytes of a training step: kept for the backward pass, of a parameter, and of a checkpoint on disk.

What is kept is counted in two ways: by the tensors that autograd is given to keep, each memory once, and by what the
GPU's allocator holds after the forward pass and did not before.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from octile.bench.rows import Row, compare
from octile.bench.step.models import Work
from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.optim import AdamW
from octile.train.config import preset


def kept_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, without the parameters themselves."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        output = forward()
    total = sum(kept.values())
    del output
    return total


def allocated_by(forward: Callable[[], Tensor]) -> int:
    """Bytes of the GPU that a forward pass leaves allocated, without its result."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = forward()
    return torch.cuda.memory_allocated() - before - output.nbytes


def cache_weights(work: Work) -> None:
    """As in training: an optimizer holds the weights, so their casts are made once a step and not kept by layers.

    From then on the casts are made again only after an optimizer's step: for counting, not for timing.
    """
    torch.optim.SGD(work.model.parameters(), lr=0.0).step()
    work.forward()


def of_a_parameter(work: Work) -> dict[str, float]:
    """Bytes of a parameter, by what they are, of a model that has made a step with octile's AdamW and holds gradients.

    "cached FP8" is what the next forward pass leaves behind besides what the one after it does.
    """
    assert isinstance(work.optimizer, AdamW)
    parameters = list(work.model.parameters())
    count = sum(p.numel() for p in parameters)
    states = [t for state in work.optimizer.state.values() for name, t in state.items() if name != "step"]
    gradients = [g for p in parameters for g in (p.grad, getattr(p, "main_grad", None)) if g is not None]
    found = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(g.nbytes for g in gradients),
        "optimizer": sum(t.nbytes for t in states),
    }
    if work.x.is_cuda:
        found["cached FP8"] = allocated_by(work.forward) - allocated_by(work.forward)
    return {name: size / count for name, size in found.items()}


def checkpoint_bytes() -> Row:
    """A model on disk: what its quantised weights and their scales take."""
    from safetensors import safe_open

    model = DeepseekV3(preset("tiny").model)
    size = count = 0
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, weights="fp8")
        for file in Path(folder).glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                names = set(tensors.keys())
                for name in (n for n in names if f"{n}_scale_inv" in names):
                    weight, scale = tensors.get_tensor(name), tensors.get_tensor(f"{name}_scale_inv")
                    size, count = size + weight.nbytes + scale.nbytes, count + weight.numel()
    return compare("tiny, saved", "quantised weights", size / count, "bytes a weight", "bf16", 2.0)
