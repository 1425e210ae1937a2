"""Compare octile's Hopper GEMM kernels with the tensor core model on the CPU, bit for bit in FP32.

`compare` tests single instructions; this module tests what the kernels build from them: the order along K, promotion
with scales, split-K, groups, and the accumulate epilogue.

    make       the operands of a case, on the CPU
    modeled    the GEMM as the model computes it
    compare    how many outputs of the kernel differ

On an H100 or H200, `python -m octile.lab.probe.products` prints a line per case. Shapes: a [M, K], b [N, K],
out [M, N].
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from octile.atomic_files import write_text
from octile.checkpoint.files import check_output_file
from octile.kernels.cuda.gemm import launch_cache, num_sms
from octile.kernels.cuda.gemm.config import BLOCK_K, Scales, Schedule
from octile.kernels.cuda.gemm.launch_plan import plan_launch
from octile.kernels.cuda.gemm.request import GemmRequest, Operand, why_not_on
from octile.kernels.memory_layout import new_scale, padded
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.lab.tensor_core.operand import FORMATS
from octile.ops import accumulator
from octile.ops.quantize import quantize

Run = Callable[[GemmRequest], int]  # runs a GEMM; returns its number of split-K partials
Data = Literal["random", "one sign", "ugly"]
E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
ROW, BLOCK, TENSOR = Scales.PER_ROW, Scales.PER_BLOCK, Scales.PER_TENSOR


@dataclass(frozen=True)
class ProbeGemm:
    """One GEMM.

    Attributes:
        m, n, k: its shape. Grouped: m rows of all groups together; masked: m rows of capacity per group; groups along
            K: k tokens of all groups together.
        b_scales: per row (1×128) for 1D1D, per block (128×128) for 1D2D; per tensor, then for a as well.
        data: "random": N(0, 1), each row with a random factor; "one sign": the magnitudes of these; "ugly": all finite
            values, zeros of both signs, subnormal numbers and scales from 2⁻³⁷ to 2²³. Of "ugly", one row of a has
            scales smaller by 2⁻¹⁰⁰, and others hold a NaN or, in E5M2, Inf.
        a, b: dtypes.
        sizes: the ends of the groups, or the number of used rows per group.
        accumulate: whether the GEMM adds to its output.
        promote: whether the accumulator is promoted every 128 products or never.
    """

    m: int
    n: int
    k: int
    b_scales: Scales = BLOCK
    data: Data = "random"
    a: torch.dtype = E4
    b: torch.dtype = E4
    schedule: Schedule = Schedule.DENSE
    sizes: tuple[int, ...] = ()
    accumulate: bool = False
    promote: bool = True

    def __str__(self) -> str:
        kind = {BLOCK: "1D2D", ROW: "1D1D", TENSOR: "one scale"}[self.b_scales]
        groups = {Schedule.GROUPED: "rows to", Schedule.MASKED: "rows in use", Schedule.ALONG_K: "tokens to"}
        words = [f"{self.m}×{self.n}×{self.k} {kind}", *([] if self.promote else ["never promoted"])]
        words += [f"{groups[self.schedule]} {'/'.join(map(str, self.sizes))}"] if self.sizes else []
        words += ["+="] if self.accumulate else []
        words += [f"{FORMATS[self.a].name}·{FORMATS[self.b].name}"] if (self.a, self.b) != (E4, E4) else []
        return ", ".join([*words, self.data])


_grouped = partial(ProbeGemm, schedule=Schedule.GROUPED)
_masked = partial(ProbeGemm, schedule=Schedule.MASKED)
_along_k = partial(ProbeGemm, schedule=Schedule.ALONG_K, b_scales=ROW)
CASES = (
    ProbeGemm(1, 1, 1),
    ProbeGemm(1, 7168, 2048),
    ProbeGemm(3, 40, 16384),
    ProbeGemm(9, 200, 130, data="ugly"),
    ProbeGemm(16, 576, 7168, data="one sign"),
    ProbeGemm(64, 129, 1000),
    ProbeGemm(77, 131, 257, data="ugly"),
    ProbeGemm(128, 2112, 7168, data="one sign"),
    ProbeGemm(129, 2111, 1000),
    ProbeGemm(300, 257, 10944, data="one sign"),
    ProbeGemm(513, 640, 4097),
    ProbeGemm(4096, 576, 7168),
    ProbeGemm(3400, 3404, 512),
    ProbeGemm(200, 300, 700, a=E5),
    ProbeGemm(200, 301, 900, b=E5, data="ugly"),
    ProbeGemm(130, 258, 4096, a=E5, b=E5, data="one sign"),
    ProbeGemm(511, 258, 3000, accumulate=True),
    ProbeGemm(300, 500, 1000, ROW),
    ProbeGemm(77, 515, 129, ROW, data="ugly"),
    ProbeGemm(2048, 1408, 2000, ROW, accumulate=True),
    ProbeGemm(576, 1000, 4096, ROW, data="one sign", accumulate=True),
    ProbeGemm(260, 130, 1537, ROW, a=E5, data="ugly", accumulate=True),
    ProbeGemm(1000, 96, 16384, ROW, data="one sign"),
    ProbeGemm(300, 260, 4100, TENSOR),
    ProbeGemm(40, 136, 900, TENSOR, data="ugly"),
    ProbeGemm(70, 136, 900, TENSOR, data="ugly", promote=False),
    ProbeGemm(300, 260, 1000, TENSOR, promote=False),
    ProbeGemm(256, 256, 4096, TENSOR, data="one sign", promote=False),
    ProbeGemm(129, 136, 16384, TENSOR, a=E5, data="one sign", promote=False),
    _grouped(200, 260, 1000, sizes=(60, 130, 150, 200)),
    _grouped(703, 129, 4096, sizes=(0, 0, 300, 301, 700), data="one sign"),
    _grouped(330, 72, 160, sizes=(1, 2, 3, 200, 330), a=E5, data="ugly"),
    _grouped(7000, 3400, 200, sizes=(3301, 6990)),
    _masked(150, 300, 1408, sizes=(0, 3, 150)),
    _masked(700, 3400, 130, sizes=(192, 1, 64, 65, 447, 0, 700, 385)),
    _masked(150, 72, 500, sizes=(64, 100, 1, 0), data="ugly"),
    _along_k(300, 520, 3000, sizes=(1000, 1000, 2000, 3000)),
    _along_k(257, 130, 2950, sizes=(1, 130, 131, 2900), data="one sign", accumulate=True),
    _along_k(136, 96, 703, sizes=(70, 71, 72, 700), a=E5, data="ugly", accumulate=True),
)


@dataclass(frozen=True)
class ProbeGemmResult:
    """The result of one case: outputs compared, outputs that differ, and the kernel's number of split-K partials."""

    outputs: int
    differ: int
    parts: int


def make(case: ProbeGemm, seed: int = 0) -> GemmRequest:
    """Make a GEMM request on the CPU whose operands are laid out as octile's quantization lays them out."""
    generator = torch.Generator().manual_seed(seed)
    groups = () if case.schedule in (Schedule.DENSE, Schedule.ALONG_K) else (len(case.sizes),)
    a_shape = (*(groups if case.schedule is Schedule.MASKED else ()), case.m, case.k)
    a_scales = TENSOR if case.b_scales is TENSOR else ROW
    a = Operand(*_operand(a_shape, a_scales, case.a, case.data, generator, special=True))
    b = Operand(*_operand((*groups, case.n, case.k), case.b_scales, case.b, case.data, generator, special=False))
    wgrad_groups = (len(case.sizes),) if case.schedule is Schedule.ALONG_K else ()
    out = torch.randn((*a_shape[:-2], *wgrad_groups, case.m, case.n), generator=generator)
    sizes = torch.tensor(case.sizes, dtype=torch.int32) if case.sizes else None
    operands = (a.mT, b.mT) if case.schedule is Schedule.ALONG_K else (a, b)
    return GemmRequest(case.schedule, *operands, out.dtype, out, sizes, case.accumulate, case.promote)


def modeled(p: GemmRequest, parts: int) -> Tensor:
    """Compute the expected output of a request on the CPU, for a given number of split-K partials."""
    assert p.out is not None
    is_per_tensor = p.scale_kinds()[0] is TENSOR  # such scales are applied at the end
    a, b = (replace(x, scale=torch.ones_like(x.scale)) if is_per_tensor else x for x in p.nt_operands())
    model = partial(tensor_core_scaled_matmul, promote_every=BLOCK_K if p.promote else None)
    if p.schedule is Schedule.DENSE:
        k = p.a.data.shape[1]
        part = math.ceil(math.ceil(k / BLOCK_K) / parts) * BLOCK_K
        result = torch.zeros_like(p.out)
        for i, first in enumerate(range(0, k, part)):
            summed = model(*_between(*a.parts(), first, first + part), *_between(*b.parts(), first, first + part))
            result = result + summed if i else summed
        result = result * (p.a.scale * p.b.scale) if is_per_tensor else result
    elif p.schedule is Schedule.MASKED:
        result = accumulator.masked(model, *a.parts(), *b.parts())
    else:
        assert p.sizes is not None
        ends = p.sizes.tolist()
        rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if p.schedule is Schedule.GROUPED:
            result = accumulator.grouped(model, *a.parts(), *b.parts(), rows)
        else:
            result = accumulator.wgrad(model, *a.mT.parts(), *b.mT.parts(), rows)
    return p.out + result if p.accumulate else result


def compare(case: ProbeGemm, run: Run, device: torch.device) -> ProbeGemmResult:
    """Run a case on a device, its output filled with NaN first, and count outputs that differ from the model."""
    p = make(case)
    assert p.out is not None
    out = _on(device, p.out if p.accumulate else torch.full_like(p.out, math.nan))
    a, b = (Operand(_on(device, x.data), _on(device, x.scale), x.block) for x in (p.a, p.b))
    parts = run(replace(p, a=a, b=b, out=out, sizes=None if p.sizes is None else _on(device, p.sizes)))
    out, expected = out.cpu(), modeled(p, parts)
    if p.schedule is Schedule.MASKED:  # unused rows may hold anything
        assert p.sizes is not None
        used = torch.arange(case.m) < p.sizes[:, None]
        out, expected = out[used], expected[used]
    same = (out.view(torch.int32) == expected.view(torch.int32)) | (out.isnan() & expected.isnan())
    return ProbeGemmResult(out.numel(), int((~same).sum()), parts)


def on_gpu(p: GemmRequest) -> int:
    """Run a request with the kernel that octile chooses for it; see `Run`."""
    launch_cache.launch(p)
    return plan_launch(p, num_sms.chip(p.a.data.device)).config.split_k


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print a line per case. Return 1 if any output differs."""
    parser = argparse.ArgumentParser(prog="python -m octile.lab.probe.products", description=main.__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.json:
        check_output_file("json", chosen.json)

    if reason := why_not_on(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
        print(f"the GEMM kernels do not run here: {reason}", file=sys.stderr)
        return 2
    start, report = time.perf_counter(), {}
    device = torch.device("cuda", torch.cuda.current_device())
    print(f"{'differ':>6}  {'of':>9}  parts  M×N×K on {torch.cuda.get_device_name()}")
    for case in CASES:
        found = report[str(case)] = compare(case, on_gpu, device)
        print(f"{found.differ:6,}  {found.outputs:9,}  {found.parts:5}  {case}", flush=True)
    wrong = sum(found.differ for found in report.values())
    outputs = sum(found.outputs for found in report.values())
    print(f"{len(report)} GEMMs, {outputs:,} outputs, {wrong:,} differ, {time.perf_counter() - start:.0f} s")
    if chosen.json:
        about = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}
        rows = {name: asdict(found) for name, found in report.items()}
        write_text(chosen.json, json.dumps({**about, "cases": rows}, indent=1))
    return 1 if wrong else 0


def _operand(
    shape: tuple[int, ...], scales: Scales, dtype: torch.dtype, data: Data, generator: torch.Generator, special: bool
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Draw data [..., R, K] with rows padded to 16 bytes, their scales as octile stores them, and the block."""
    x = torch.randn(shape, generator=generator)
    block = _block(x, scales)
    if data == "ugly":
        data_bits = _all_values(shape, dtype, generator, special)
        _, scale = quantize(x, *block, FORMATS[dtype].name, False)
        exponent = torch.rand(scale.shape, generator=generator) * 60 - 30
        scale *= torch.exp2(exponent)
        if special and scale.shape[-2] > 8:
            scale[..., 7, :] *= 2.0**-100
    else:
        x = x.abs() if data == "one sign" else x
        x *= torch.exp2(torch.randn(*shape[:-1], 1, generator=generator))
        data_bits, scale = quantize(x, *block, FORMATS[dtype].name, False)
    padded_data = torch.zeros((*shape[:-1], padded(shape[-1])), dtype=torch.uint8).view(dtype)
    return padded_data[..., : shape[-1]].copy_(data_bits), new_scale(x, *block).copy_(scale), block


def _all_values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, special: bool) -> Tensor:
    data_bits = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    finite = data_bits.view(dtype).float().isfinite()
    data_bits[~finite] = 1
    for row, fill in ((1, 0x00), (2, 0x80)):  # zeros of both signs
        data_bits[..., row : row + 1, :] = fill
    data_bits[..., 3:4, :] &= 0x80 | (1 << FORMATS[dtype].mantissa_bits) - 1  # subnormal numbers
    if special:
        data_bits[..., 4:5, -1] = 0x7F  # NaN
        if dtype == E5:
            data_bits[..., 5:7, 0] = 0x7C  # Inf
    return data_bits.view(dtype)


def _block(x: Tensor, scales: Scales) -> tuple[int, int]:
    return {ROW: (1, BLOCK_K), BLOCK: (BLOCK_K, BLOCK_K), TENSOR: (x.shape[-2], x.shape[-1])}[scales]


def _on(device: torch.device, x: Tensor) -> Tensor:
    """Copy a tensor to a device with its strides, which `Tensor.to` does not keep for padded rows."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def _between(
    data: Tensor, scale: Tensor, block: tuple[int, int], first: int, last: int
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Slice columns of an operand; first is a multiple of 128."""
    if block[1] == BLOCK_K:
        scale = scale[:, first // BLOCK_K : -(-last // BLOCK_K)]
    return data[:, first:last], scale, block


if __name__ == "__main__":
    sys.exit(main())
