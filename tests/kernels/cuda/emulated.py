"""Helpers of the tests that run the GEMM kernel in the emulator, with the expected result, bit for bit."""

import math

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request as gemm_request
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.launch_cache import launch_key
from octile.kernels.cuda.gemm.launch_plan import plan_launch
from octile.kernels.cuda.gemm.request import GemmRequest
from octile.kernels.cuda.jit.tensor_map import TensorMap
from octile.kernels.memory_layout import new_scale, padded
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.ops.quantize import quantize
from tools import emulator

Operand = tuple[Tensor, Tensor, Scales]
SIGNED_NAN = 0xFF  # in either format


def operand(shape: tuple[int, ...], scales: Scales, seed: int = 0, fmt: str = "e4m3") -> Operand:
    """A random operand as the kernels store it: rows at multiples of 16 bytes, 1×128 scales column-major."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randn(*shape[:-1], 1, generator=generator))
    block = block_of(scales, x)
    data, scale = quantize(x, *block, fmt, False)
    return aligned(data), new_scale(x, *block).copy_(scale), scales


def aligned(data: Tensor) -> Tensor:
    buffer = torch.full((*data.shape[:-1], padded(data.shape[-1])), SIGNED_NAN, dtype=torch.uint8)  # must not be read
    return buffer.view(data.dtype)[..., : data.shape[-1]].copy_(data)


def block_of(scales: Scales, x: Tensor) -> tuple[int, int]:
    whole = (x.shape[-2], x.shape[-1])
    return {Scales.PER_ROW: (1, 128), Scales.PER_BLOCK: (128, 128), Scales.PER_TENSOR: whole}[scales]


def map_of(t: Tensor, box: tuple[int, ...], swizzle: int = 0) -> TensorMap:
    """The tensor map of a torch tensor."""
    return TensorMap(t.data_ptr(), t.dtype, t.shape, t.stride(), box, swizzle)


def poisoned(*shape: int, dtype: torch.dtype, gap: int = 0) -> Tensor:
    """A tensor of NaN with `gap` elements between its rows."""
    return torch.full((*shape[:-1], shape[-1] + gap), math.nan, dtype=dtype)[..., : shape[-1]]


def emulate(
    config: GemmConfig,
    out: Tensor,
    a: Operand,
    b: Operand,
    sizes: Tensor | None = None,
    seed: int = 0,
    num_sms: int = 4,
) -> Tensor:
    """Run a GEMM on an emulated GPU of few SMs, into out; returns out.

    A programmatic kernel begins before the previous one has written a, its scales, out, the workspace of split-K and,
    unless its groups are early, the sizes.
    """
    operands = [_operand(x, config.schedule) for x in (a, b)]
    options = (config.accumulate, config.promote, config.zero_rest)
    request = GemmRequest(config.schedule, *operands, out.dtype, out, sizes, *options)
    made = plan_launch(request, Chip(max(num_sms, config.cluster_size)), config)
    _, pointers = launch_key(request)
    partials, arrivals = torch.full((made.partials,), math.nan), torch.zeros(made.arrivals, dtype=torch.int32)
    addresses = partials.data_ptr(), arrivals.data_ptr()
    previous = []
    if config.programmatic:
        own_sizes = None if config.early_groups else sizes
        written = (t for t in (own_sizes, partials, arrivals) if t is not None and len(t))
        previous = [a[0], a[1].mT, *out.unbind(), *written]
    emulator.run(
        "gemm",
        config.constants(),
        grid=made.grid,
        cluster=config.cluster_size,
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        arguments=made.arguments(pointers, *addresses, lambda tensor, pointer: tensor._replace(pointer=pointer)),
        headers=config.headers(),
        memory=[*a[:2], *b[:2], out, partials, arrivals, *([] if sizes is None else [sizes])],
        previous=previous,
        seed=seed,
        arithmetic="hopper",
    )
    assert not arrivals.any(), "arrival counters must be zero again for the next launch"
    return out


def _operand(x: Operand, schedule: Schedule) -> gemm_request.Operand:
    data, scale, kind = x
    operand = gemm_request.Operand(data, scale, block_of(kind, data))
    return operand.mT if schedule is Schedule.ALONG_K else operand


def exact(a: Operand, b: Operand, promote: bool = True) -> Tensor:
    """a[M, K] · b[N, K]ᵀ in float32 as Hopper computes it, bit for bit."""
    (a_data, a_scale, a_kind), (b_data, b_scale, b_kind) = a, b
    blocks = block_of(a_kind, a_data), block_of(b_kind, b_data)
    return tensor_core_scaled_matmul(
        a_data, a_scale, blocks[0], b_data, b_scale, blocks[1], promote_every=128 if promote else None
    )


def group(x: Operand, g: int) -> Operand:
    return x[0][g], x[1][g], x[2]


def rows(x: Operand, which: slice) -> Operand:
    return x[0][which], x[1][which], x[2]


def between(x: Operand, k: slice) -> Operand:
    """The operand with zeros outside of k."""
    data = torch.zeros_like(x[0].view(torch.uint8))
    data[:, k] = x[0].view(torch.uint8)[:, k]
    return data.view(x[0].dtype), x[1], x[2]


def config(tile_m: int, tile_n: int, stages: int = 3, **others) -> GemmConfig:
    """A kernel configuration; it stores by TMA unless `others` name another store."""
    others.setdefault("staged_boxes", 0 if "store" in others else 1)
    if others.get("schedule", Schedule.DENSE) is not Schedule.DENSE:
        others.setdefault("max_groups", 32)
    return GemmConfig(tile_m, tile_n, stages, **others)
