"""The same GEMMs by other libraries, on the operands of a `PreparedCase`, in the layouts that they need.

BF16                    torch's GEMM of the values before quantization (FP32 on a CPU)
cuBLASLt fast · slow    per-tensor scales; accumulated in the tensor cores, or promoted
cuBLASLt blockwise      1×128 with 128×128 or 1×128 (CUDA 12.9 and later)
DeepGEMM                where it can be imported
octile 1D2D             octile itself, compared with its 1D1D GEMM that stores BF16
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.bench.gemm_case import PreparedCase, group_slices
from octile.ops.matmul import matmul_nt_out
from octile.scaled import quantize

MAX_PEER_DIFFERENCE = 1e-2  # see `gemm_case.difference`; beyond it the library did not read the operands as intended
Call = Callable[[], Tensor]


def peer_calls(setup: PreparedCase, expected: Tensor) -> dict[str, Call]:
    """Return the peers that can compute a case on this machine, after one call each.

    Args:
        setup: the case.
        expected: its high-precision result.

    Returns:
        name → call. Why a peer is missing is printed to stderr.
    """
    found = {}
    for name, prepare in _candidates(setup).items():
        try:
            call, out = prepare()
            setup.check(call, expected, out, MAX_PEER_DIFFERENCE)
            found[name] = call
        except Exception as error:
            why = " ".join(str(error).split())[:160]
            print(f"{setup.case.name} {setup.case.what}: no {name}: {type(error).__name__}: {why}", file=sys.stderr)
    return found


def _candidates(s: PreparedCase) -> dict[str, Callable[[], tuple[Call, Tensor]]]:
    # torch has no masked GEMM
    found = {} if s.case.kind == "masked" else {"BF16" if s.x.is_cuda else "torch FP32": lambda: _high_precision(s)}
    if not s.x.is_cuda:
        return found
    if s.case.kind == "dense":
        if not s.case.accumulate:  # cuBLASLt's FP8 GEMMs cannot accumulate into an FP32 output
            found |= {"cuBLASLt fast": lambda: _per_tensor(s, True), "cuBLASLt slow": lambda: _per_tensor(s, False)}
            found["cuBLASLt blockwise"] = lambda: _blockwise(s)
        if s.case.tiles and not s.case.accumulate:
            found["octile 1D2D"] = lambda: _octile_1d2d(s)
    if (s.case.accumulate or not s.case.tiles) and find_spec("deep_gemm"):  # on Hopper its 1D1D GEMMs only add
        found["DeepGEMM"] = lambda: _deep_gemm(s)
    return found


def deep_gemm_call(s: PreparedCase) -> Call:
    """Return DeepGEMM's call for a case; DeepGEMM must be installed."""
    return _deep_gemm(s)[0]


def _high_precision(s: PreparedCase) -> tuple[Call, Tensor]:
    return s.high_precision, torch.empty(0, device=s.x.device)


def _per_tensor(s: PreparedCase, fast: bool) -> tuple[Call, Tensor]:
    x, w, one = s.x.to(torch.float8_e4m3fn), s.w.to(torch.float8_e4m3fn), torch.ones((), device=s.x.device)

    def call() -> Tensor:
        return torch._scaled_mm(x, w.mT, one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    return call, torch.empty(0, device=s.x.device)


def _blockwise(s: PreparedCase) -> tuple[Call, Tensor]:
    kind, unswizzled = F.ScalingType, F.SwizzleType.NO_SWIZZLE
    scale_a, scale_b = s.a.scale.mT.contiguous().mT, s.b.scale.mT.contiguous().mT
    if not s.case.tiles:  # [K blocks, N blocks]; cuBLASLt needs a multiple of 4 K blocks
        scale_b = F.pad(s.b.scale, (0, -s.b.scale.shape[1] % 4))[:, : s.b.scale.shape[1]].mT
    b_kind = kind.BlockWise1x128 if s.case.tiles else kind.BlockWise128x128

    def call() -> Tensor:
        return F.scaled_mm(
            s.a.data,
            s.b.data.mT,
            scale_a,
            kind.BlockWise1x128,
            scale_b,
            b_kind,
            unswizzled,
            unswizzled,
            output_dtype=torch.bfloat16,
        )

    return call, torch.empty(0, device=s.x.device)


def _octile_1d2d(s: PreparedCase) -> tuple[Call, Tensor]:
    b, out = quantize(s.w, (128, 128)), torch.empty_like(s.out)

    def call() -> Tensor:
        matmul_nt_out(out, s.a.data, s.a.scale, s.a.block, b.data, b.scale, b.block, False)
        return out

    return call, out


def _deep_gemm(s: PreparedCase) -> tuple[Call, Tensor]:
    """Prepare DeepGEMM's call, with the signatures of DeepGEMM 2.6.1."""
    deep_gemm, out = import_module("deep_gemm"), torch.empty_like(s.out)
    if s.case.kind == "wgrad":
        return _deep_gemm_wgrad(deep_gemm, s, out), out
    a = s.a.data, deep_gemm.get_mn_major_tma_aligned_tensor(s.a.scale.contiguous())
    b_scale = s.b.scale.contiguous()
    b = s.b.data, deep_gemm.get_mn_major_tma_aligned_tensor(b_scale) if s.case.tiles else b_scale

    def call() -> Tensor:
        if s.case.kind == "masked":
            deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, out, s.sizes, s.case.expected_rows)
        elif s.case.kind == "grouped":
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, groups)
        elif s.case.accumulate:
            deep_gemm.fp8_gemm_nt(a, b, out, c=out, recipe=(1, 1, 128))
        else:
            deep_gemm.fp8_gemm_nt(a, b, out)
        return out

    if s.case.kind == "grouped":
        each = torch.arange(s.case.groups, dtype=torch.int32, device=s.x.device)
        groups = each.repeat_interleave(torch.tensor(s.case.sizes, device=s.x.device))
    return call, out


def _deep_gemm_wgrad(deep_gemm: Any, s: PreparedCase, out: Tensor) -> Call:
    """Prepare DeepGEMM's weight gradients: each group's data transposed separately, one group after another."""
    slices = group_slices(s.case)
    a, b = (
        (torch.cat([q.data.view(torch.uint8)[:, part].reshape(-1) for part in slices]).view(q.data.dtype), q.scale)
        for q in (s.a, s.b)
    )
    tokens = torch.tensor(s.case.sizes, dtype=torch.int32, device=s.x.device)

    def call() -> Tensor:
        deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, s.case.sizes, tokens, out, recipe=(1, 1, 128))
        return out

    return call
