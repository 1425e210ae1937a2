"""Compilation of all Triton kernels without a GPU, and the registers and memory that each uses.

The launches are those of training and serving, with meta tensors: instead of being run, each is compiled to machine
code for a given architecture.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.triton import (
    adamw,
    cross_entropy,
    decode_latents,
    decode_rows,
    decode_step,
    gate,
    gather_rows,
    gradient_norms,
    grouped,
    groups,
    heads,
    high_precision,
    index_rows,
    latent_cache,
    matmul,
    norm,
    packed_attention,
    paged_attention,
    peer_rows,
    permute,
    quantize,
    ragged_attention,
    rope,
    routing_plan,
    row_invariant,
    sample_tokens,
    sequence_balance,
    swiglu,
    tensor_core,
    transpose,
)
from octile.kernels.triton.compile_cases import CompileCases
from octile.kernels.triton.device import DeviceProperties, assume_device
from octile.kernels.triton.planning import TritonLaunch, recorded_launches

ARCHITECTURES = {
    "sm_80": DeviceProperties(num_sms=108, shared_bytes=163 * 1024, fp8=False, dependent_launch=False),  # A100
    "sm_86": DeviceProperties(num_sms=84, shared_bytes=99 * 1024, fp8=False, dependent_launch=False),  # A40, RTX 3090
    "sm_89": DeviceProperties(num_sms=142, shared_bytes=99 * 1024, fp8=True, dependent_launch=False),  # L40, RTX 4090
    "sm_90": DeviceProperties(num_sms=132, shared_bytes=SHARED_BYTES, fp8=True, dependent_launch=True),  # H100, H200
    "sm_100": DeviceProperties(num_sms=148, shared_bytes=227 * 1024, fp8=True, dependent_launch=True),  # B200
}

MODULES = (
    quantize, transpose, swiglu, norm, cross_entropy, gate, sequence_balance, routing_plan, groups, peer_rows,
    gather_rows, decode_rows, permute, rope, ragged_attention, packed_attention, index_rows, latent_cache,
    paged_attention, decode_latents, heads, sample_tokens, decode_step, row_invariant, adamw, gradient_norms, matmul,
    grouped, high_precision, tensor_core,
)  # fmt: skip


@dataclass(frozen=True)
class CompiledTritonKernel:
    """The registers and stack bytes (spills) of a thread, and the shared memory, of a compiled kernel."""

    kernel: str
    case: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_all(architecture: str, advance: Callable[[int], object] = lambda n: None) -> list[CompiledTritonKernel]:
    """Compile every kernel in all forms that training and serving use, with and without launches that overlap.

    Args:
        architecture: one of `ARCHITECTURES`, such as "sm_90".
        advance: called with 1 after each of `cases`.

    Raises:
        ValueError: architecture is another one.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {architecture!r}")
    compiled = {}
    for case, launch in cases().items():
        launches: list[TritonLaunch] = []
        overlapping: list[TritonLaunch] = []
        with assume_device(ARCHITECTURES[architecture]):
            with recorded_launches(launches.append):
                launch()
            with recorded_launches(overlapping.append), overlapping_launches():
                launch()
        forms = [(case, launched) for launched in launches]
        forms += [(f"{case}, overlapping", launched) for launched in overlapping if launched.options.get("OVERLAPS")]
        for form, launched in forms:
            usage = _compile(architecture, form, launched.function, *_arguments_and_options(launched))
            compiled[usage.kernel, form] = usage  # a GEMM may copy both operands: one entry is enough
        advance(1)
    return list(compiled.values())


def cases() -> CompileCases:
    """The launches whose kernels are compiled, by their names."""
    return {name: launch for module in MODULES for name, launch in module.compile_cases().items()}


def _arguments_and_options(launch: TritonLaunch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a kernel by their names, and the options that are none."""
    names, options = launch.function.arg_names, dict(launch.options)
    arguments = dict(zip(names, launch.args, strict=False))
    return arguments | {name: options.pop(name) for name in names if name in options}, options


def _compile(
    architecture: str, case: str, function: JITFunction, arguments: dict[str, Any], options: dict[str, Any]
) -> CompiledTritonKernel:
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(function.arg_names):
        value, parameter = arguments[name], function.params[index]
        # Triton specializes kernels for an integer 1 and for multiples of 16, unless do_not_specialize names them
        specialized = not isinstance(value, Tensor) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialized and value == 1):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = mangle_type(value)
            if isinstance(value, Tensor) or (specialized and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", int(architecture[3:]), 32), options=options)

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {what: int(count) for what, count in re.findall(r"(\w+):(\d+)", usage)}
    return CompiledTritonKernel(function.__name__.lstrip("_"), case, used["REG"], used["STACK"], kernel.metadata.shared)
