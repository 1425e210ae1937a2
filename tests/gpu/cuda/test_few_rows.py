"""Hopper's kernels of few rows on a GPU: the references' values, their bits, and replays of a graph."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.few_rows import attention
from octile.kernels.cuda.gemm import request
from octile.ops import few_rows as operators
from octile.ops.few_rows import few_rows_nt, latent_attention
from tests.ops import few_rows

LENGTHS = [1000, 1, 0, 64, 65, 2047, 33, 500]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


def on_gpu(*arguments: Tensor | None) -> list[Tensor | None]:
    return [t if t is None else t.cuda() for t in arguments]


@pytest.mark.parametrize(
    ("m", "k", "n", "norm", "add", "power_of_2"),
    [
        (1, 2048, 3648, torch.float32, False, False),
        (2, 2048, 2048, None, True, True),
        (3, 1408, 130, torch.bfloat16, True, False),
        (5, 7168, 64, torch.float32, False, True),
        (7, 16, 1, None, True, False),
        (8, 10944, 256, None, False, False),
        (8, 2048, 3648, torch.bfloat16, False, True),
        (8, 16384, 256, None, True, True),  # rows that do not fit into shared memory
    ],
)
def test_products(m: int, k: int, n: int, norm: torch.dtype | None, add: bool, power_of_2: bool):
    x, norm_weight, weight, scale, rows = few_rows.product(m, k, n, norm, add)
    expected = few_rows_nt(x, norm_weight, 1e-6, weight, scale, power_of_2, rows)
    x, norm_weight, weight, scale, rows = on_gpu(x, norm_weight, weight, scale, rows)
    found = few_rows_nt(x, norm_weight, 1e-6, weight, scale, power_of_2, rows)
    assert few_rows.close(found.cpu(), expected)
    assert torch.equal(few_rows_nt(x, norm_weight, 1e-6, weight, scale, power_of_2, rows), found)


@pytest.mark.parametrize(
    ("k", "n", "norm", "add", "power_of_2"),
    [
        (2048, 3648, torch.float32, False, False),
        (2048, 2048, None, True, True),
        (1168, 130, None, True, False),
        (7168, 2112, torch.bfloat16, False, True),
        (16384, 256, None, False, False),
        (256, 64, torch.float32, False, False),  # whose norm another kernel sums
    ],
)
def test_one_row_has_the_bits_of_row_invariant_gemms(
    k: int, n: int, norm: torch.dtype | None, add: bool, power_of_2: bool
):
    for seed in range(10):
        arguments = on_gpu(*few_rows.product(1, k, n, norm, add, seed))
        x, norm_weight, weight, scale, rows = arguments
        of_all = norm_weight, 1e-6, weight, scale, power_of_2
        found = few_rows_nt(x, *of_all, rows, row_invariant=True)
        among_others = torch.cat([x.flip(1), x, x])  # which the single operators compute
        added = None if rows is None else rows.expand(3, -1)
        assert torch.equal(few_rows_nt(among_others, *of_all, added, row_invariant=True)[1:], found.expand(2, -1))


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e36, math.inf, math.nan])
def test_products_of_extreme_values(value: float):
    x, norm_weight, weight, scale, _ = few_rows.product(5, 2048, 160, torch.float32, False)
    x[torch.rand(x.shape, generator=few_rows.generator(1)) < 0.001] = value
    for norm in (None, norm_weight):
        expected = few_rows_nt(x, norm, 1e-6, weight, scale, False)
        of_x, of_norm, of_weight, of_scale = on_gpu(x, norm, weight, scale)
        assert few_rows.close(few_rows_nt(of_x, of_norm, 1e-6, of_weight, of_scale, False).cpu(), expected)


def attend(arguments: dict[str, Tensor | float]) -> tuple[Tensor, Tensor]:
    """Return the result of a GPU, and its cache, both on the CPU."""
    of_gpu = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in arguments.items()}
    found, again = latent_attention(**of_gpu), latent_attention(**of_gpu)
    assert torch.equal(found, again)
    return found.cpu(), of_gpu["cache"].cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("lengths", "n_heads"),
    [(LENGTHS[:1], 16), (LENGTHS[:2], 1), (LENGTHS[:3], 20), (LENGTHS, 16), ([5000, 1, 2] + [5000] * 5, 16)],
)
def test_attention(lengths: list[int], n_heads: int, dtype: torch.dtype):
    arguments = few_rows.attention(lengths, n_heads, 128, dtype=dtype)
    found, cache = attend(arguments)
    expected = latent_attention(**arguments)
    assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()
    assert not found[arguments["lengths"] == 0].any()
    differs = cache != arguments["cache"]  # rsqrt of a GPU has another last bit
    assert differs.sum() <= 0.05 * len(lengths) * cache.shape[-1]


@pytest.mark.parametrize("m", [1, 8])
def test_attention_of_long_texts(m: int):
    """A thread block has more chunks than stages."""
    arguments = few_rows.attention([9000] * m if m == 1 else [5000 - 300 * i for i in range(m)], 16, 128)
    found, _ = attend(arguments)
    expected = latent_attention(**arguments)
    assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


def test_rows_of_one_text_attend_to_those_before():
    """The last 8 positions are written by the kernel before the attention, which requests all others earlier."""
    arguments = few_rows.attention([200], 16, 128)
    rows = few_rows.attention([193 + i for i in range(8)], 16, 128)
    pages = arguments["pages"].expand(8, -1).contiguous()
    position = rows["lengths"].long() - 1
    slots = pages.long().gather(1, position[:, None] // 64)[:, 0] * 64 + position % 64
    rows |= {"cache": arguments["cache"], "pages": pages, "slots": slots}
    found, _ = attend(rows)
    expected = latent_attention(**rows)
    assert (found.float() - expected.float()).norm() <= 0.01 * expected.float().norm()


OF_LAST_BITS = pytest.mark.parametrize("almost_cancels", [False, True], ids=["random", "sums that almost cancel"])


def of_one_row(length: int, n_heads: int, almost_cancels: bool) -> dict[str, Tensor | float]:
    drawn = (
        few_rows.attention_of_last_bits if almost_cancels else lambda length, n: few_rows.attention([length], n, 128)
    )
    return {name: t.cuda() if isinstance(t, Tensor) else t for name, t in drawn(length, n_heads).items()}


QUERIES = "q", "kv", "w_k", "norm_weight", "eps", "cos", "sin", "slots"


@OF_LAST_BITS
@pytest.mark.parametrize("n_heads", [16, 20])
@pytest.mark.parametrize("length", [1, 7, 63, 64, 65, 512, 513, 1056, 2047, 2048, 2049, 4097, 9000])
def test_row_invariant_attention_of_one_row_has_the_bits_of_the_operators(
    length: int, n_heads: int, almost_cancels: bool
):
    arguments = of_one_row(length, n_heads, almost_cancels)
    caches = [arguments["cache"].clone() for _ in range(2)]
    drawn = [arguments[name] for name in QUERIES]
    queries = attention.latent_queries(*drawn, caches[0])
    expected = operators._row_invariant_queries(*drawn, caches[1])
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(queries, expected)
    text = caches[0], arguments["pages"], arguments["lengths"], arguments["w_v"]
    assert attention.why_no_values(queries, *text[:2], text[3], row_invariant=True) is None
    values = operators._row_invariant_values(queries, *text, arguments["scale"])
    assert torch.equal(attention.row_invariant_values(queries, *text, arguments["scale"]), values)
    assert torch.equal(latent_attention(**arguments, row_invariant=True), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize("m", [1, 5, 9])
def test_row_invariant_attention_of_any_rows_has_the_bits_of_each(m: int, dtype: torch.dtype):
    arguments = few_rows.attention([1500 + 300 * i for i in range(m)], 16, 128, dtype=dtype)  # of one part, and two
    arguments = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in arguments.items()}
    together = latent_attention(**arguments, row_invariant=True)
    of_rows = "q", "kv", "cos", "sin", "slots", "pages", "lengths"
    for row in range(m):
        one = {name: arguments[name][row : row + 1] for name in of_rows}
        assert torch.equal(latent_attention(**arguments | one, row_invariant=True)[0], together[row])


def test_a_graph_of_row_invariant_attention_is_replayed_with_longer_texts():
    arguments = of_one_row(4500, 16, False)
    lengths, slots, kv = (arguments[name] for name in ("lengths", "slots", "kv"))
    pages, text = arguments["pages"][0].long(), {**arguments, "cache": arguments["cache"].clone()}
    latent_attention(**text, row_invariant=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = latent_attention(**text, row_invariant=True)
    arguments["cache"].copy_(text["cache"])
    for length in (1, 64, 65, 512, 513, 2047, 2048, 2049, 2050, 4096, 4097, 4500):
        lengths.fill_(length)
        slots.copy_(pages[(length - 1) // 64, None] * 64 + (length - 1) % 64)
        kv.copy_(torch.randn(kv.shape, generator=few_rows.generator(length)))
        graph.replay()
        queries = operators._row_invariant_queries(*(arguments[name] for name in QUERIES), arguments["cache"])
        rest = (arguments[name] for name in ("cache", "pages", "lengths", "w_v", "scale"))
        assert torch.equal(found, operators._row_invariant_values(queries, *rest))
        assert torch.equal(text["cache"], arguments["cache"])


def test_a_graph_is_replayed_with_other_values():
    """Each kernel starts before the previous one has ended, and still reads what that one has written."""
    x, norm_weight, weight, scale, _ = on_gpu(*few_rows.product(2, 2048, 2048, torch.float32, False))
    chain = 12

    def compute() -> Tensor:
        rows = x
        for _ in range(chain):
            rows = few_rows_nt(rows, norm_weight, 1e-6, weight, scale, False, x)
        return rows

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    for seed in range(20):
        x.copy_(few_rows.product(2, 2048, 2048, None, False, seed)[0])
        graph.replay()
        torch.cuda.synchronize()
        rows = x
        for _ in range(chain):
            rows = few_rows_nt(rows, norm_weight, 1e-6, weight, scale, False, x)
            torch.cuda.synchronize()
        assert torch.equal(found, rows)


def test_steps_of_a_graph_read_what_the_steps_before_have_written():
    """Attention requests cached rows before the previous kernel has ended: those of earlier steps must be there."""
    n_layers, n_heads, m, hidden = 3, 16, 2, 512
    x, norm_weight, w_q, scale_q, _ = on_gpu(*few_rows.product(m, hidden, n_heads * 192 + 576, torch.float32, False))
    _, _, w_o, scale_o, _ = on_gpu(*few_rows.product(1, n_heads * 128, hidden, None, False))
    drawn = few_rows.attention([64 * 4] * m, n_heads, 128)
    w_k, kv_norm, cos, sin, pages, w_v = on_gpu(
        *(drawn[name] for name in ("w_k", "norm_weight", "cos", "sin", "pages", "w_v"))
    )

    def step(caches: list[Tensor], lengths: Tensor, rows: Tensor) -> None:
        lengths += 1
        last = lengths[:, None].long() - 1
        slots = pages.long().gather(1, last // 64)[:, 0] * 64 + last[:, 0] % 64
        y = rows
        for cache in caches:
            both = few_rows_nt(y, norm_weight, 1e-6, w_q, scale_q, False)
            q, kv = both[:, : n_heads * 192], both[:, n_heads * 192 :]
            text = slots, cache, pages, lengths
            o = latent_attention(q, kv, w_k, kv_norm, 1e-6, cos, sin, *text, w_v, 0.05)
            y = few_rows_nt(o, None, 0.0, w_o, scale_o, False, y)
        rows.copy_(y / y.float().square().mean(-1, keepdim=True).sqrt())

    def new_state() -> tuple[list[Tensor], Tensor, Tensor]:
        cache = torch.zeros(pages.numel(), 64, 576, dtype=torch.bfloat16, device="cuda")
        return [cache.clone() for _ in range(n_layers)], torch.full((m,), 20, device="cuda").int(), x.clone()

    expected, of_graph = new_state(), new_state()
    step(*of_graph)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*of_graph)
    for _ in range(120):
        graph.replay()
    for _ in range(121):
        step(*expected)
        torch.cuda.synchronize()
    for found, wanted in zip([*of_graph[0], *of_graph[1:]], [*expected[0], *expected[1:]], strict=True):
        assert torch.equal(found, wanted)
