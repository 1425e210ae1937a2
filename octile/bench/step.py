"""`octile bench step`: what FP8 training costs and saves on this machine.

Speed is measured by turns, a step of each model after the other; bytes are counted where autograd saves them.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octile.bench.rows import LEGEND, Row, beside, table
from octile.bench.timing import seconds
from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.train.config import preset
from octile.train.loop import pick_device, prepare_tokens
from octile.train.screen import Screen
from octile.train.trainer import Trainer

ROUNDS = 9


def rows() -> list[Row]:
    """Speed of a training step, bytes kept for the backward pass, bytes of a checkpoint."""
    return [*_speed(), *_kept_bytes(), _checkpoint_bytes()]


def show(rows: Sequence[Row]) -> str:
    return f"{table(rows)}\n\n{LEGEND}"


def _speed() -> list[Row]:
    device = pick_device("auto")
    gpu = device.type == "cuda"
    config = preset("small" if gpu else "tiny")
    baseline = "bf16" if gpu else "float32"
    with tempfile.TemporaryDirectory() as folder:
        store = prepare_tokens(config, Path(folder), Screen())
        names = (baseline, "deepseek_v3")
        trainers = {name: Trainer(replace(config, recipe=name), store, device) for name in names}
        times = seconds({name: trainer.step for name, trainer in trainers.items()}, ROUNDS)
    tokens = config.batch_size * config.sequence_length
    speeds = {name: tokens / time for name, time in times.items()}
    return [beside(config.preset, "train deepseek_v3", speeds["deepseek_v3"], "tokens/s", baseline, speeds[baseline])]


def _kept_bytes() -> list[Row]:
    """2048 tokens through a stack of linear layers, before and after `convert`.

    A BF16 model keeps its inputs; under autocast FP32 weights are cast as well, and the copies are kept. FP8 stands
    beside the first with its inputs alone and beside the second with its cached weights, one byte each.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, width, depth = 2048, 1024, 8
    plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth))).to(device)
    bf16 = copy.deepcopy(plain).bfloat16()
    fp8 = apply_recipe(copy.deepcopy(plain), Recipe.deepseek_v3())
    torch.optim.SGD(fp8.parameters()).step()  # as in training: an optimizer holds the weights, so copies are cached
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)

    def autocast(model: nn.Module) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return model(x)

        return forward

    inputs, with_copies = kept_for_backward(bf16, lambda: bf16(x)), kept_for_backward(plain, autocast(plain))
    ours, weights = kept_for_backward(fp8, autocast(fp8)), sum(p.numel() for p in fp8.parameters())
    case, mib = f"{depth} Linear {width}", 2**20
    return [
        beside(case, "kept for backward", ours / mib, "MiB", "bf16", inputs / mib),
        beside(case, "kept, with weights", (ours + weights) / mib, "MiB", "autocast", with_copies / mib),
    ]


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


def _checkpoint_bytes() -> Row:
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
    return beside("tiny, saved", "quantised weights", size / count, "bytes a weight", "bf16", 2.0)
