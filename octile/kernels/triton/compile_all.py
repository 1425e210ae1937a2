"""Compilation of all Triton kernels without a GPU, and the registers and memory that each uses.

The launches are those of training and serving, with meta tensors: instead of being run, each is compiled to machine
code for a given architecture.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from octile.formats import BLOCK, COLUMN_TILE, MX_COLUMN_TILE, MX_TILE, TILE
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import Block, GemmRequest, Operand
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import (
    adamw,
    cross_entropy,
    decode_latents,
    decode_rows,
    decode_step,
    gather_rows,
    gradient_norms,
    grouped,
    high_precision,
    index_rows,
    latent_cache,
    matmul,
    norm,
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
from octile.kernels.triton import gate as expert_gate
from octile.kernels.triton import groups as group_tiles
from octile.kernels.triton.device import DeviceProperties, assume_device

ARCHITECTURES = {
    "sm_80": DeviceProperties(num_sms=108, shared_bytes=163 * 1024, fp8=False),  # A100
    "sm_86": DeviceProperties(num_sms=84, shared_bytes=99 * 1024, fp8=False),  # A40, RTX 3090
    "sm_89": DeviceProperties(num_sms=142, shared_bytes=99 * 1024, fp8=True),  # L40, RTX 4090
    "sm_90": DeviceProperties(num_sms=132, shared_bytes=SHARED_BYTES, fp8=True),  # H100, H200
    "sm_100": DeviceProperties(num_sms=148, shared_bytes=227 * 1024, fp8=True),  # B200
}

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
Quantized = tuple[Tensor, Tensor, tuple[int, int]]  # data, scale and block
Launch = tuple[JITFunction, dict[str, Any], dict[str, Any]]


@dataclass(frozen=True)
class CompiledTritonKernel:
    """The registers and stack bytes (spills) of a thread, and the shared memory, of a compiled kernel."""

    kernel: str
    case: str
    registers: int
    stack_bytes: int
    shared_bytes: int


def compile_all(architecture: str) -> list[CompiledTritonKernel]:
    """Compile every kernel in all forms that training and serving use.

    Args:
        architecture: one of `ARCHITECTURES`, such as "sm_90".

    Raises:
        ValueError: architecture is another one.
    """
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, not {architecture!r}")
    compiled = {}
    for case, launch in _cases().items():
        with assume_device(ARCHITECTURES[architecture]), _recorded_launches() as launches:
            launch()
        for function, arguments, options in launches:
            usage = _compile(architecture, case, function, arguments, options)
            compiled[usage.kernel, case] = usage  # a GEMM may copy both operands: one entry is enough
    return list(compiled.values())


def _cases() -> dict[str, Callable[[], object]]:
    t, n, k, groups = 8192, 4096, 7168, 32
    bf16, fp32 = torch.bfloat16, torch.float32
    offs, tiles = _empty(groups, dtype=torch.int32), _empty(t // 128 + groups, 2, dtype=torch.int32)
    gate, up = _empty(t, 2 * n).chunk(2, dim=1)
    (saved_gate, saved_up), (gate_scale, up_scale) = _operand(t, n, TILE, E4M3, 2)[:2]
    heads, cos = _empty(2, 4096, 128, 192), _empty(4096, 32, dtype=fp32)
    q, angles = _empty(2, 4096, 32, 128).transpose(1, 2), _empty(2, 4096, 128)
    rows_of_token, of_rows = _empty(t, 8, dtype=torch.int32), _empty(t, dtype=fp32)
    experts, logits = _empty(t, 8, dtype=torch.int64), _empty(t, 256, dtype=fp32)
    products = _empty(t, 3 * 256, dtype=fp32), _empty(256, dtype=fp32)  # with the gate's bias
    ragged = _empty(700, 1000, dtype=fp32)  # elements of such a layout are loaded one by one

    def optimizer_step(gradient: torch.dtype, copies: list[Tensor], *flag_and_scale: Tensor) -> None:
        weights, gradients, m, v = ([_empty(n, k, dtype=dtype)] for dtype in (fp32, gradient, bf16, bf16))
        corrections = _empty(1, 3, dtype=fp32)
        adamw.launch(weights, gradients, m, v, copies, corrections, 0.9, 0.95, 1e-8, *flag_and_scale)

    def losses(logits: Tensor) -> None:
        labels = _empty(t, dtype=torch.int64)
        cross_entropy.launch(logits, labels, -100)
        cross_entropy.launch_backward(of_rows, logits, labels, of_rows, -100)

    def dense(
        block: Block, dtype: torch.dtype, k: int, m: int = t, accumulate: bool = False, of_x: Block = TILE
    ) -> None:
        out = _empty(m, n, dtype=fp32 if accumulate else bf16)
        operands = Operand(*_operand(m, k, of_x, dtype)), Operand(*_operand(n, k, block, dtype))
        matmul.launch(GemmRequest(Schedule.DENSE, *operands, out.dtype, out, None, accumulate))

    def with_sizes(schedule: Schedule, a: Quantized, b: Quantized, out_dtype: torch.dtype) -> GemmRequest:
        return GemmRequest(schedule, Operand(*a), Operand(*b), out_dtype, None, offs)

    def exchange() -> None:
        ranks, rows = 8, _operand(8 * t + 1, k, TILE)[:2]
        counters = _empty(ranks, dtype=torch.int64), _empty(ranks, dtype=torch.int64), _empty(2, dtype=torch.int32)
        peers = peer_rows.Peers(0, *counters, 32)
        sent, results = (data.view(torch.uint8) for data in (rows[0], _empty(64 * t, k)))
        numbers, buffer = _empty(8 * t, 8, dtype=torch.int32), _empty(2**34, dtype=torch.uint8)
        peer_rows.launch_barrier(peers)
        peer_rows.launch_send_experts(experts, t, peers)
        peer_rows.launch_local_experts(numbers, 0, 32)
        peer_rows.launch_exchange(sent[:t], rows[1][:t], experts, numbers, 32, buffer, sent, rows[1], t, peers)
        peer_rows.launch_send_back(results, numbers.view(-1), offs, 8 * t, peers)
        gather_rows.launch(sent[:t], numbers.view(-1), _empty(ranks, dtype=torch.int64), sent)

    def decode() -> None:
        ranks, capacity, local = 8, 128, 32
        counters = _empty(ranks, dtype=torch.int64), _empty(ranks, dtype=torch.int64), _empty(2, dtype=torch.int32)
        peers = peer_rows.Peers(0, *counters, 32)
        x, scale = _operand(capacity, k, TILE)[:2]
        out, out_scale = _operand(ranks * capacity, k, TILE, E4M3, local)[:2]
        rows, scales = _empty(ranks * capacity, k, dtype=torch.uint8), _empty(ranks * capacity, k // 128, dtype=fp32)
        chosen, entries = _empty(ranks * capacity, 8, dtype=torch.int32), _empty(local, 1024, dtype=torch.int32)
        counts, y = _empty(local, dtype=torch.int32), _empty(local, ranks * capacity, k)
        decode_rows.launch_send(x.view(torch.uint8), scale, experts[:capacity], local, capacity, 2**23, 2**24, peers)
        to_place = rows, scales, chosen, 0, out.view(torch.uint8), out_scale, entries, counts
        decode_rows.launch_place(capacity, peers, *to_place)
        decode_rows.launch_return(y.view(torch.uint8), entries, counts, capacity * 8, 2**25, peers)
        weights = _empty(ranks * capacity, 8, dtype=fp32)
        out, out_scale = _operand(ranks * capacity * 8, k, TILE)[:2]
        to_sort = rows, scales, chosen, weights, 0, out.view(torch.uint8), out_scale
        decode_rows.launch_send(
            x.view(torch.uint8), scale, experts[:capacity], local, capacity, 2**23, 2**24, peers, weights, 2**25
        )
        decode_rows.launch_sort(capacity, peers, *to_sort, weights.view(-1), entries.view(-1), counts)
        y = _empty(ranks * capacity * 8, k)
        decode_rows.launch_return(y.view(torch.uint8), entries.view(-1), counts, capacity * 8, 2**25, peers, True)
        results, token_rows = _empty(capacity * 8, k), _empty(capacity, k)
        for adds_to in (False, True):
            decode_rows.launch_sum(64, peers, results, 8, token_rows, None, token_rows, adds_to)

    def paged(heads: int, cached: torch.dtype) -> None:
        bytes_or_channels = 656 if cached == torch.uint8 else 576
        pages, lengths = _empty(256, 64, dtype=torch.int32), _empty(256, dtype=torch.int32)
        cache, latents = _empty(4096, 64, bytes_or_channels, dtype=cached), _empty(256, 576)
        latent_cache.launch_write(cache, _empty(256, dtype=torch.int64), latents[:, :512], latents[:, 512:])
        paged_attention.launch(_empty(256, heads, 576), cache, pages, lengths, 512, 0.1, 8)
        decode_latents.launch(
            cache, _empty(256, dtype=torch.int64), latents[:, :512], latents[:, 512:], _empty(512), 1e-6,
            _empty(256, 32, dtype=fp32), _empty(256, 32, dtype=fp32), _empty(256, heads, 192), _empty(256, heads, 576),
        )  # fmt: skip

    def sampled(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
        seeds, positions = _empty(rows, dtype=torch.int64), _empty(rows, dtype=torch.int64)
        sample_tokens.launch(_empty(rows, vocabulary, dtype=dtype), seeds, positions, _empty(rows, dtype=fp32))

    def numbers_of_step(requests: int, drafts: int) -> None:
        k = 1 + drafts
        tokens, last, results = (_empty(requests, width, dtype=torch.int64) for width in (k, k, 2 * k))
        of_requests, pages = _empty(requests, dtype=torch.int64), _empty(requests, 64, dtype=torch.int32)
        decode_step.launch_continued(_empty(5 + k, requests, dtype=torch.int64), last, of_requests)
        decode_step.launch_rows(tokens, of_requests, of_requests, pages, 64)
        new = _empty(requests, drafts, dtype=torch.int64)
        decode_step.launch_accepted(tokens, tokens, of_requests)
        decode_step.launch_choices(tokens, tokens, new, last, of_requests, results)

    def modeled(dtype: torch.dtype, terms: int, bits: int) -> None:
        a, b = ((_empty(side, k, dtype=dtype), _empty(side, k, dtype=torch.int16)) for side in (t, n))
        scales = _empty(t, k // 128, dtype=fp32), _empty(n, k // 128, dtype=fp32)
        tensor_core.launch(_empty(t, n, dtype=fp32), a, b, scales, 128, True, terms, bits, min(bits, 23), -133)

    return {
        "quantize 1×128": lambda: quantize.launch(_empty(t, k), *TILE, E4M3, True),
        "quantize 128×1": lambda: quantize.launch(_empty(t, k), *COLUMN_TILE, E4M3, False),
        "quantize 128×128": lambda: quantize.launch(_empty(n, k, dtype=fp32), *BLOCK, E4M3, False),
        "quantize a row": lambda: quantize.launch(_empty(t, k), 1, k, E4M3, False),
        "quantize a tensor": lambda: quantize.launch(_empty(t, k), t, k, E4M3, False),
        "dequantize": lambda: quantize.launch_dequantize(*_operand(n, k, BLOCK)[:2], *BLOCK, bf16),
        "quantize to E5M6": lambda: quantize.launch(_empty(t, k), *TILE, torch.uint8, True),
        "dequantize E5M6": lambda: quantize.launch_dequantize(
            _empty(t, k * 3 // 2, dtype=torch.uint8), _empty(t, k // 128, dtype=fp32), *TILE, bf16
        ),
        "scale given": lambda: quantize.launch_with_scale(_empty(t, k), _empty(1, dtype=fp32), E4M3),
        "rows and columns": lambda: transpose.launch_rows_and_columns(_empty(t, k), E4M3, False),
        "rows and columns of groups": lambda: transpose.launch_rows_and_columns(_empty(t, k), E4M3, False, tiles),
        "requantize, transposed": lambda: transpose.launch_requantize(*_operand(t, k, TILE)[:2], E4M3, True),
        "requantize E5M6, transposed": lambda: transpose.launch_requantize(
            _empty(t, k * 3 // 2, dtype=torch.uint8), _empty(t, k // 128, dtype=fp32), E4M3, True
        ),
        "requantize rows, transposed": lambda: transpose.launch_requantize(
            *_operand(t, k, TILE)[:2], E4M3, True, _empty(8 * t, dtype=torch.int32)
        ),
        "requantize rows of groups, transposed": lambda: transpose.launch_requantize(
            *_operand(t, k, TILE)[:2], E4M3, True, _empty(8 * t, dtype=torch.int32), tiles
        ),
        "weight and its transpose": lambda: transpose.launch_block(_empty(n, k, dtype=fp32), E4M3, False),
        "SwiGLU": lambda: swiglu.launch(gate, up, E4M3, False),
        "SwiGLU, inputs saved": lambda: swiglu.launch_and_save(gate, up, E4M3, True, E4M3, False, of_rows),
        "SwiGLU backward": lambda: swiglu.launch_backward(
            _empty(t, n), gate, up, None, None, None, E4M3, False, E4M3, True
        ),
        "SwiGLU backward, inputs saved": lambda: swiglu.launch_backward(
            _empty(t, n), saved_gate, saved_up, gate_scale, up_scale, of_rows, E4M3, False, E4M3, True
        ),
        "requantize to blocks, transposed": lambda: transpose.launch_requantize(
            *_operand(t, k, TILE)[:2], E4M3, True, in_blocks=True
        ),
        "SwiGLU backward, h in blocks": lambda: swiglu.launch_backward(
            _empty(t, n), gate, up, None, None, None, E4M3, False, E4M3, True, None, True
        ),
        "SwiGLU backward of groups, inputs saved": lambda: swiglu.launch_backward(
            _empty(t, n), saved_gate, saved_up, gate_scale, up_scale, of_rows, E4M3, False, E4M3, True, tiles
        ),
        "SwiGLU in high precision": lambda: swiglu.launch_high_precision(gate, up),
        "SwiGLU backward in high precision": lambda: swiglu.launch_high_precision_backward(_empty(t, n), gate, up),
        "RMSNorm": lambda: norm.launch(_empty(t, k), _empty(k), 1e-6, E4M3, False, True),
        "RMSNorm in high precision": lambda: norm.launch_high_precision(_empty(t, k), _empty(k, dtype=fp32), 1e-6),
        "RMSNorm backward": lambda: norm.launch_backward(_empty(t, k), _empty(t, k), _empty(k), of_rows),
        "cross-entropy": lambda: losses(_empty(t, 8 * n)),
        "cross-entropy of a small vocabulary": lambda: losses(_empty(t, 512)),
        "gate of V3": lambda: expert_gate.launch(*products, 8, 8, 4, 2, "sigmoid", True, 2.5, 256),
        "gate of V2": lambda: expert_gate.launch(products[0], None, 8, 8, 4, 1, "softmax", False, 16.0, 256),
        "gate in FP32": lambda: expert_gate.launch(logits, None, 8, 1, 1, 1, "sigmoid", True, 1.0, 256),
        "gate backward": lambda: expert_gate.launch_backward(
            _empty(t, 8, dtype=fp32), logits, logits, experts, "sigmoid", True, 2.5, [0, 1, 0, 2]
        ),
        "gate with its GEMM": lambda: expert_gate.launch_with_gemm(
            _empty(t, 2048), _empty(3 * 16, 2048), products[1][:16], 6, 1, 1, 1, "sigmoid", True, 2.5, 16
        ),
        "gate of groups with its GEMM": lambda: expert_gate.launch_with_gemm(
            _empty(t, 768), _empty(3 * 16, 768), products[1][:16], 4, 4, 2, 2, "sigmoid", True, 2.5, 16
        ),
        "gate backward with its GEMMs": lambda: expert_gate.launch_backward_with_gemms(
            _empty(t, 8, dtype=fp32),
            logits[:, :16],
            logits[:, :16],
            experts,
            _empty(t, 768),
            _empty(16, 768, dtype=fp32),
            "sigmoid",
            True,
            2.5,
        ),
        "gate backward with its GEMMs, weight in BF16": lambda: expert_gate.launch_backward_with_gemms(
            None, logits[:, :16], logits[:, :16], experts, _empty(t, 768), _empty(16, 768), "softmax", False, 1.0
        ),
        "gate of V2 backward": lambda: expert_gate.launch_backward(
            _empty(t, 8, dtype=fp32), None, logits, experts, "softmax", False, 16.0
        ),
        "BF16 terms": lambda: expert_gate.launch_terms(_empty(256, k, dtype=fp32), [1, 0, 0]),
        "balance of V3": lambda: sequence_balance.launch(logits, None, 8, 2, "sigmoid"),
        "balance of V2": lambda: sequence_balance.launch(logits, experts, 8, 2, "softmax"),
        "balance backward": lambda: sequence_balance.launch_backward(
            _empty(dtype=fp32), logits, _empty(2, 256, dtype=fp32), "sigmoid"
        ),
        "counts of tokens": lambda: routing_plan.launch_count(experts, 256, 2),
        "routing plan": lambda: routing_plan.launch(experts, _empty(256, dtype=torch.int64)),
        "routing plan of many experts": lambda: routing_plan.launch(experts, _empty(4096, dtype=torch.int64)),
        "tiles of groups": lambda: group_tiles.launch(offs, t, len(tiles)),
        "exchange with other ranks": exchange,
        "exchange of few rows": decode,
        "permute": lambda: permute.launch(*_operand(t, k, TILE)[:2], rows_of_token),
        "unpermute": lambda: permute.launch_back(_empty(8 * t, k), rows_of_token, _empty(t, k)),
        "unpermute with weights": lambda: permute.launch_back(
            _empty(8 * t, k), rows_of_token, _empty(t, k), _empty(t, 8, dtype=fp32)
        ),
        "unpermute backward": lambda: permute.launch_back_backward(
            _empty(t, k), _empty(8 * t, k), rows_of_token, _empty(t, 8, dtype=fp32)
        ),
        "ragged: rows and columns": lambda: transpose.launch_rows_and_columns(ragged, E4M3, False),
        "ragged: weight and its transpose": lambda: transpose.launch_block(ragged, E4M3, False),
        "ragged: quantize to E5M6": lambda: quantize.launch(ragged, *TILE, torch.uint8, True),
        "ragged: requantize, transposed": lambda: transpose.launch_requantize(
            *_operand(700, 1000, TILE)[:2], E4M3, False
        ),
        "ragged: cross-entropy": lambda: losses(_empty(t, 50257, dtype=fp32)),
        "ragged: RMSNorm": lambda: norm.launch(ragged, _empty(1000), 1e-6, E4M3, False),
        "rotate": lambda: rope.launch(heads, cos, cos),
        "rotate halves": lambda: rope.launch_halves(q, q[:, ::4], angles, angles, False),
        "latent keys": lambda: rope.launch_keys(_empty(2, 4096, 128, 256), _empty(2, 4096, 64), cos, cos, 128),
        "latent keys backward": lambda: rope.launch_keys_backward(heads, _empty(2, 4096, 128, 128), cos, cos),
        "attention of prompts": lambda: ragged_attention.launch(
            _empty(t, 16, 128),
            heads[0, :, :16],
            heads[0, :, :16],
            _empty(4096, 16, 256)[..., 128:],
            offs,
            offs,
            1024,
            0.1,
        ),
        "rows of the indexer": lambda: index_rows.launch(
            _empty(1, 256, 64, 128), _empty(256, 32, dtype=fp32), _empty(256, 32, dtype=fp32)
        ),
        "paged attention": lambda: paged(16, bf16),
        "paged attention of V3, FP8": lambda: paged(128, torch.uint8),
        "sampling": lambda: sampled(256, 102400, torch.bfloat16),
        "sampling outside of graphs": lambda: sampled(256, 102400, fp32),
        "numbers of a decode step": lambda: numbers_of_step(256, 0),
        "numbers of a decode step with drafts": lambda: numbers_of_step(256, 2),
        "sampling of a small vocabulary": lambda: sampled(1, 4096, torch.bfloat16),
        "rows that do not depend on each other": lambda: row_invariant.launch(_empty(1, t, k), _empty(1, n, k), fp32),
        "the same in FP32": lambda: row_invariant.launch(_empty(1, t, k), _empty(1, 256, k, dtype=fp32), fp32),
        "AdamW": lambda: optimizer_step(fp32, []),
        "AdamW of BF16 parameters, scaled, skipped": lambda: optimizer_step(
            bf16, [_empty(n, k)], _empty(dtype=torch.bool), _empty(dtype=fp32)
        ),
        "norms of gradients": lambda: gradient_norms.launch([_empty(n, k, dtype=fp32)]),
        "x · wᵀ": lambda: dense(BLOCK, E4M3, k),
        "x · wᵀ, 64 rows": lambda: dense(BLOCK, E4M3, k, m=64),
        "x · wᵀ INT8": lambda: dense(BLOCK, INT8, k),
        "dyᵀ · x": lambda: dense(TILE, E4M3, t, accumulate=True),
        "x · wᵀ MXFP8": lambda: dense(MX_TILE, E4M3, k, of_x=MX_TILE),
        "grouped, ragged K": lambda: grouped.launch(
            with_sizes(Schedule.GROUPED, _operand(t, 10944, TILE), _operand(n, 10944, BLOCK, E4M3, groups), bf16)
        ),
        "masked": lambda: grouped.launch_masked(
            with_sizes(Schedule.MASKED, _operand(512, k, TILE, E4M3, groups), _operand(n, k, BLOCK, E4M3, groups), bf16)
        ),
        "grouped dyᵀ · x": lambda: grouped.launch_wgrad(
            with_sizes(Schedule.ALONG_K, _operand(t, n, COLUMN_TILE), _operand(t, k, COLUMN_TILE), fp32)
        ),
        "grouped dyᵀ · x MXFP8": lambda: grouped.launch_wgrad(
            with_sizes(Schedule.ALONG_K, _operand(t, n, MX_COLUMN_TILE), _operand(t, k, MX_COLUMN_TILE), fp32)
        ),
        "grouped x · wᵀ of BF16": lambda: high_precision.launch_nt(_empty(t, k), _empty(groups, n, k), offs),
        "grouped dy · w of BF16": lambda: high_precision.launch_nt(_empty(t, n), _empty(groups, n, k).mT, offs),
        "grouped x · wᵀ of BF16, few rows": lambda: high_precision.launch_nt(
            _empty(3 * groups, k), _empty(groups, n, k), offs, 0, bf16
        ),
        "rows past the last group": lambda: high_precision.zero_rest(_empty(t, n), offs),
        "grouped dyᵀ · x of BF16": lambda: high_precision.launch_tn(_empty(t, n), _empty(t, k), offs),
        "Hopper's tensor core, FP8": lambda: modeled(fp32, 32, 13),
        "Hopper's tensor core, BF16": lambda: modeled(torch.float64, 16, 25),
    }


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _operand(
    rows: int, cols: int, block: tuple[int, int], dtype: torch.dtype = E4M3, groups: int | None = None
) -> Quantized:
    batch = () if groups is None else (groups,)
    data = _empty(*batch, rows, cols, dtype=dtype)
    return data, new_scale(data, *block), block


@contextmanager
def _recorded_launches() -> Iterator[list[Launch]]:
    """A context that records launches, their kernel, arguments and compile options, instead of running them."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: kwargs.pop(name) for name in self.arg_names if name in kwargs}
        launches.append((self, arguments, kwargs))

    run = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


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
