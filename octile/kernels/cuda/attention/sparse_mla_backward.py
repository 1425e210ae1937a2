"""Launcher of Hopper's backward pass of sparse latent attention; `octile.ops.sparse_attention_backward` specifies it.

    sparse_mla_backward     dQ, and the gradient of each entry of a query's list, in BF16
    sparse_entries          which queries chose a key, and as which entry of their list
    sparse_latent_gradient  adds the gradients of a key in the order of the queries

For 128 heads the gradient of an entry takes 2304 bytes. So queries are taken in blocks whose gradients take at most
1 GiB. Nothing is added atomically: results are the same each time.

Launches follow from shapes and the GPU, not from values, so they can be captured in a CUDA graph; the first call of a
kind compiles and loads kernels, which cannot be.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_mla
from octile.kernels.cuda.attention.mla_decode import TILE, TILES, WIDTH
from octile.kernels.cuda.attention.sparse_mla import HEADS
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.jit import specialize, wgmma
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel
from octile.kernels.memory_layout import VECTOR

TILE_KEYS = 64
# of a thread block, as sparse_mla_backward.cu divides it
SHARED = (3 * TILES + 1) * TILE + 2 * HEADS * 4 + 2 * TILE_KEYS * 4 + 2 * 8 + 7 * 8
THREADS = 384  # two consumer warpgroups and one of producers
ENTRY_THREADS = 256
SUM_THREADS, SUM_GROUPS = 288, 4  # of a key
MAX_PARTIAL_BYTES = 2**30
MAX_QUERIES = 864  # of a block: more would take more shared memory in sparse_latent_gradient
MAX_ENTRIES = 65535  # of a list: 16 bits, and one value for none
MAX_KEYS = 1024


class LaunchPlan(NamedTuple):
    """What the kernels are specialized by.

    Attributes:
        constants, headers: what sparse_mla_backward is specialized by, and its generated headers.
        sum_constants: what sparse_latent_gradient is specialized by.
    """

    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]
    sum_constants: Mapping[str, int | bool]


def why_unsupported(
    do: Tensor, q: Tensor, latents: Tensor, positions: Tensor, o: Tensor, latent_dim: int
) -> str | None:
    """Return why these kernels do not support a call; None: they do. The arguments are the operator's."""
    if latents.dtype != torch.bfloat16:
        return f"the latents are {latents.dtype}, not bfloat16"
    for name, tensor in (("do", do), ("o", o)):
        if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() or tensor.data_ptr() % VECTOR:
            return f"{name} is not contiguous bfloat16 from a multiple of {VECTOR} bytes on"
    if positions.shape[1] > MAX_ENTRIES:
        return f"lists have {positions.shape[1]} entries, more than {MAX_ENTRIES}"
    return sparse_mla.why_unsupported(q, latents, positions, latent_dim)


def launch(
    do: Tensor, q: Tensor, latents: Tensor, positions: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute dq [S, H, 576] bfloat16 and dlatents [T, 576] float32; the arguments are the operator's."""
    (rows, n_heads, _), k, n_latents = q.shape, positions.shape[1], len(latents)
    if positions.stride(1) != 1:
        positions = positions.contiguous()
    lse = lse.contiguous()
    head_blocks = -(-n_heads // HEADS)
    n_sms = num_sms.multiprocessors(q.device)
    at_once = queries_at_once(rows, head_blocks, k, n_sms)
    dq = torch.empty_like(q)
    dlatents = torch.zeros(n_latents, WIDTH, dtype=torch.float32, device=q.device)
    partials = q.new_empty(at_once, k, head_blocks, WIDTH)
    entries = torch.empty(n_latents, at_once, dtype=torch.uint16, device=q.device)
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        n, top_k = len(q[part]), positions[part]
        key = (n, head_blocks, k, n_latents, q.device)
        prepared = _prepared[key]
        if prepared is None:
            prepared = _prepared[key] = _Prepared(n, head_blocks, k, n_latents, n_sms, q.device)
        entries.view(torch.int16).fill_(-1)  # none
        prepared.find_entries.launch_at(
            (top_k.data_ptr(), entries.data_ptr(), n, k, positions.stride(0), n_latents)
        )()  # fmt: skip
        prepared.attend.launch_at(
            (latents.data_ptr(), q[part].data_ptr(), o[part].data_ptr(), do[part].data_ptr(), lse[part].data_ptr(),
             top_k.data_ptr(), dq[part].data_ptr(), partials.data_ptr(), scale, n_heads, n, k, positions.stride(0),
             n_latents)
        )()  # fmt: skip
        prepared.add.launch_at((partials.data_ptr(), entries.data_ptr(), dlatents.data_ptr(), n, k, head_blocks))()
    return dq, dlatents


def queries_at_once(rows: int, head_blocks: int, k: int, n_sms: int) -> int:
    """Return how many queries a block has: all, or as many as keep all SMs busy to the end and fit."""
    most = max(min(MAX_PARTIAL_BYTES // (2 * WIDTH * k * head_blocks), MAX_QUERIES), 1)
    round_size = max(n_sms // head_blocks, 1)
    return min(rows, most // round_size * round_size or most)


def plan() -> LaunchPlan:
    """Plan the kernels."""
    sums = max(8 * MAX_QUERIES, 4 * WIDTH * (SUM_GROUPS - 1)) + 4 * SUM_THREADS // 32
    return LaunchPlan(
        {"fp8": False, "cluster": 1, "shared_bytes": SHARED},
        _headers(),
        {"shared_bytes": -(-sums // VECTOR) * VECTOR},
    )


@lru_cache(1)
def _headers() -> Mapping[str, str]:
    header = partial(wgmma.header, a="bf16", b="bf16", b_transposed=True)
    return {
        "wgmma.cuh": wgmma.header(64, "bf16", "bf16"),
        "wgmma_queries.cuh": header(256, name="wgmma_queries"),
        "wgmma_queries_rotary.cuh": header(32, name="wgmma_queries_rotary"),
        "wgmma_keys.cuh": header(64, name="wgmma_keys", a_transposed=True),
        "wgmma_keys_rotary.cuh": header(32, name="wgmma_keys_rotary", a_transposed=True),
    }


class _Prepared:
    def __init__(
        self, queries: int, head_blocks: int, k: int, n_latents: int, n_sms: int, device: torch.device
    ) -> None:
        made = plan()
        attend = specialize.load("sparse_mla_backward", made.constants, device, made.headers)
        self.attend = PreparedKernel(attend, min(queries * head_blocks, n_sms), 1, THREADS, SHARED)
        find_entries = specialize.load("sparse_entries", {}, device)
        self.find_entries = PreparedKernel(find_entries, -(-k // ENTRY_THREADS) * queries, 1, ENTRY_THREADS, 0)
        add = specialize.load("sparse_latent_gradient", made.sum_constants, device)
        sum_bytes = int(made.sum_constants["shared_bytes"])
        self.add = PreparedKernel(add, n_latents, 1, SUM_THREADS, sum_bytes)


_prepared: BoundedCache[_Prepared] = BoundedCache(MAX_KEYS)
