"""Hopper's product kernel on the GPU: its error, and nothing written beside the result.

Its bits are compared with the model's in tests/gpu/test_tensor_core.py.

The error of an element. A step's 4 instructions each cut 32 products and the running sum below 2⁻¹³ of the largest,
and then the sum to 13 bits: at most 4 · 34 · 2⁻¹³ of Σ|a·b| over the step. The steps are added in FP32. That bound
holds for any data; what data of one sign really lose is 0.08% at K = 4096.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda import jit, launch, products
from octile.kernels.cuda.config import Config, Scales, Schedule
from octile.kernels.cuda.plan import Product, plan, readable
from octile.kernels.cuda.problem import Chip
from octile.lab.tensor_core import product as model
from octile.ops.quantize import dequantize, quantize

TILE, BLOCK, COLUMN = (1, 128), (128, 128), (128, 1)
CUT = 4 * 34 * 2.0**-13
WORST = 2e-3  # of data of one sign, relative
GUARD = 8  # numbers around a result
Operand = tuple[Tensor, Tensor, tuple[int, int]]
OF_ROWS = {"b_scales": Scales.PER_ROW, "out_float": True, "accumulate": True}
KERNELS = {  # those that `choose` takes seldom are tested here all the same
    "128×128": Config(128, 128, 4, staged_pieces=1),
    "256×128": Config(256, 128, 3, staged_pieces=4),
    "192×128 by three": Config(192, 128, 4, warpgroups=3, staged_pieces=2),
    "64×64 by one": Config(64, 64, 8, warpgroups=1, staged_pieces=1),
    "cluster along M": Config(128, 128, 4, cluster_m=2, staged_pieces=1),
    "cluster along N": Config(128, 128, 4, cluster_n=2, staged_pieces=1),
    "ping-pong": Config(128, 128, 2, ping_pong=True, staged_pieces=1),
    "two accumulators": Config(128, 64, 6, accumulators=2, staged_pieces=1),
    "split along K": Config(128, 128, 4, split_k=3, staged_pieces=1),
    "turned": Config(128, 32, 6, a_scales=Scales.PER_BLOCK, b_scales=Scales.PER_ROW, transposed=True, staged_pieces=1),
    "scales of rows": Config(128, 128, 3, staged_pieces=1, **OF_ROWS),
    "scales of rows, cluster": Config(256, 128, 3, cluster_n=2, staged_pieces=1, **OF_ROWS),
    "scales of rows, ping-pong": Config(128, 128, 2, ping_pong=True, staged_pieces=1, **OF_ROWS),
    "fetching": Config(256, 128, 3, fetch=True, staged_pieces=4, **OF_ROWS),
    "fetching, cluster": Config(256, 128, 3, cluster_n=2, fetch=True, staged_pieces=4, **OF_ROWS),
    "fetching, ping-pong": Config(128, 96, 3, ping_pong=True, fetch=True, staged_pieces=3, **OF_ROWS),
}


@pytest.fixture(autouse=True)
def hopper() -> None:
    x = torch.empty(128, 128, dtype=torch.float8_e4m3fn, device="cuda")
    if reason := products.serves(x, TILE, x, BLOCK):
        pytest.skip(f"the product kernel does not run here: {reason}")


def _operand(
    shape: tuple[int, ...], block: tuple[int, int], seed: int, fmt: str = "e4m3", signed: bool = True
) -> Operand:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    x = (x if signed else x.abs()) * torch.exp2(torch.randn(*shape[:-1], 1, generator=generator, device="cuda"))
    return *quantize(x, *block, fmt, False), block


def _values(operand: Operand) -> Tensor:
    data, scale, block = operand
    ones = dequantize(torch.ones_like(data, dtype=torch.float32).to(data.dtype), scale, *block, torch.float32)
    return data.float().double() * ones.double()


class _Guarded:
    """A poisoned result within a larger tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, odd: bool = False) -> None:
        self.room = torch.full(
            (*shape[:-2], shape[-2] + 2 * GUARD, shape[-1] + 2 * GUARD + odd), torch.nan, dtype=dtype
        ).cuda()
        self.inside = (..., slice(GUARD, GUARD + shape[-2]), slice(GUARD, GUARD + shape[-1]))
        self.out = self.room[self.inside]

    def check(self) -> None:
        around = self.room.clone()
        around[self.inside] = torch.nan
        assert around.isnan().all(), "something was written beside the result"


def _check(out: Tensor, a: Tensor, b: Tensor, before: Tensor | float = 0.0) -> None:
    exact = a @ b.mT + before
    bound = (CUT + 2.0**-20) * (a.abs() @ b.abs().mT) + torch.finfo(out.dtype).eps * exact.abs() + 1e-30
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("start", range(0, 500, 50))
def test_ragged_products(start: int):
    for seed in range(start, start + 50):
        generator = torch.Generator().manual_seed(seed)

        def draw(most: int, generator=generator) -> int:
            return int(2 ** (torch.rand((), generator=generator) * torch.log2(torch.tensor(float(most)))))

        m, n, k = draw(700), draw(1500), draw(4000)
        out_dtype = (torch.bfloat16, torch.float32)[seed % 2]
        a, b = (
            _operand((m, k), TILE, seed),
            _operand((n, k), (TILE, BLOCK)[seed // 2 % 2], seed + 1, ("e4m3", "e5m2")[seed % 3 == 0]),
        )
        guarded = _Guarded((m, n), out_dtype, odd=seed % 5 == 0)
        products.matmul(guarded.out, *a, *b, accumulate=False)
        _check(guarded.out, _values(a), _values(b))
        guarded.check()


@pytest.mark.parametrize("name", KERNELS)
def test_every_kind_of_kernel(name: str):
    config = KERNELS[name]
    of_rows = config.a_scales is config.b_scales
    a, b = _operand((300, 1408), TILE, 0), _operand((520, 1408), TILE if of_rows else BLOCK, 1)
    guarded = _Guarded((300, 520), torch.float32 if config.out_float else torch.bfloat16)
    before = torch.randn(300, 520, device="cuda") if config.accumulate else torch.zeros((), device="cuda")
    guarded.out.copy_(before)
    of_b = Scales.PER_ROW if of_rows else Scales.PER_BLOCK
    operands = (guarded.out, *a[:2], Scales.PER_ROW, *b[:2], of_b)
    p = readable(Product(Schedule.DENSE, *operands, None, config.accumulate, config.promote))
    chip = Chip(torch.cuda.get_device_properties(0).multi_processor_count)
    kernel = jit.load("product", config.constants(), guarded.out.device, config.headers())
    launch.Prepared(plan(p, chip, config), kernel)(p.pointers(), guarded.out.device)
    _check(guarded.out, _values(a), _values(b), before.double())
    guarded.check()


@pytest.mark.parametrize("seed", range(60))
def test_ragged_groups(seed: int):
    generator = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 257, (), generator=generator)) if seed % 2 else seed % 7 + 1
    sizes = torch.randint(0, 40 if groups > 8 else 500, (groups,), generator=generator)
    sizes[torch.rand(groups, generator=generator) < 0.3] = 0
    ends = sizes.cumsum(0)
    t, n, k = int(ends[-1]) + seed % 3, 8 * (seed % 11 + 1) + seed % 2, 100 * (seed % 6) + 60
    if t == 0:
        return
    offs = ends.to(torch.int32).cuda()
    a, b = _operand((t, k), TILE, seed), _operand((groups, n, k), BLOCK, seed + 1)
    out = torch.full((t, n), torch.nan, dtype=(torch.bfloat16, torch.float32)[seed % 2], device="cuda")
    products.grouped(*a, *b, offs, out.dtype, out)
    for g, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        _check(out[first:last], _values(a)[first:last], _values(b)[g])
    assert out[int(ends[-1]) :].isnan().all(), "rows past the groups stay as they are"
    assert not products.grouped(*a, *b, offs, out.dtype)[int(ends[-1]) :].any(), "or are zero"

    dy, x = _operand((t, n), COLUMN, seed), _operand((t, 77), COLUMN, seed + 1)
    before = torch.randn(groups, n, 77, device="cuda")
    dw = before.clone()
    products.wgrad(*dy, *x, offs, torch.float32, dw, accumulate=True)
    for g, (first, last) in enumerate(pairwise([0, *ends.tolist()])):
        _check(dw[g], _values(dy)[first:last].mT, _values(x)[first:last].mT, before[g].double())


@pytest.mark.parametrize("counts", [(0, 1, 64), (300, 300, 300), (129, 0, 257)], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_masked(counts: tuple[int, ...], out_dtype: torch.dtype):
    a, b = _operand((3, 300, 1408), TILE, 0), _operand((3, 520, 1408), BLOCK, 1)
    out = products.masked(*a, *b, torch.tensor(counts, dtype=torch.int32, device="cuda"), out_dtype)
    for g, count in enumerate(counts):
        _check(out[g, :count], _values(a)[g, :count], _values(b)[g])


@pytest.mark.parametrize("m", [1, 100, 1000])
def test_data_of_one_sign(m: int):
    a, b = _operand((m, 4096), TILE, 0, signed=False), _operand((1000, 4096), BLOCK, 1, signed=False)
    out = torch.empty(m, 1000, device="cuda")
    products.matmul(out, *a, *b, accumulate=False)
    torch.testing.assert_close(out.double(), _values(a) @ _values(b).mT, rtol=WORST, atol=0)


def test_without_promotion_much_is_lost():
    whole = (256, 4096)
    a, b = (_operand(whole, whole, seed, signed=False) for seed in (0, 1))
    exact = _values(a) @ _values(b).mT
    errors = []
    for promote_every in (128, None):
        out = torch.empty(256, 256, device="cuda")
        products.matmul(out, *a, *b, accumulate=False, promote_every=promote_every)
        assert torch.equal(out, model(*a, *b, promote_every=promote_every)) or promote_every == 128
        errors.append(float(((out.double() - exact) / exact).abs().max()))
    assert errors[0] < WORST
    assert errors[1] > 0.02


def test_the_same_bits_200_times_under_load():
    ends = [700, 700, 1500, 4000]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    dy, x = _operand((4000, 512), COLUMN, 0), _operand((4000, 640), COLUMN, 1)
    few, w = _operand((64, 7168), TILE, 2), _operand((2112, 7168), BLOCK, 3)
    load, stream = torch.randn(1 << 26, device="cuda"), torch.cuda.Stream()
    first = products.wgrad(*dy, *x, offs, torch.float32)
    first_few = torch.empty(64, 2112, dtype=torch.bfloat16, device="cuda")
    products.matmul(first_few, *few, *w, accumulate=False)
    for _ in range(200):
        with torch.cuda.stream(stream):
            load.mul_(1.0)
        assert torch.equal(products.wgrad(*dy, *x, offs, torch.float32), first)
        out = torch.empty_like(first_few)
        products.matmul(out, *few, *w, accumulate=False)
        assert torch.equal(out, first_few)


def test_a_split_product_in_a_graph():
    a, b = _operand((16, 7168), TILE, 0), _operand((2112, 7168), BLOCK, 1)
    out = torch.empty(16, 2112, dtype=torch.bfloat16, device="cuda")
    products.matmul(out, *a, *b, accumulate=False)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.matmul(out, *a, *b, accumulate=False)
        products.matmul(out, *a, *b, accumulate=False)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        products.matmul(torch.empty_like(out), *a, *b, accumulate=False)
        assert torch.equal(out, expected)


def test_a_captured_graph_follows_the_sizes():
    a, b = _operand((900, 512), TILE, 0), _operand((4, 300, 512), BLOCK, 1)
    offs = torch.tensor([100, 200, 300, 900], dtype=torch.int32, device="cuda")
    products.grouped(*a, *b, offs, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = products.grouped(*a, *b, offs, torch.bfloat16)
    for ends in ([0, 0, 0, 0], [900, 900, 900, 900], [1, 130, 131, 700]):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, products.grouped(*a, *b, offs, torch.bfloat16))


def test_operands_that_lie_otherwise_are_copied():
    a, b = _operand((300, 1000), TILE, 0), _operand((200, 1000), BLOCK, 1)
    expected, out = (torch.empty(300, 200, device="cuda") for _ in range(2))
    products.matmul(expected, *a, *b, accumulate=False)
    columns_first = a[0].view(torch.uint8).mT.contiguous().mT.view(a[0].dtype)
    products.matmul(out, columns_first, a[1].contiguous(), TILE, *b, accumulate=False)
    assert torch.equal(out, expected)
