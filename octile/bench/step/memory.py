"""Memory of a training step: bytes saved for backward, bytes per parameter, and bytes of a checkpoint.

Bytes saved for backward are counted in two ways: by the storages of the tensors that autograd saves, each once, and by
the difference of the GPU allocator's memory after and before the forward pass.
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

CACHED_WEIGHTS = "cached FP8"  # a use of bytes per parameter


def bytes_saved_for_backward(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Count the bytes that autograd saves from forward to backward, without the parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def count(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return t.detach()  # a node that saves its own result would hold itself, and never be freed

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        output = forward()
    total = sum(saved.values())
    del output
    return total


def allocated_by(forward: Callable[[], Tensor]) -> int:
    """Count the bytes of GPU memory that a forward pass leaves allocated, without its output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    output = forward()
    return torch.cuda.memory_allocated() - before - output.nbytes


def cache_weights(work: Work) -> None:
    """Let a model cache its FP8 weights, as it does in training, where an optimizer holds the parameters.

    From then on weights are quantized only after an optimizer's step. This is for counting bytes, not for timing.
    """
    torch.optim.SGD(work.model.parameters(), lr=0.0).step()
    work.forward()


def bytes_per_parameter(work: Work) -> dict[str, float]:
    """Count the bytes per parameter by their use, after a step with octile's AdamW, with gradients.

    "cached FP8" is what the first forward pass after the step leaves allocated more than the second.
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
        found[CACHED_WEIGHTS] = allocated_by(work.forward) - allocated_by(work.forward)
    return {name: size / count for name, size in found.items()}


def checkpoint_bytes() -> Row:
    """Measure the bytes that quantized weights and their scales take on disk."""
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
    return compare("tiny, saved", "quantized weights", size / count, "bytes a weight", "bf16", 2.0)
