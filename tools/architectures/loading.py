"""What an engine's loader does with the tensors of a folder: which parameters it sets, and which tensors it reads.

All parameters are NaN before the loader is called. One that still has a NaN after it was not set, or not as a whole. A
tensor is read when an operator of torch has it, or a part of it, as an operand. An engine that drops a scale, or makes
a layer FP8 whose weight is BF16, shows in one or the other, also where it reports nothing.

It is run in the engine's environment, so it imports nothing of octile.
"""

import json
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Found = dict[str, Any]
FORMATS = ("bf16", "fp8")
# Scales of attention's FP8 cache, which no folder of octile has, and which engines set to 1 themselves.
CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")


class ReadTensors(TorchDispatchMode):
    """Collect the names of the tensors that operators read.

    Attributes:
        read: names of those among the tensors that were an operand.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.names = {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}
        self.read = set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not torch.ops.aten.detach.default:
            operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.read |= {self.names.get(t.untyped_storage().data_ptr(), "") for t in operands}
        return func(*args, **(kwargs or {}))


def load_folders(load: Callable[[Path], nn.Module], folders: Path, out: Path) -> None:
    """Have an engine load FOLDER/bf16 and FOLDER/fp8 of each of the folders, and write what it found as JSON.

    Args:
        load: builds the engine's model from the configuration of a folder; its method `load_weights` is called here.
        folders: a folder with a folder for each architecture.
        out: the file to be written: architecture → format → what was found.
    """
    found = {}
    for folder in sorted(path for path in folders.iterdir() if path.is_dir()):
        found[folder.name] = {name: _try_to_load(load, folder / name) for name in FORMATS}
        print(folder.name, found[folder.name], file=sys.stderr)
    out.write_text(json.dumps(found, indent=1), encoding="utf-8")


def _try_to_load(load: Callable[[Path], nn.Module], folder: Path) -> Found:
    try:
        return what_is_left(load(folder), tensors_of(folder))
    except Exception as error:  # of another library: it is the result
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split()).removeprefix("1 validation error for ModelConfig Value error, ")
        sentence = re.split(r"(?<=[.\]])\s|: \{| The available| \[type=", text)[0][:160]
        return {"error": f"{type(error).__name__}: {sentence} ({Path(where.filename).name})"}


def what_is_left(model: nn.Module, tensors: Mapping[str, Tensor]) -> Found:
    """Have a model load tensors, and return its class, the parameters that are not set and the tensors not read."""
    parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point() and p.numel()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.data.fill_(float("nan"))
    with ReadTensors(tensors) as reads:
        model.load_weights(iter(tensors.items()))
    unset = (n for n, p in dict(model.named_parameters()).items() if n in parameters and bool(p.float().isnan().any()))
    return {
        "class": type(model).__name__,
        "unset": patterns(n for n in unset if n.rpartition(".")[2] not in CACHE_SCALES),
        "unread": patterns(tensors.keys() - reads.read),
    }


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a folder, each in memory of its own."""
    return {n: t.clone() for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


def patterns(names: Iterable[str]) -> list[str]:
    """Return names with `*` in place of numbers, each once."""
    return sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names})
