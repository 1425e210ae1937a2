"""Captures: the operands of a real run's GEMMs in a file, before quantization.

A capture is one safetensors file that holds the first micro-batch of a step:

    LAYER.x      [T, K] BF16 or FP32     the layer's input
    LAYER.w      [N, K] or [G, N, K]     its weight
    LAYER.dy     [T, N]                  the gradient of its output
    LAYER.offs   int32 [G]               for experts: the end of each expert's rows
    tokens       int64 [B, S]            the token ids that the model read; row t of x and dy is token t, except in
                                         experts and multi-token prediction

Its metadata `octile_capture` is JSON: the version of the format and of octile, the step, the recipe, the run, the
requested GEMMs, and the SHA-256 of the tensors in the order of their names.
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
from octile.checkpoint.tensor_file import TensorFile, write_tensors
from octile.lab.layers import observed_weights
from octile.nn.observer import Backward, ObservedGemm, observe_gemms
from octile.recipe import GEMMS, GemmName

FORMAT_VERSION = 1
METADATA = "octile_capture"
FIELDS = {"step": int, "recipe": str, "run": str, "octile": str, "sha256": str, "products": list}  # of the metadata
OPERANDS: Mapping[GemmName, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}


@dataclass(frozen=True, eq=False)
class CapturedGemm:
    """One GEMM, a[M, K] · b[N, K]ᵀ, with its operands before quantization.

    Attributes:
        layer: the layer's name; for an expert with its number at the end: "model.layers.1.mlp.experts.down.3".
        gemm: fprop (a: x, b: w), dgrad (dy, wᵀ) or wgrad (dyᵀ, xᵀ).
        a, b: BF16 or FP32, possibly views of tensors that other GEMMs share.
        expert: the expert's number, or None.
    """

    layer: str
    gemm: GemmName
    a: Tensor
    b: Tensor
    expert: int | None = None


@dataclass(frozen=True, eq=False)
class Capture:
    """The contents of a capture.

    Attributes:
        gemms: the requested GEMMs; for experts, one for each expert that had tokens.
        step: the step of the run, counted from 1.
        recipe: the name of the recipe.
        run: the name of the run's folder.
        octile: the version of octile that wrote the file.
        tokens: int64 [B, S], the token ids that the model read, or None.
    """

    gemms: tuple[CapturedGemm, ...]
    step: int
    recipe: str
    run: str
    octile: str
    tokens: Tensor | None = None


@dataclass
class Recorder:
    """Operands recorded by `capturing`.

    Attributes:
        requested: the GEMMs to capture, as (layer, GEMM).
        tensors: name in the file → recorded tensor, on the CPU.
    """

    requested: frozenset[tuple[str, GemmName]]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def gemms(self) -> tuple[CapturedGemm, ...]:
        """Return the recorded GEMMs; those without all of their operands are left out."""
        complete = [(n, g) for n, g in sorted(self.requested) if all(f"{n}.{o}" in self.tensors for o in OPERANDS[g])]
        return tuple(captured for name, gemm in complete for captured in _captured_gemms(self.tensors, name, gemm))

    def save(self, path: Path, step: int, recipe: str, run: str, tokens: Tensor | None = None) -> Path:
        """Write the file, and create its folder if necessary.

        Raises:
            RuntimeError: a requested GEMM did not run, for lack of a forward and a backward pass.
        """
        for layer, gemm in sorted(self.requested):
            if any(f"{layer}.{operand}" not in self.tensors for operand in OPERANDS[gemm]):
                raise RuntimeError(f"{gemm} of {layer} did not run, so there is nothing to capture")
        tensors = self.tensors | ({} if tokens is None else {"tokens": tokens.cpu()})
        metadata = {
            "version": FORMAT_VERSION,
            "octile": __version__,
            "step": step,
            "recipe": recipe,
            "run": run,
            "products": sorted(self.requested),
            "sha256": _digest(tensors),
        }
        write_tensors(path, tensors, {METADATA: json.dumps(metadata)})
        return path


@contextmanager
def capturing(model: nn.Module, layers: str = "*", gemms: Iterable[GemmName] = GEMMS) -> Iterator[Recorder]:
    """Record the operands of the first forward and backward pass inside the context.

    Layers of which no GEMM is observed (`LayerWeights.unobserved`) are left out.

    Raises:
        ValueError: a pattern of layers matches no converted layer, or there is none but these.
    """
    found = observed_weights(model, layers)
    recorder = Recorder(frozenset((name, gemm) for name in found.weights for gemm in gemms))
    needed = {f"{name}.{operand}" for name, gemm in recorder.requested for operand in OPERANDS[gemm]}

    def record(name: str, tensor: Tensor | None) -> None:
        if tensor is not None and name in needed and name not in recorder.tensors:
            recorder.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def observe(weight: Tensor, fprop: ObservedGemm) -> Backward | None:
        name = found.name_of(weight)
        if name is None or f"{name}.offs" in recorder.tensors or f"{name}.dy" in recorder.tensors:
            return None
        x, offs = fprop.before, fprop.offs

        def backward(gemm: ObservedGemm) -> None:  # a forward pass counts only if a backward pass follows
            dy = gemm.before if gemm.name == "dgrad" else gemm.before.mT
            record(f"{name}.x", x)
            record(f"{name}.w", weight)
            record(f"{name}.dy", dy)
            if offs is not None:
                recorder.tensors.setdefault(f"{name}.offs", offs.detach().cpu())

        return backward

    with observe_gemms(observe):
        yield recorder


def parse_gemm_names(text: str) -> tuple[GemmName, ...]:
    """Parse names of GEMMs: "fprop,wgrad" → ("fprop", "wgrad").

    Raises:
        ValueError: a name is not that of a GEMM.
    """
    requested = [name.strip() for name in text.split(",")]
    for name in requested:
        if name not in GEMMS:
            raise ValueError(f"products must be some of {', '.join(GEMMS)}, not {name!r}")
    return tuple(gemm for gemm in GEMMS if gemm in requested)


def load(path: Path) -> Capture:
    """Read a capture.

    Raises:
        FileNotFoundError, IsADirectoryError: path is not a file.
        ValueError: the file is damaged, is not a capture, or has another version of the format.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a capture: write one with octile lab capture")
    if not path.exists():
        raise FileNotFoundError(f"the capture {path} does not exist: write one with octile lab capture")
    file = TensorFile(path)
    metadata = _read_metadata(path, file.metadata)
    tensors = {name: file.read(name) for name in file.specs}
    try:
        if _digest(tensors) != metadata["sha256"]:
            raise ValueError(f"{path} is damaged: its tensors do not match their checksum")
        gemms = tuple(
            captured for layer, gemm in metadata["products"] for captured in _captured_gemms(tensors, layer, gemm)
        )
        return Capture(
            gemms, metadata["step"], metadata["recipe"], metadata["run"], metadata["octile"], tensors.get("tokens")
        )
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error.args[0]}") from None


def _read_metadata(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """Return the capture's metadata from a file's header.

    Raises:
        ValueError: the file is not a capture, has another version of the format, or is damaged.
    """
    if METADATA not in header:
        raise ValueError(f"{path} is not a capture: write one with octile lab capture")
    try:
        metadata = json.loads(header[METADATA])
        version = metadata["version"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: its metadata {METADATA} cannot be read") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} is a capture of version {version}, written by octile {metadata.get('octile')}; this is octile"
            f" {__version__}, which reads version {FORMAT_VERSION}: capture the step again"
        )
    for name, kind in FIELDS.items():
        if name not in metadata:
            raise ValueError(f"{path} is damaged: it has no {name}")
        if not isinstance(metadata[name], kind):
            raise ValueError(f"{path} is damaged: its {name} is {metadata[name]!r}")
    for entry in metadata["products"]:
        if not isinstance(entry, list) or len(entry) != 2 or entry[1] not in GEMMS:
            raise ValueError(f"{path} is damaged: its products hold {entry!r}, which is not a pair of layer and GEMM")
    return dict(metadata)


def _captured_gemms(tensors: Mapping[str, Tensor], layer: str, gemm: GemmName) -> Iterator[CapturedGemm]:
    """Yield a GEMM of a layer; for experts, one for each expert that has tokens."""
    operands = {operand: tensors[f"{layer}.{operand}"] for operand in OPERANDS[gemm]}
    offs = tensors.get(f"{layer}.offs")
    if offs is None:
        yield CapturedGemm(layer, gemm, *_gemm_operands(gemm, operands))
        return
    for group, (start, end) in enumerate(pairwise([0, *offs.tolist()])):
        if end > start:
            own = {name: t[group] if name == "w" else t[start:end] for name, t in operands.items()}
            yield CapturedGemm(f"{layer}.{group}", gemm, *_gemm_operands(gemm, own), group)


def _gemm_operands(gemm: GemmName, operands: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a and b of a GEMM from x, w and dy."""
    if gemm == "fprop":
        return operands["x"], operands["w"]
    if gemm == "dgrad":
        return operands["dy"], operands["w"].mT
    return operands["dy"].mT, operands["x"].mT


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
