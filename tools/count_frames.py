"""Count the Python frames and files on the way of a GEMM to its launch, and the files that a chat enters.

    python -m tools.count_frames          # from `octile.nn.Linear` to the driver call that launches its GEMM
    python -m tools.count_frames chat     # from an HTTP request to `octile serve` to its response

Neither needs a GPU. For the first one the GEMMs' CUDA kernels are called with tensors on the CPU, and the driver is
replaced by a fake one. Only octile's own frames and files count, not torch's. For each GEMM it prints

    frames   on the stack when the driver is called, from `Linear.forward` or `QuantizedLinear.backward` on
    files    that these frames are in
    entered  files with a function that was called on the way, those that quantize operands left out

The first call of a shape is cold: it is checked, planned and compiled. Later calls are warm.

A chat is a completion of two tokens by a tiny model on a CPU. Its files are those of octile in which a function was
called in any process of the server. The first chat is cold, the second one warm.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

import octile.nn
from octile.checkpoint.hugging_face import save
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.jit import driver, specialize, tensor_map
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.fused import quantize
from octile.ops import matmul
from octile.ops.operator import Operator
from octile.tokenizer import Tokenizer

PACKAGE = Path(octile.__file__).parent
GPU = torch.device("cuda", 0)
QUANTIZATIONS = {
    f.__code__
    for f in (quantize.quantize_operand, quantize.quantize_weight, quantize.quantize_gradient, quantize.requantize)
}
CHAT = "one chat, two tokens"
CHAT_MODEL = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=0,
    num_attention_heads=2,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    max_position_embeddings=128,
    rope_scaling=None,
)
PROFILER = """\
# Python imports a module of this name when a process starts. While the file of the record exists, each call of a
# function of octile appends the function's file to it.
import os, sys, threading

def profile(frame, event, _):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith({package!r}):
        try:
            record = os.open({record!r}, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            return
        os.write(record, f"{{file}}\\n".encode())
        os.close(record)

threading.setprofile(profile)
sys.setprofile(profile)
"""
STARTS = ("nn/linear.py:Linear.forward", "nn/fused/linear.py:QuantizedLinear.backward")


@dataclass
class Walk:
    """The way to one launch: the frames on the stack, outermost first, and all files entered."""

    frames: list[str]
    entered: list[str]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(frame.partition(":")[0] for frame in self.frames))


@dataclass
class Recorder:
    """Profile octile's calls and record a walk for every launch."""

    walks: list[Walk] = field(default_factory=list)
    entered: dict[str, None] = field(default_factory=dict)
    quantizing: int = 0

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code in QUANTIZATIONS and event in ("call", "return"):
            self.quantizing += 1 if event == "call" else -1
        elif event == "call" and not self.quantizing and (place := _place(frame)):
            if place in STARTS:
                self.entered.clear()
            self.entered[place.partition(":")[0]] = None

    def launch(self, *_: Any) -> tuple[Any]:
        """Replace cuLaunchKernelEx: record the stack instead of launching."""
        stack, frame = [], sys._getframe(1)
        while frame is not None:
            if place := _place(frame):
                stack.append(place)
                if place in STARTS:
                    break
            frame = frame.f_back
        self.walks.append(Walk(stack[::-1], list(self.entered)))
        return (driver.SUCCESS,)


class FakeKernel:
    """A kernel that is compiled but not loaded; its launches are real ones that call the fake driver."""

    def __init__(self, name: str, image: bytes, device: int) -> None:
        self.name, self.device, self.function = name, device, None

    def current_stream(self) -> int:
        return 0

    def in_context(self) -> Any:
        return mock.MagicMock()

    def ready(self, *_: Any) -> driver.Launch:
        return driver.Launch(self, None, None, 0)  # type: ignore[arg-type]


def _place(frame: FrameType) -> str | None:
    """Return the file and function of a frame of octile, or None for other frames."""
    return _place_of(frame.f_code)


@cache
def _place_of(code: CodeType) -> str | None:
    file = Path(code.co_filename)
    if not file.is_relative_to(PACKAGE):
        return None
    return f"{file.relative_to(PACKAGE).as_posix()}:{code.co_qualname}"


@contextmanager
def fake_gpu(
    operators: Collection[Operator], load: Callable[..., Any], launch: Callable[..., tuple[Any]]
) -> Iterator[None]:
    """A context in which tensors on the CPU seem to be on a Hopper GPU.

    Args:
        operators: these call their CUDA kernels; others compute on the CPU.
        load: replaces `specialize.load`.
        launch: replaces cuLaunchKernelEx.
    """
    patches: list[tuple[Any, str, Any]] = [
        (Operator, "_can_call_kernel", lambda operator, _: operator in operators),
        (request, "why_not_on", lambda device: None),
        (num_sms, "chip", lambda device: Chip(132)),
        (num_sms, "multiprocessors", lambda device: 132),
        (specialize, "load", load),
        (driver, "Kernel", FakeKernel),
        (driver, "driver", SimpleNamespace(cuLaunchKernelEx=launch)),
        (tensor_map, "_encoder", lambda: lambda *_: 0),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.Tensor, "is_cuda", True),  # so that the weight is also stored transposed
    ]
    with ExitStack() as stack:
        for module, name, fake in patches:
            stack.enter_context(mock.patch.object(module, name, fake))
        yield


def record(call: Callable[[], object]) -> Recorder:
    """Run a call on a machine that seems to have a Hopper GPU, and record its launches."""
    recorder, load = Recorder(), specialize.load
    gemms = matmul.matmul_nt, matmul.matmul_nt_out
    with fake_gpu(gemms, lambda name, constants, _, headers: load(name, constants, GPU, headers), recorder.launch):
        sys.setprofile(recorder.profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return recorder


def files_of_chats(folder: Path, n_chats: int = 2) -> list[list[str]]:
    """Serve a tiny model with `octile serve`, and return the files of octile that each of several equal chats enters.

    Args:
        folder: an empty one, for the model and the profiler.
        n_chats: how many; each gets two tokens.
    """
    model, record = folder / "model", folder / "record"
    tokenizer = Tokenizer.train([CHAT], CHAT_MODEL.vocab_size)
    save(DeepseekV3(CHAT_MODEL), model, weights="fp8")
    tokenizer.save(model)
    (folder / "sitecustomize.py").write_text(PROFILER.format(package=f"{PACKAGE}/", record=f"{record}"), "utf-8")
    paths = f"{folder}", f"{PACKAGE.parent}", os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "octile", "serve", f"{model}", "--port", "0", "--device", "cpu"]
    found = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = next(match[1] for line in server.stdout if (match := re.search(r"http://([\w.:]+)", line)))
            for _ in range(n_chats):
                record.touch()
                _chat(address)
                files = set(record.read_text("utf-8").splitlines())
                record.unlink()
                found.append(sorted(Path(file).relative_to(PACKAGE).as_posix() for file in files))
        finally:
            server.terminate()
    return found


def _chat(address: str) -> None:
    body = {"model": "model", "messages": [{"role": "user", "content": CHAT}], "max_tokens": 2, "temperature": 0}
    connection = HTTPConnection(address)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = json.load(connection.getresponse())
    finally:
        connection.close()
    if response.get("usage", {}).get("completion_tokens") != 2:
        raise RuntimeError(f"the chat must get 2 tokens, not {response}")


def print_chats() -> None:
    """Print how many files a chat enters, and which."""
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = files_of_chats(Path(folder))
    print(f"{'':12}{'entered':>9}\n{'chat cold':12}{len(cold):9}\n{'chat warm':12}{len(warm):9}")
    for title, files in (("warm", warm), ("cold only", sorted({*cold} - {*warm}))):
        print("\n".join([f"\nentered by chat {title}", *(f"    {file}" for file in files)]))


def main() -> None:
    """Print the walks of a linear layer's three GEMMs, cold and warm."""
    layer = octile.nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OCTILE_CACHE_DIR"] = folder
        walks = record(lambda: [layer(x).sum().backward() for _ in range(2)]).walks
    names = [f"{name} {state}" for state in ("cold", "warm") for name in ("fprop", "dgrad", "wgrad")]
    print(f"{'':12}{'frames':>8}{'files':>8}{'entered':>9}")
    for name, walk in zip(names, walks, strict=True):
        print(f"{name:12}{len(walk.frames):8}{len(walk.files):8}{len(walk.entered):9}")
    for name in ("fprop warm", "wgrad warm"):
        print(f"\n{name}")
        for frame in walks[names.index(name)].frames:
            print(f"    {frame}")
    print("\nentered by fprop cold")
    for file in walks[0].entered:
        print(f"    {file}")


if __name__ == "__main__":
    print_chats() if sys.argv[1:] == ["chat"] else main()
