"""Captures: the operands of a real run's products in a file, before any cast, to be multiplied in other ways.

A capture is one safetensors file:

    LAYER.x      [T, K] BF16 or FP32     the layer's input, as it came
    LAYER.w      [N, K] or [G, N, K]     its weight
    LAYER.dy     [T, N]                  the gradient of its output
    LAYER.offs   int32 [G]               of experts: the end of each one's rows
    tokens       int64 [B, S]            what the model read; row t of a layer is token t of it, but for experts and
                                         multi-token prediction

of the first micro-batch of a step, and as metadata `octile_capture`, JSON: the version of this format, octile's, the
step, the recipe, the run, which products were asked for, and the SHA-256 of the tensors in the order of their names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octile import __version__
from octile.checkpoint.tensor_file import TensorFile, TensorSpec, writing
from octile.lab.layers import layer_weights
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.recipe import GEMMS, GemmName

FORMAT_VERSION = 1
METADATA = "octile_capture"
FIELDS = {"step": int, "recipe": str, "run": str, "octile": str, "sha256": str, "products": list}  # of the note
OPERANDS: Mapping[GemmName, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True, eq=False)
class CapturedGemm:
    """One product, a[M, K] · b[N, K]ᵀ, its operands as they were before any cast.

    Attributes:
        layer: its name; of experts with the expert's number behind it: "model.layers.1.mlp.experts.down.3".
        product: fprop (a: x, b: w), dgrad (dy, wᵀ) or wgrad (dyᵀ, xᵀ).
        a, b: BF16 or FP32, perhaps views of tensors that other products share.
        expert: its number, or None.
    """

    layer: str
    product: GemmName
    a: Tensor
    b: Tensor
    expert: int | None = None


@dataclass(frozen=True, eq=False)
class Capture:
    """What a file holds.

    Attributes:
        products: those that were asked for; of experts one for each that had tokens.
        step: of the run, counted from 1.
        recipe: its name; run: its folder's name; octile: the version that wrote it.
        tokens: int64 [B, S], what the model read, where it is known.
    """

    products: tuple[CapturedGemm, ...]
    step: int
    recipe: str
    run: str
    octile: str
    tokens: Tensor | None = None


@dataclass
class Recorder:
    """Collects operands; see `capturing`.

    Attributes:
        wanted: the products to capture, (layer, product).
        tensors: what was seen, on the CPU, by its name in the file.
    """

    wanted: frozenset[tuple[str, GemmName]]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def products(self) -> tuple[CapturedGemm, ...]:
        """What was seen, as `load` gives it; a product whose operands did not all come by is left out."""
        seen = [(n, p) for n, p in sorted(self.wanted) if all(f"{n}.{o}" in self.tensors for o in OPERANDS[p])]
        return tuple(captured for name, product in seen for captured in _products(self.tensors, name, product))

    def save(self, path: Path, step: int, recipe: str, run: str, tokens: Tensor | None = None) -> Path:
        """Writes the file; its folder is made if it is not there.

        Raises:
            RuntimeError: a product that was asked for was not made: no forward and backward pass came by.
        """
        for layer, product in sorted(self.wanted):
            if any(f"{layer}.{operand}" not in self.tensors for operand in OPERANDS[product]):
                raise RuntimeError(f"{product} of {layer} was not made, so there is nothing to capture")
        tensors = self.tensors | ({} if tokens is None else {"tokens": tokens.cpu()})
        about = {
            "version": FORMAT_VERSION,
            "octile": __version__,
            "step": step,
            "recipe": recipe,
            "run": run,
            "products": sorted(self.wanted),
            "sha256": _digest(tensors),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        specs = {name: TensorSpec.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        with writing(path, specs, {METADATA: json.dumps(about)}) as out:
            for name, tensor in tensors.items():
                out.write(name, tensor)
        return path


@contextmanager
def capturing(model: nn.Module, layers: str = "*", products: Iterable[GemmName] = GEMMS) -> Iterator[Recorder]:
    """Keeps the operands of the first forward and backward pass inside.

    Raises:
        ValueError: a pattern of layers matches no converted layer.
    """
    found = layer_weights(model, layers)
    recorder = Recorder(frozenset((name, product) for name in found.weights for product in products))
    needed = {f"{name}.{operand}" for name, product in recorder.wanted for operand in OPERANDS[product]}

    def keep(name: str, tensor: Tensor | None) -> None:
        if tensor is not None and name in needed and name not in recorder.tensors:
            recorder.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def watch(weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = found.name_of(weight)
        if name is None or f"{name}.offs" in recorder.tensors or f"{name}.dy" in recorder.tensors:
            return None
        x, offs = fprop.before, fprop.offs

        def backward(product: ObservedGemm) -> None:  # at the first of the two: a pass without one does not count
            dy = product.before if product.name == "dgrad" else product.before.mT
            keep(f"{name}.x", x)
            keep(f"{name}.w", weight)
            keep(f"{name}.dy", dy)
            if offs is not None:
                recorder.tensors.setdefault(f"{name}.offs", offs.detach().cpu())

        return backward

    with observe_gemms(watch):
        yield recorder


def parse_gemm_names(text: str) -> tuple[GemmName, ...]:
    """ "fprop,wgrad" → ("fprop", "wgrad").

    Raises:
        ValueError: there is no such product.
    """
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        if name not in GEMMS:
            raise ValueError(f"products must be some of {', '.join(GEMMS)}, not {name!r}")
    return tuple(product for product in GEMMS if product in asked)


def load(path: Path) -> Capture:
    """Reads a capture.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is damaged, is no capture, or was written in another version of the format.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, no capture: octile lab capture writes them")
    if not path.exists():
        raise FileNotFoundError(f"there is no capture {path}: octile lab capture writes them")
    file = TensorFile(path)
    about = _about(path, file.metadata)
    tensors = {name: file.read(name) for name in file.specs}
    try:
        if _digest(tensors) != about["sha256"]:
            raise ValueError(f"{path} is damaged: its tensors fail their checksum")
        products = tuple(
            captured for layer, product in about["products"] for captured in _products(tensors, layer, product)
        )
        return Capture(products, about["step"], about["recipe"], about["run"], about["octile"], tensors.get("tokens"))
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error.args[0]}") from None


def _about(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if METADATA not in metadata:
        raise ValueError(f"{path} is no capture: octile lab capture writes them")
    try:
        about = json.loads(metadata[METADATA])
        version = about["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: its note {METADATA} cannot be read") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} is a capture of version {version}, written by octile {about.get('octile')}; this is octile"
            f" {__version__}, which reads version {FORMAT_VERSION}: capture it anew"
        )
    for name, kind in FIELDS.items():
        if name not in about:
            raise ValueError(f"{path} is damaged: it has no {name}")
        if not isinstance(about[name], kind):
            raise ValueError(f"{path} is damaged: its {name} is {about[name]!r}")
    for entry in about["products"]:
        if not isinstance(entry, list) or len(entry) != 2 or entry[1] not in GEMMS:
            raise ValueError(f"{path} is damaged: its products hold {entry!r}, which is no layer and product")
    return dict(about)


def _products(tensors: Mapping[str, Tensor], layer: str, product: GemmName) -> Iterator[CapturedGemm]:
    """A product's operands; of experts, one product for each that has tokens."""
    operands = {operand: tensors[f"{layer}.{operand}"] for operand in OPERANDS[product]}
    offs = tensors.get(f"{layer}.offs")
    if offs is None:
        yield CapturedGemm(layer, product, *_sides(product, operands))
        return
    for group, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        if end > start:
            own = {name: t[group] if name == "w" else t[start:end] for name, t in operands.items()}
            yield CapturedGemm(f"{layer}.{group}", product, *_sides(product, own), group)


def _sides(product: GemmName, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    if product == "fprop":
        return operands["x"], operands["w"]
    if product == "dgrad":
        return operands["dy"], operands["w"].mT
    return operands["dy"].mT, operands["x"].mT


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
