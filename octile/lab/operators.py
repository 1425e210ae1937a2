"""The operators of a forward pass: recorded on one device with their arguments and results, recomputed on another.

A recording is one safetensors file. It has texts with the log-probabilities of their tokens, and of a few tokens every
operator that torch's dispatcher has called, octile's and torch's, with the values before and after it. Operators that
make no numbers (views, copies, empty tensors) are left out. A weight of the model is named, not stored. Equal tensors
are stored once.

Each operator is recomputed from the recorded arguments, so that a difference is its own. The first one that differs is
also the first that differs in a whole forward pass, since all arguments before it are equal.

Its metadata `octile_rollout` is JSON: the version of the format and of octile, the device, a checksum of the model's
weights, and the calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from octile import __version__
from octile.checkpoint.tensor_file import TensorFile, write_tensors
from octile.lab.rollout import Text
from octile.models.deepseek_v3 import DeepseekV3
from octile.ops.cross_entropy import cross_entropy
from octile.ops.high_precision import without_reduced_precision_reduction

FORMAT_VERSION = 1
METADATA = "octile_rollout"
RECORDED_TOKENS = 48  # of a text, whose operators are recorded
SKIPPED = {  # torch's operators that make no numbers, or copy them
    "alias", "arange", "clone", "copy_", "detach", "empty", "empty_like", "empty_strided", "full", "full_like",
    "new_empty", "new_full", "new_zeros", "zeros", "zeros_like", "_unsafe_view",
}  # fmt: skip
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Call:
    """A recorded call of an operator; values are encoded as JSON, tensors by their names in the file.

    Attributes:
        name: the operator with its overload, such as "octile.matmul_nt.default".
        place: where in the model, such as "block 1".
        args, kwargs: the arguments, with the values that written ones had before.
        results: the names of the tensors that it returned, then those of the arguments that it wrote.
    """

    name: str
    place: str
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[str]


@dataclass(frozen=True, eq=False)
class Recording:
    """The contents of a recording.

    Attributes:
        device: the name of the device that computed it.
        weights: checksum of the model's weights.
        texts: texts with their log-probabilities.
        calls: the operators of a few tokens, in the order of their calls.
        tensors: the tensors that calls name.
        octile: the version of octile that wrote the file.
    """

    device: str
    weights: str
    texts: list[Text]
    calls: list[Call]
    tensors: dict[str, Tensor]
    octile: str = __version__

    def save(self, path: Path) -> Path:
        """Write the file."""
        tensors = dict(self.tensors)
        for i, text in enumerate(self.texts):
            tensors[f"text.{i}.prompt"] = torch.tensor(text.prompt)
            tensors[f"text.{i}.tokens"] = torch.tensor(text.tokens)
            tensors[f"text.{i}.log_probs"] = torch.tensor([*text.read, *text.decoded], dtype=torch.float32)
        metadata = {
            "version": FORMAT_VERSION,
            "octile": self.octile,
            "device": self.device,
            "weights": self.weights,
            "texts": len(self.texts),
            "calls": [vars(call) for call in self.calls],
        }
        write_tensors(path, tensors, {METADATA: json.dumps(metadata)})
        return path

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read a file.

        Raises:
            FileNotFoundError: path is not a file.
            ValueError: the file is damaged, is no recording, or has another version of the format.
        """
        if not path.is_file():
            raise FileNotFoundError(f"the recording {path} does not exist: write one with octile lab rollout --record")
        file = TensorFile(path)
        if METADATA not in file.metadata:
            raise ValueError(f"{path} is no recording: write one with octile lab rollout --record")
        try:
            found = json.loads(file.metadata[METADATA])
            if found["version"] != FORMAT_VERSION:
                raise ValueError(f"{path} has version {found['version']}, and this octile reads {FORMAT_VERSION}")
            tensors, texts = {name: file.read(name) for name in file.specs}, []
            for i in range(found["texts"]):
                prompt, tokens, log_probs = (
                    tensors.pop(f"text.{i}.{name}").tolist() for name in ("prompt", "tokens", "log_probs")
                )
                n = len(log_probs) - len(tokens)
                texts.append(Text(prompt, tokens, log_probs[n:], log_probs[:n]))
            calls = [Call(**call) for call in found["calls"]]
            return cls(found["device"], found["weights"], texts, calls, tensors, found["octile"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged: {METADATA} cannot be read ({error})") from None


@torch.no_grad()
def record(model: DeepseekV3, texts: Sequence[Text], n_recorded: int = 1) -> Recording:
    """Record texts with their log-probabilities, and the operators of the first tokens of the first n_recorded ones.

    Args:
        model: in evaluation mode, whose forward pass is that of training.
        texts: whose log-probabilities an engine, or this model, has computed.
        n_recorded: texts whose operators are recorded, for `RECORDED_TOKENS` tokens of each.
    """
    device = model.lm_head.weight.device
    recorder = _Recorder(model)
    for text in texts[:n_recorded]:
        tokens = torch.tensor([(text.prompt + text.tokens)[:RECORDED_TOKENS]], device=device)
        with _placed(model, recorder), recorder:
            model.log_probs(tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Recording(name, weights_digest(model), list(texts), recorder.calls, recorder.tensors)


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers, with their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


@contextmanager
def _placed(model: DeepseekV3, recorder: _Recorder) -> Iterator[None]:
    """Tell a recorder in which part of the model an operator is called."""
    n_blocks = model.config.num_hidden_layers
    named: list[tuple[str, nn.Module]] = [(f"block {i}", model.model.layers[i]) for i in range(n_blocks)]
    named += [("embedding", model.model.embed_tokens), ("norm", model.model.norm), ("head", model.lm_head)]

    def enter(place: str, *_: Any) -> None:
        recorder.place = place

    handles = [module.register_forward_pre_hook(partial(enter, place)) for place, module in named]
    recorder.place = "positions"
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(TorchDispatchMode):
    """Records the operators that are called while it is active.

    Attributes:
        place: where in the model the next call is.
        calls, tensors: what was recorded.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.place = ""
        self.calls: list[Call] = []
        self.tensors: dict[str, Tensor] = {}
        self._weights = {
            t.untyped_storage().data_ptr(): name
            for name, t in chain(model.named_parameters(), model.named_buffers())
            if t.numel()
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _makes_numbers(func):
            return func(*args, **kwargs)
        before = self._encode(list(args)), {name: self._encode(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        after = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)] + _written(func, args, kwargs)
        self.calls.append(Call(str(func), self.place, *before, [self._store(t) for t in after]))
        return result

    def _encode(self, value: Any) -> Any:
        """Encode arguments for JSON."""
        if isinstance(value, list | tuple):
            return [self._encode(each) for each in value]
        if isinstance(value, Tensor):
            weight = self._weights.get(value.untyped_storage().data_ptr()) if value.numel() else None
            if weight is None:
                return {"tensor": self._store(value)}
            return {"weight": weight, "view": [list(value.shape), value.stride(), value.storage_offset()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None  # where the call is repeated these are those of its tensors
        return value

    def _store(self, tensor: Tensor) -> str:
        """Store a tensor, if there is none with its values yet, and return its name."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        digest = hashlib.sha256(f"{host.dtype} {list(host.shape)}".encode())
        digest.update(host.view(-1).view(torch.uint8).numpy().data)
        name = digest.hexdigest()[:24]
        self.tensors.setdefault(name, host)
        return name


def _makes_numbers(func: Any) -> bool:
    """Return whether an operator computes: it is no view, and not in `SKIPPED`."""
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not is_view and func._schema.name.rpartition("::")[2] not in SKIPPED


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that an operator writes."""
    found: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
    return found


Compute = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]  # an operator and its arguments → its result


def as_called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator with its own arithmetic."""
    return func(*args, **kwargs)


@dataclass
class Comparison:
    """How far the results of an operator agree with the recorded ones.

    Attributes:
        operator: its name, with the number of the result where there are several: "octile.gate[1]".
        calls, values, equal: how many calls and values there are, and how many values have equal bits.
        near: how many values are equal or neighbors in the result's dtype.
        largest: the largest difference in a result, as a share of the largest magnitude in it.
        first: number and place of the first call that differs; None: all are equal.
        error: why it cannot be recomputed.
    """

    operator: str
    calls: int = 0
    values: int = 0
    equal: int = 0
    near: int = 0
    largest: float = 0.0
    first: tuple[int, str] | None = None
    error: str | None = None


@torch.no_grad()
def recompute(
    recording: Recording, model: nn.Module, compute: Compute = as_called, advance: Callable[[int], object] = id
) -> list[Comparison]:
    """Recompute each recorded operator from the recorded arguments, and compare the results.

    Args:
        recording: what was recorded.
        model: with the same weights, on this machine's device.
        compute: computes an operator.
        advance: called with 1 for each call.

    Returns:
        the operators in the order of their first calls.
    """
    weights = dict(chain(model.named_parameters(), model.named_buffers()))
    device = next(model.parameters()).device
    found: dict[str, Comparison] = {}
    for number, call in enumerate(recording.calls):
        func = _operator(call.name)
        decode = partial(_decode, tensors=recording.tensors, weights=weights, device=device)
        args = [decode(value) for value in call.args]
        kwargs = {name: decode(value) for name, value in call.kwargs.items() if value is not None}
        short = call.name.removesuffix(".default")
        try:
            result = compute(func, args, kwargs)
        except Exception as error:  # a reference may refuse what a GPU's kernel takes
            entry = found.setdefault(short, Comparison(short))
            entry.calls += 1
            entry.error = entry.error or f"{type(error).__name__}: {error}"
        else:
            after = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)] + _written(func, args, kwargs)
            for i, (name, actual) in enumerate(zip(call.results, after, strict=True)):
                label = short if len(after) == 1 else f"{short}[{i}]"
                _add(found.setdefault(label, Comparison(label)), actual.cpu(), recording.tensors[name], number, call)
        advance(1)
    return list(found.values())


def _add(entry: Comparison, actual: Tensor, expected: Tensor, number: int, call: Call) -> None:
    entry.calls += 1
    entry.values += expected.numel()
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        entry.error = f"{actual.dtype} {list(actual.shape)} instead of {expected.dtype} {list(expected.shape)}"
        return
    steps = (ordered(actual) - ordered(expected)).abs()
    n_equal = int((steps == 0).sum())
    entry.equal += n_equal
    entry.near += int((steps <= 1).sum())
    if n_equal < steps.numel():
        values = expected.double()
        largest = float((actual.double() - values).abs().max() / values.abs().max().clamp_min(1e-300))
        entry.largest = max(entry.largest, largest)
        entry.first = entry.first or (number, call.place)


def ordered(values: Tensor) -> Tensor:
    """Return int64 numbers that are ordered as values, one apart where these are neighbors; −0 and 0 are neighbors."""
    values = values.contiguous()
    if not values.is_floating_point():
        return values.long()
    size = values.element_size()
    bits, mask = values.view(SIGNED[size]).long(), (1 << (8 * size - 1)) - 1
    return torch.where(bits < 0, -(bits & mask) - 1, bits)


def _operator(name: str) -> Any:
    """Return an operator by its name, such as "aten.add.Tensor"."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _decode(value: Any, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return arguments that `_Recorder._encode` has encoded, with tensors that may be written."""
    if isinstance(value, list):
        return [_decode(each, tensors, weights, device) for each in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]].to(device, copy=True)
    if "weight" in value:
        return weights[value["weight"]].detach().as_strided(*value["view"])
    return getattr(torch, value["dtype"])


class Computing(TorchDispatchMode):
    """Has a function compute the operators of a forward pass, as `recompute` has it compute recorded ones."""

    def __init__(self, compute: Compute):
        super().__init__()
        self._compute = compute

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._compute(func, args, kwargs or {})


@torch.no_grad()
def log_probs(
    model: DeepseekV3, text: Text, compute: Compute = as_called, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Return the log-probabilities of a text's tokens but the first, float32 [S − 1].

    Args:
        model: in evaluation mode.
        text: whose tokens are read.
        compute: computes each operator.
        dtype: dtype of the activations: bfloat16, as `DeepseekV3.log_probs` has them on a GPU, or float32, as on a CPU.
    """
    device = model.lm_head.weight.device
    tokens_BS = torch.tensor([text.prompt + text.tokens], device=device)
    precision = torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)
    with precision, without_reduced_precision_reduction(), Computing(compute):
        logits_BSV = model(tokens_BS)
        return (0.0 - cross_entropy(logits_BSV[0, :-1], tokens_BS[0, 1:].contiguous())[0]).cpu()


def count_equal(expected: Iterable[Tensor], actual: Iterable[Tensor]) -> tuple[int, int, float, float]:
    """Return how many values there are, how many have equal bits, and the mean and largest magnitude of differences."""
    a, b = torch.cat(list(expected)), torch.cat(list(actual))
    d = (a.double() - b.double()).abs()
    n_equal = int((ordered(a) == ordered(b)).sum())
    return len(a), n_equal, float(d.mean()) if len(a) else 0.0, float(d.max()) if len(a) else 0.0
