"""DeepGEMM's functions agree with the CPU on a GPU, read nothing back to the host, and can be captured in a graph."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import octile
import octile.compat.deep_gemm as deep_gemm

M, N, K, G = 384, 256, 512, 3

Tensors = dict[str, Tensor]


def _pair(shape: tuple[int, ...], block: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    q = octile.quantize(x, block)
    return q.data, q.scale


def _tensors(seed: int) -> Tensors:
    """Tensors of all layouts; the sizes of groups depend on the seed."""
    generator = torch.Generator().manual_seed(seed)
    (a, a_scale), (b, b_scale) = _pair((M, K), (1, 128), seed), _pair((G, N, K), (128, 128), seed + 1)
    (x, x_scale), (dy, dy_scale) = _pair((M, N), (128, 1), seed + 2), _pair((M, K), (128, 1), seed + 3)
    groups = torch.randint(0, G, (M // 128,), generator=generator).sort().values
    found = {
        "a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale,
        "x": x, "x_scale": x_scale, "dy": dy, "dy_scale": dy_scale,
        "indices": groups.repeat_interleave(128), "ends": 128 * torch.tensor([(groups <= g).sum() for g in range(G)]),
        "counts": torch.randint(0, M // G + 1, (G,), generator=generator), "ks": 128 * groups.bincount(minlength=G),
        "c": torch.randn(G, N, K, generator=generator),
    }  # fmt: skip
    return {name: t.int() if t.dtype == torch.int64 else t for name, t in found.items()}


def _dense(t: Tensors) -> Tensor:
    d = torch.zeros(M, N, device=t["a"].device)
    deep_gemm.fp8_gemm_nt((t["a"], t["a_scale"]), (t["b"][0], t["b_scale"][0]), d, d)
    return d


def _contiguous(t: Tensors) -> Tensor:
    d = torch.zeros(M, N, device=t["a"].device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((t["a"], t["a_scale"]), (t["b"], t["b_scale"]), d, t["indices"])
    return d


def _psum(t: Tensors) -> Tensor:
    d = torch.zeros(M, N, device=t["a"].device)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (t["a"], t["a_scale"]), (t["b"], t["b_scale"]), d, t["ends"], use_psum_layout=True
    )
    return d


def _masked(t: Tensors) -> Tensor:
    d = torch.zeros(G, M // G, N, device=t["a"].device)
    a, a_scale = t["a"].view(G, M // G, K), t["a_scale"].view(G, M // G, -1)
    deep_gemm.m_grouped_fp8_gemm_nt_masked((a, a_scale), (t["b"], t["b_scale"]), d, t["counts"], M // G)
    used = torch.arange(M // G, device=d.device) < t["counts"][:, None]
    return d.masked_fill(~used[..., None], 0)


def _k_grouped(t: Tensors) -> Tensor:
    d = t["c"].clone()
    sizes = [128] * G if t["ks"].is_cuda else t["ks"].tolist()  # on a GPU only their sum is used
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(
        (t["x"], t["x_scale"]), (t["dy"], t["dy_scale"]), d, sizes, t["ks"], d
    )  # fmt: skip
    return d


def _skip_head_mid(t: Tensors) -> Tensor:
    d = torch.ones(M, N // 64 * 96, device=t["a"].device)
    deep_gemm.fp8_gemm_nt_skip_head_mid((t["a"], t["a_scale"]), (t["b"][0], t["b_scale"][0]), d, (48, 32, 16))
    return d


def _projections(t: Tensors) -> Tensor:
    """A projection of heads in FP8 whose result is permuted, with an addend, in float32."""
    a, a_scale = t["a"].view(M // G, G, K), t["a_scale"].view(M // G, G, -1)
    d = torch.ones(M // G, G, N, device=a.device)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (t["b"], t["b_scale"]), d, d)
    return d


def _transposed_projections(t: Tensors) -> Tensor:
    a, a_scale = t["a"].view(M // G, G, K)[..., :N], t["a_scale"].view(M // G, G, -1)[..., : N // 128]
    d = torch.empty(M // G, G, K, device=a.device)
    deep_gemm.fp8_einsum("bhd,hdr->bhr", (a, a_scale), (t["b"], t["b_scale"]), d)
    return d


def _gradients_of_heads(t: Tensors) -> Tensor:
    x, x_scale = t["x"].view(M, 2, N // 2), t["x_scale"].view(-1, 2, N // 2)
    dy, dy_scale = t["dy"].view(M, 2, K // 2), t["dy_scale"].view(-1, 2, K // 2)
    d = torch.empty(2, N // 2, K // 2, device=x.device)
    deep_gemm.fp8_einsum("bhd,bhr->hdr", (x, x_scale), (dy, dy_scale), d, recipe=(1, 1, 128))
    return d


def _bf16_projections(t: Tensors) -> Tensor:
    a, b = t["c"].bfloat16(), t["c"].bfloat16().flip(0)  # [3, N, K]
    d, transposed = a.new_empty(N, G, N), a.new_empty(N, G, K)
    deep_gemm.einsum("bhr,hdr->bhd", a.transpose(0, 1), b, d)
    deep_gemm.einsum("bhd,hdr->bhr", a[:, :, :N].transpose(0, 1), b, transposed)
    return torch.cat([d, transposed], 2).float()


def _sum_of_bf16_gemms(t: Tensors) -> Tensor:
    a = t["c"].bfloat16()
    d = torch.ones(N, N, device=a.device)
    deep_gemm.einsum("bmk,bnk->mn", a, a.flip(0), d, d)
    return d


def _packed_scales(t: Tensors) -> Tensor:
    return deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor(torch.exp2(t["a_scale"].log2().round()))


def _on_gpu(t: Tensors) -> Tensors:
    return {name: tensor.cuda() for name, tensor in t.items()}


FUNCTIONS = [
    _dense, _contiguous, _psum, _masked, _k_grouped, _packed_scales, _skip_head_mid, _projections,
    _transposed_projections, _gradients_of_heads, _bf16_projections, _sum_of_bf16_gemms,
]  # fmt: skip
every_function = pytest.mark.parametrize("function", FUNCTIONS)


@every_function
def test_results_equal_those_of_a_cpu(function: Callable[[Tensors], Tensor]):
    tensors = _tensors(0)
    expected, d = function(tensors), function(_on_gpu(tensors)).cpu()
    torch.testing.assert_close(d, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


@every_function
def test_nothing_is_read_back(function: Callable[[Tensors], Tensor]):
    tensors = _on_gpu(_tensors(0))
    function(tensors)
    torch.cuda.set_sync_debug_mode("error")
    try:
        function(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_function
def test_a_graph_follows_changed_inputs(function: Callable[[Tensors], Tensor]):
    static = _on_gpu(_tensors(0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function(static)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        d = function(static)
    for seed in (1, 2):
        fresh = _on_gpu(_tensors(10 * seed))
        for name, old in static.items():
            old.copy_(fresh[name])
        graph.replay()
        torch.testing.assert_close(d, function(fresh), rtol=0, atol=0)
