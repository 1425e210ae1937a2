"""Fixtures that run the kernels in Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported, for the whole process: if these tests run together with those
of a GPU, they are skipped.
"""

import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

from octile.kernels.triton.device import DeviceProperties, assume_device
from tests.kernels.triton.gpus import EVERY_GPU, GPUS
from tests.triton_interpreter import quicken_interpreter

TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


@pytest.fixture(params=EVERY_GPU)
def gpu(request: pytest.FixtureRequest) -> Iterator[DeviceProperties]:
    """Simulate launches for a GPU without FP8 and for one with FP8, or for those that a mark of `gpus` names."""
    if not knobs.runtime.interpret:
        pytest.skip("triton was imported for the GPU in this process: run `pytest tests/kernels/triton` alone")
    with assume_device(GPUS[request.param]), np.errstate(all="ignore"):
        yield GPUS[request.param]


@pytest.fixture(autouse=True)
def fast_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken_interpreter(monkeypatch)


@pytest.fixture(autouse=True)
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses carries, ties, subnormals and NaN when it rounds; torch's conversions are the GPU's."""

    def convert(numbers: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        stored = torch.from_numpy(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8))
        cast = stored.view(TORCH[source]).to(TORCH[target])
        return cast.view(torch.uint8).numpy().view(f"u{cast.element_size()}").reshape(numbers.shape)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


@pytest.fixture(autouse=True)
def dot_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies BF16 operands as if their bits were integers; they are converted to FP32, exactly."""
    dot = interpreter.InterpreterBuilder.create_dot

    def in_float32(operand: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        stored = torch.from_numpy(np.ascontiguousarray(operand.data).view(np.int16)).view(torch.bfloat16)
        return interpreter.TensorHandle(stored.float().numpy(), tl.float32)

    def create_dot(self, a, b, d, *options):  # type: ignore[no-untyped-def]
        return dot(self, in_float32(a), in_float32(b), d, *options)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
