"""Launcher of Hopper's weights of top-k positions, as `octile.ops.sparse_attention_weights` specifies them.

Launches follow from shapes and the GPU, not from values, so they can be captured in a CUDA graph; the first call of a
kind compiles and loads the kernel, which cannot be.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_mla
from octile.kernels.cuda.attention.mla_decode import TILE, TILES
from octile.kernels.cuda.attention.sparse_mla import HEADS
from octile.kernels.cuda.attention.sparse_mla_backward import TILE_KEYS
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.jit import specialize, wgmma
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel

BLOCK_HEADS = 2 * HEADS  # of a thread block
# of a thread block, as sparse_weights.cu divides it
SHARED = 3 * TILES * TILE + BLOCK_HEADS * 4 + 2 * 8 * TILE_KEYS * 4 + 2 * TILE_KEYS * 4 + 2 * 8 + 7 * 8
THREADS = 384  # two consumer warpgroups and one of producers
MAX_KEYS = 1024


class LaunchPlan(NamedTuple):
    """The kernel of a call and its launch.

    Attributes:
        constants, headers: what the kernel is specialized by, and its generated headers.
        grid, head_blocks: thread blocks, and blocks of heads.
    """

    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]
    grid: int
    head_blocks: int


def why_unsupported(q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int) -> str | None:
    """Return why this kernel does not support a call; None: it does. The arguments are the operator's."""
    if latents.dtype != torch.bfloat16:
        return f"the latents are {latents.dtype}, not bfloat16"
    return sparse_mla.why_unsupported(q, latents, positions, latent_dim)


def launch(q: Tensor, latents: Tensor, positions: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Return the mean over heads of the weights, float32 [S, K]; the arguments are the operator's."""
    (rows, n_heads, _), k = q.shape, positions.shape[1]
    if positions.stride(1) != 1:
        positions = positions.contiguous()
    lse = lse.contiguous()
    key = (rows, n_heads, q.device)
    prepared = _prepared[key]
    if prepared is None:
        prepared = _prepared[key] = _Prepared(plan(*key[:-1], num_sms.multiprocessors(q.device)), q.device)
    made = prepared.made
    weights = torch.empty(rows, made.head_blocks, k, dtype=torch.float32, device=q.device)
    prepared.kernel.launch_at(
        (latents.data_ptr(), q.data_ptr(), lse.data_ptr(), positions.data_ptr(), weights.data_ptr(), scale, n_heads,
         rows, k, positions.stride(0), len(latents))
    )()  # fmt: skip
    return weights.sum(1).div_(n_heads)


def plan(rows: int, n_heads: int, n_sms: int) -> LaunchPlan:
    """Plan the launch for tensors that the kernel supports; n_sms: of the GPU."""
    head_blocks = -(-n_heads // BLOCK_HEADS)
    constants: dict[str, int | bool] = {"fp8": False, "cluster": 1, "shared_bytes": SHARED}
    return LaunchPlan(constants, _headers(), min(rows * head_blocks, n_sms), head_blocks)


@lru_cache(1)
def _headers() -> Mapping[str, str]:
    return {"wgmma.cuh": wgmma.header(64, "bf16", "bf16")}


class _Prepared:
    def __init__(self, made: LaunchPlan, device: torch.device) -> None:
        self.made = made
        kernel = specialize.load("sparse_weights", made.constants, device, made.headers)
        self.kernel = PreparedKernel(kernel, made.grid, 1, THREADS, SHARED)


_prepared: BoundedCache[_Prepared] = BoundedCache(MAX_KEYS)
