"""Launcher of Hopper's gate: one kernel that multiplies, chooses the experts and computes their weights.

Triton reads the tile of a token once for each term of the weight, and cuBLAS writes the products of all terms to global
memory. This kernel splits an FP32 weight, multiplies by all terms at once and writes logits only.

A launch depends on shapes and strides, never on values, so it can be captured in a CUDA graph; the first call of a kind
compiles and loads a kernel, which cannot be captured.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit import wgmma
from octile.kernels.cuda.jit.mapped import MappedKernel, MappedLaunch
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.kernels.cuda.jit.tensor_map import TensorMap
from octile.kernels.memory_layout import VECTOR
from octile.kernels.terms import TERMS
from octile.routing import EPS

MIN_TOKENS = 2048  # with fewer, programs of all their experts leave SMs idle
MAX_EXPERTS = 64  # of more, choice and accumulators spill registers; of up to 64 it was compared with other kernels
MAX_CHOSEN = 16
BLOCK_K, ROW_BYTES = 64, 128  # columns of a k-block, and bytes of its rows
TERMS_STAGES = 3  # k-blocks of the weight's terms in shared memory
WARPGROUP_M = 64  # tokens of a warpgroup
MAX_KEYS = 1024
MAX_COLUMNS = MAX_EXPERTS * TERMS
UNKNOWN = VECTOR  # stands for a map's pointer until the launch; it is aligned


class Tile(NamedTuple):
    """What decides on the kernel's speed.

    Attributes:
        warpgroups: warpgroups of a thread block; each multiplies 64 tokens.
        stages, w_stages: k-blocks of x and of the weight in shared memory.
        blocks: thread blocks that must fit on an SM.
    """

    warpgroups: int
    stages: int
    w_stages: int
    blocks: int


TILES = {64: Tile(2, 4, 3, 2), MAX_COLUMNS: Tile(4, 3, 3, 1)}  # by the most columns


def why_unsupported(
    x: Tensor, weight: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, *_: Any
) -> str | None:
    """Return why this kernel does not compute a gate; None: it does. Arguments as of `launch`."""
    n_experts = len(weight)
    if n_experts > MAX_EXPERTS:
        return f"{n_experts} experts are more than {MAX_EXPERTS}"
    if n_experts % 8:
        return f"{n_experts} experts are not a multiple of 8"
    if topk_group < n_group and n_group % 4:
        return f"{n_group} groups are not a multiple of 4"
    if n_chosen > MAX_CHOSEN:
        return f"{n_chosen} experts of a token are more than {MAX_CHOSEN}"
    if len(x) < MIN_TOKENS:
        return f"{len(x)} tokens are fewer than {MIN_TOKENS}"
    if not is_readable(x) or not is_readable(weight) or x.shape[1] % 8:
        return "the rows of x or of the weight are not contiguous, or do not begin at multiples of 16 bytes"
    if weight.dtype == torch.float16:
        return "the weight is float16"
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        return "the bias is not float32, or not contiguous"
    return request.why_not_on(x.device)


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int,
    scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute a gate of x [T, D] bfloat16 and the weight [E, D], bfloat16 or float32.

    Returns:
        weights [T, K] float32, experts [T, K] int64, logits [T, E] float32.
    """
    (t, d), n_experts = x.shape, len(weight)
    weights = torch.empty(t, n_chosen, dtype=torch.float32, device=x.device)
    experts = torch.empty(t, n_chosen, dtype=torch.int64, device=x.device)
    logits = torch.empty(t, n_experts, dtype=torch.float32, device=x.device)
    choice = n_chosen, n_group, topk_group, best
    settings = *choice, scoring_func == "softmax", norm_topk_prob, bias is not None
    key = x.shape, x.stride(), weight.shape, weight.stride(), weight.dtype, settings, x.device
    prepared = _prepared[key]
    if prepared is None:
        made = plan(x, weight, *settings)
        prepared = _prepared[key] = MappedKernel(made, x.device)
    outs = logits.data_ptr(), weights.data_ptr(), experts.data_ptr()
    at_bias = 0 if bias is None else bias.data_ptr()
    prepared.launch_at((x.data_ptr(), weight.data_ptr(), at_bias, *outs, routed_scaling_factor, EPS, t, d))()
    return weights, experts, logits


def plan(
    x: Tensor, weight: Tensor, n_chosen: int, n_group: int, topk_group: int, best: int, softmax: bool, normalize: bool,
    biased: bool,
) -> MappedLaunch:  # fmt: skip
    """Plan the launch for tensors that the kernel supports."""
    n_experts, parts = len(weight), _parts(weight)
    columns = parts * n_experts
    tile = next(tile for most, tile in TILES.items() if columns <= most)
    tile_m = WARPGROUP_M * tile.warpgroups
    constants: dict[str, int | bool] = {
        "experts": n_experts, "chosen": n_chosen, "n_group": n_group, "topk_group": topk_group, "best": best,
        "parts": parts, "biased": biased, "softmax": softmax, "normalize": normalize, **tile._asdict(),
        "shared_bytes": _shared_bytes(tile, n_experts, parts),
    }  # fmt: skip
    return MappedLaunch(
        "gate",
        constants,
        {"wgmma.cuh": wgmma.header(columns, "bf16", "bf16")},
        grid=-(-len(x) // tile_m),
        threads=128 * tile.warpgroups,
        maps=(_map_of_x(x, tile_m), _map_of_weight(weight)),
    )


_prepared: BoundedCache[MappedKernel] = BoundedCache(MAX_KEYS)


def _map_of_x(x: Tensor, rows: int) -> TensorMap:
    """Describe x [T, D] with a third dimension, as `ptx::tma_load` reads it; the L2 cache fetches rows of a k-block."""
    strides = VECTOR // x.itemsize, *x.stride()
    return TensorMap(UNKNOWN, x.dtype, (1, *x.shape), strides, (1, rows, BLOCK_K), ROW_BYTES, fetch=ROW_BYTES)


def _map_of_weight(weight: Tensor) -> TensorMap:
    shape = 1, *weight.shape
    return TensorMap(UNKNOWN, weight.dtype, shape, (VECTOR // weight.itemsize, *weight.stride()), (*shape[:2], BLOCK_K))


def _parts(weight: Tensor) -> int:
    return 1 if weight.dtype == torch.bfloat16 else TERMS


def _shared_bytes(tile: Tile, n_experts: int, parts: int) -> int:
    """Count the bytes of shared memory: tiles of x, of the weight's terms and of the weight, the bias, and barriers."""
    weight_row = ROW_BYTES if parts == 1 else 2 * ROW_BYTES
    tiles = (tile.stages * WARPGROUP_M * tile.warpgroups + TERMS_STAGES * parts * n_experts) * ROW_BYTES
    barriers = 2 * tile.stages + tile.w_stages + TERMS_STAGES
    return tiles + tile.w_stages * n_experts * weight_row + 4 * n_experts + 8 * barriers


def is_readable(t: Tensor) -> bool:
    """Return whether TMA can read a matrix: its rows are contiguous and begin at multiples of 16 bytes."""
    return _has_rows(t.shape, t.stride(), t.itemsize) and t.data_ptr() % VECTOR == 0


@functools.lru_cache(MAX_KEYS)
def _has_rows(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> bool:
    return shape.numel() > 0 and strides[1] == 1 and strides[0] > 0 and strides[0] * itemsize % VECTOR == 0
