"""Einstein sums equal those of float64, in any strides, and refuse what they cannot compute."""

import pytest
import torch
from torch import Tensor

import octile.compat.deep_gemm as deep_gemm
from octile.ops.scale_layouts import pack_ue8m0
from tests.compat.deep_gemm.conftest import assert_gemm, blocks_128, random, tiles, values

B, H, R, D = 5, 3, 384, 200  # rows, heads and two sides, one of which is no multiple of 128
OF_HEADS = {"bhr,hdr->bhd": R, "bhd,hdr->bhr": D}  # and what is contracted
Pair = tuple[Tensor, Tensor]


def heads_first(expr: str, a: Tensor, b: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Operands [h, m, k] and [h, n, k] and the result [h, m, n], as torch's own einsum permutes them."""
    (of_a, of_b), of_d = expr.split("->")[0].split(","), expr.split("->")[1]
    (m,), (n,), (k,) = set(of_a) - set(of_b), set(of_b) - set(of_a), set(of_a) - set(of_d)
    operands = ((of_a, a, m + k), (of_b, b, n + k), (of_d, d, m + n))
    left, right, out = (torch.einsum(f"{letters}->h{order}", t) for letters, t, order in operands)
    return left, right, out


# BF16


@pytest.mark.parametrize("expr", OF_HEADS)
def test_bf16_projections_of_heads(expr: str):
    a, b = random(B, H, OF_HEADS[expr]).bfloat16(), random(H, D, R + 8, seed=1).bfloat16()[..., :R]
    d = torch.empty(B, H, D + R - OF_HEADS[expr], dtype=torch.bfloat16)
    deep_gemm.einsum(expr, a, b, d)
    left, right, out = heads_first(expr, a.double(), b.double(), d)
    assert_gemm(out, left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addend", ["none", "another", "d"])
def test_a_sum_of_bf16_gemms(dtype: torch.dtype, addend: str):
    a, b = random(7, 24, 40).bfloat16(), random(7, 16, 40, seed=1).bfloat16()
    d = random(24, 16, seed=2).to(dtype)
    c = {"none": None, "another": random(24, 16, seed=3).to(dtype), "d": d}[addend]
    before = None if c is None else c.clone()
    deep_gemm.einsum("bmk,bnk->mn", a, b, d, c)
    flat_a, flat_b = (t.double().transpose(0, 1).flatten(1) for t in (a, b))
    assert_gemm(d, flat_a, flat_b, before)


def test_the_flag_of_the_vendors_library_changes_nothing():
    a, b = random(B, H, R).bfloat16(), random(H, D, R, seed=1).bfloat16()
    d, flagged = torch.empty(2, B, H, D, dtype=torch.bfloat16)
    deep_gemm.einsum("bhr,hdr->bhd", a, b, d)
    deep_gemm.einsum("bhr,hdr->bhd", a, b, flagged, use_cublaslt=True)
    assert torch.equal(d, flagged)


# FP8


def fp8_operands(expr: str, power_of_2: bool = False) -> tuple[Pair, Pair, tuple[int, ...], tuple[int, int, int]]:
    """a and b with their scales, the shape of d, and the recipe."""
    if expr == "bhd,bhr->hdr":  # the contracted dimension is the first: quantized as the last, and permuted
        a, b = tiles(H, D, 300, power_of_2=power_of_2), tiles(H, R, 300, seed=1, power_of_2=power_of_2)
        return tuple(t.permute(2, 0, 1) for t in a), tuple(t.permute(2, 0, 1) for t in b), (H, D, R), (1, 1, 128)
    k = OF_HEADS[expr]
    a, b = tiles(B, H, k, power_of_2=power_of_2), blocks_128(H, D, R, seed=1, power_of_2=power_of_2)
    return a, b, (B, H, D + R - k), (1, 128, 128)


def dequantized(expr: str, a: Pair, b: Pair, gran_n: int) -> tuple[Tensor, Tensor]:
    """The float64 values of both operands, [h, m, k] and [h, n, k]."""
    d = torch.empty(0, 0, 0)
    (left, right, _), (left_scale, right_scale, _) = (heads_first(expr, a[i], b[i], d) for i in (0, 1))
    return values((left, left_scale), 1, 128), values((right, right_scale), gran_n, 128)


EXPRESSIONS = pytest.mark.parametrize("expr", [*OF_HEADS, "bhd,bhr->hdr"])


@EXPRESSIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("addend", ["none", "another", "d"])
def test_fp8_einstein_sums(expr: str, dtype: torch.dtype, addend: str):
    a, b, shape, recipe = fp8_operands(expr)
    d = random(*shape, seed=2).to(dtype)
    c = {"none": None, "another": random(*shape, seed=3).to(dtype), "d": d}[addend]
    before = None if c is None else c.clone()
    deep_gemm.fp8_einsum(expr, a, b, d, c, recipe)
    left, right = dequantized(expr, a, b, recipe[1])
    d, before = (None if t is None else heads_first(expr, a[0], b[0], t)[2] for t in (d, before))
    assert_gemm(d, left, right, before)


@EXPRESSIONS
def test_a_result_with_gaps_between_rows(expr: str):
    a, b, shape, recipe = fp8_operands(expr)
    memory = torch.full((*shape[:-1], shape[-1] + 3), 7.0)
    d, dense = memory[..., : shape[-1]], torch.empty(shape)
    deep_gemm.fp8_einsum(expr, a, b, d, recipe=recipe)
    deep_gemm.fp8_einsum(expr, a, b, dense, recipe=recipe)
    assert torch.equal(d, dense)
    assert memory[..., shape[-1] :].eq(7).all()


def test_packed_scales_give_the_same_result():
    (a, a_scale), (b, b_scale), shape, _ = fp8_operands("bhr,hdr->bhd", power_of_2=True)
    rows = b_scale.repeat_interleave(128, 1)[:, :D]
    d, packed = torch.empty(2, *shape)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", (a, a_scale), (b, rows), d, recipe=(1, 1, 128))
    deep_gemm.fp8_einsum(
        "bhr,hdr->bhd", (a, pack_ue8m0(a_scale)), (b, pack_ue8m0(rows)), packed, recipe=(1, 1, 128)
    )  # fmt: skip
    assert torch.equal(d, packed)


def test_no_rows_are_no_work():
    a, b = tiles(0, H, R), blocks_128(H, D, R)
    deep_gemm.fp8_einsum("bhr,hdr->bhd", a, b, torch.empty(0, H, D))


# Refusals


BF16 = {"a": random(B, H, R).bfloat16(), "b": random(H, D, R).bfloat16(), "d": torch.zeros(B, H, D).bfloat16()}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"expr": "bhr,rd->bhd"}, ValueError, "expr must be 'bmk,bnk->mn' or .*, not 'bhr,rd->bhd'"),
        ({"expr": "bhd,bhr->hdr"}, ValueError, "expr must be 'bmk,bnk->mn' or .*, not 'bhd,bhr->hdr'"),
        ({"expr": None}, TypeError, "expr must be a string, not NoneType"),
        ({"a": BF16["a"].float()}, TypeError, "a must be bfloat16, not torch.float32"),
        ({"a": BF16["a"][0]}, ValueError, r"a must have the dimensions 'bhr' of 'bhr,hdr->bhd', not the shape \(3, 3"),
        (
            {"b": BF16["b"][..., 1:]},
            ValueError,
            r"a and b must agree in 'r' .*: a is \(5, 3, 384\), b is \(3, 200, 383",
        ),
        ({"d": torch.zeros(B, H, D)}, TypeError, "d must be bfloat16 for 'bhr,hdr->bhd', not torch.float32"),
        ({"d": BF16["d"].transpose(0, 1)}, ValueError, r"d must be \(5, 3, 200\), not \(3, 5, 200\)"),
        ({"c": BF16["d"]}, ValueError, "c must be None for 'bhr,hdr->bhd', not a tensor"),
        (
            {"expr": "bmk,bnk->mn", "b": BF16["b"].new_zeros(B, D, R), "d": torch.zeros(H, D), "use_cublaslt": True},
            ValueError,
            "use_cublaslt must be False for 'bmk,bnk->mn'",
        ),
    ],
)
def test_what_does_not_fit_a_bf16_expression_is_refused(changes: dict[str, object], error: type, message: str):
    with pytest.raises(error, match=message):
        deep_gemm.einsum(**({"expr": "bhr,hdr->bhd"} | BF16 | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expr": "bmk,bnk->mn"}, "expr must be 'bhr,hdr->bhd' or .*, not 'bmk,bnk->mn'"),
        ({"recipe": (1, 128)}, r"recipe must be \(gran_m, gran_n, gran_k\), not \(1, 128\)"),
        ({"a": tiles(B, H, R + 128)}, "a and b must agree in 'r'"),
        (
            {"b": tiles(H, D, R)},
            r"b's scale must be \(3, 2, 3\) for \(3, 200, 384\) in blocks of 128×128, not \(3, 200",
        ),
        ({"a": (tiles(B, H, R)[0], torch.ones(B, H))}, r"a's scale must have 3 dimensions, not the shape \(5, 3\)"),
    ],
)
def test_what_does_not_fit_an_fp8_expression_is_refused(changes: dict[str, object], message: str):
    fitting = {"expr": "bhr,hdr->bhd", "a": tiles(B, H, R), "b": blocks_128(H, D, R), "d": torch.zeros(B, H, D)}
    with pytest.raises(ValueError, match=message):
        deep_gemm.fp8_einsum(**(fitting | changes))
    assert fitting["d"].eq(0).all()
