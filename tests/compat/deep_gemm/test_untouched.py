"""Every GEMM refuses what does not fit by the name of the argument, and d is unchanged then."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import octile.compat.deep_gemm as deep_gemm
from octile.ops.scale_layouts import pack_ue8m0
from tests.compat.deep_gemm.conftest import blocks_128, random, tiles

M, N, K, G = 24, 40, 256, 2
Arguments = dict[str, Any]
Change = Callable[[Any], Any]


def transposed(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].mT, pair[1].mT


def columns(channels: int, tokens: int = K) -> tuple[Tensor, Tensor]:
    """[tokens, channels] in tiles of 128×1."""
    return transposed(tiles(channels, tokens))


def flat(channels: int) -> tuple[Tensor, Tensor]:
    """Groups [channels, 128], flattened one after another."""
    data, scale = tiles(channels, K)
    return torch.cat([group.flatten().view(torch.uint8) for group in data.split(128, 1)]).view(data.dtype), scale


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def result(*shape: int, dtype: torch.dtype = torch.float32) -> Arguments:
    return {"d": random(*shape, seed=7).to(dtype)}


def added(*shape: int) -> Arguments:
    return result(*shape) | {"c": random(*shape, seed=8)}


def bf16(*shape: int) -> Tensor:
    return random(*shape).bfloat16()


def fp8_dense() -> Arguments:
    return {"a": tiles(M, K), "b": blocks_128(N, K)} | added(M, N)


def bf16_dense() -> Arguments:
    return {"a": bf16(M, K), "b": bf16(N, K)} | added(M, N)


def change(arguments: Arguments, **changes: Change) -> Arguments:
    return arguments | {name: how(arguments[name]) for name, how in changes.items()}


ROWS = int32(*[0] * 10, *[1] * 14)
FITTING: dict[str, Callable[[], Arguments]] = {
    "fp8_gemm_nt": fp8_dense,
    "fp8_gemm_nn": lambda: change(fp8_dense(), b=transposed),
    "fp8_gemm_tn": lambda: change(fp8_dense(), a=transposed, b=transposed),
    "fp8_gemm_tt": lambda: change(fp8_dense(), a=transposed),
    "fp8_gemm_nt_skip_head_mid": lambda: (
        {"a": tiles(M, K), "b": blocks_128(N, K), "head_splits": (12, 3, 8)} | result(M, N + 2 * 3)
    ),
    "fp8_einsum": lambda: {"expr": "bhr,hdr->bhd", "a": tiles(M, G, K), "b": blocks_128(G, N, K)} | added(M, G, N),
    "einsum": lambda: {"expr": "bmk,bnk->mn", "a": bf16(G, M, K), "b": bf16(G, N, K)} | added(M, N),
    "m_grouped_fp8_gemm_nt_contiguous": lambda: (
        {"a": tiles(M, K), "b": blocks_128(G, N, K), "grouped_layout": ROWS} | result(M, N)
    ),
    "m_grouped_fp8_gemm_nn_contiguous": lambda: (
        {"a": tiles(M, K), "b": transposed(blocks_128(G, N, K)), "grouped_layout": ROWS} | result(M, N)
    ),
    "m_grouped_fp8_gemm_nt_masked": lambda: (
        {"a": tiles(G, M, K), "b": blocks_128(G, N, K), "masked_m": int32(3, M), "expected_m": 9} | result(G, M, N)
    ),
    "k_grouped_fp8_gemm_tn_contiguous": lambda: (
        {"a": columns(M), "b": columns(N), "ks_cpu": [128, 128], "grouped_layout": int32(128, 128)} | added(G, M, N)
    ),
    "k_grouped_fp8_gemm_nt_contiguous": lambda: (
        {"a": flat(M), "b": flat(N), "ks_cpu": [128, 128], "grouped_layout": int32(128, 128)} | added(G, M, N)
    ),
    "bf16_gemm_nt": bf16_dense,
    "bf16_gemm_nn": lambda: change(bf16_dense(), b=lambda b: b.mT),
    "bf16_gemm_tn": lambda: change(bf16_dense(), a=lambda a: a.mT, b=lambda b: b.mT),
    "bf16_gemm_tt": lambda: change(bf16_dense(), a=lambda a: a.mT),
    "cublaslt_gemm_nt": bf16_dense,
    "m_grouped_bf16_gemm_nt_contiguous": lambda: (
        {"a": bf16(M, K), "b": bf16(G, N, K), "grouped_layout": ROWS} | result(M, N)
    ),
    "m_grouped_bf16_gemm_nn_contiguous": lambda: (
        {"a": bf16(M, K), "b": bf16(G, K, N), "grouped_layout": ROWS} | result(M, N)
    ),
    "m_grouped_bf16_gemm_nt_masked": lambda: (
        {"a": bf16(G, M, K), "b": bf16(G, N, K), "masked_m": int32(3, M), "expected_m": 9}
        | result(G, M, N, dtype=torch.bfloat16)
    ),
    "k_grouped_bf16_gemm_tn_contiguous": lambda: (
        {"a": bf16(K, M), "b": bf16(K, N), "ks_cpu": [100, 156], "grouped_layout": int32(100, 156)} | added(G, M, N)
    ),
}

NO_TENSOR: dict[str, Change] = {"None": lambda t: None, "a number": lambda t: 1.5, "a list": lambda t: [1.0, 2.0, 3.0]}
TENSOR: dict[str, Change] = {
    "dtype": lambda t: t.to(torch.float64),
    "a dimension more": lambda t: t[None],
    "no dimension": lambda t: t.flatten()[0],
    "device": lambda t: t.to("meta"),
}
PAIR: dict[str, Change] = {
    "no pair": lambda p: p[0],
    "three": lambda p: (*p, p[1]),
    **{f"data {what}": lambda p, how=how: (how(p[0]), p[1]) for what, how in (NO_TENSOR | TENSOR).items()},
    **{f"scale {what}": lambda p, how=how: (p[0], how(p[1])) for what, how in (NO_TENSOR | TENSOR).items()},
    "a row of scales less": lambda p: (p[0], p[1][..., :-1, :]),
    "a column of scales less": lambda p: (p[0], p[1][..., :-1]),
    "integer scales": lambda p: (p[0], p[1].int()),
    "INT8": lambda p: (p[0].view(torch.int8), p[1]),
}
RESULT: dict[str, Change] = {
    "FP16": lambda t: t.half(),
    "a row less": lambda t: t[..., 1:, :],
    "numbers at one place": lambda t: t[..., :1].expand(t.shape),
}
SIZES: dict[str, Change] = {
    "one less": lambda t: t[1:],
    "int64": lambda t: t.long(),
    "below": lambda t: t - 1000,
    "above": lambda t: t + 1000,
    "falling": lambda t: t.flip(0) if len(t) == M else t * 0 - 5,
}
KS: dict[str, Change] = {
    "None": lambda ks: None,
    "a tensor": lambda ks: torch.tensor(ks),
    "a number": lambda ks: sum(ks),
    "no integers": lambda ks: [float(k) for k in ks],
    "negative": lambda ks: [ks[0] + 256, ks[1] - 256],
    "one less": lambda ks: ks[1:],
    "none": lambda ks: [],
    "others than on the device": lambda ks: [ks[0] - 32, ks[1] + 32],
}


HEAD_SPLITS: dict[str, Change] = {
    "None": lambda splits: None,
    "a number": lambda splits: 20,
    "two": lambda splits: splits[:2],
    "fractions": lambda splits: (12.0, 3.0, 8.0),
    "negative": lambda splits: (12, -3, 8),
    "no head": lambda splits: (0, 3, 0),
    "no divisor of N": lambda splits: (12, 3, 9),
}
EXPRESSIONS: dict[str, Change] = {
    "None": lambda expr: None,
    "a list": lambda expr: [expr],
    "another": lambda expr: "mk,nk->mn",
}


def wrong(arguments: Arguments) -> Iterator[tuple[str, str, Change]]:
    """Argument, what is wrong with it, and how it becomes so."""
    for name, argument in arguments.items():
        kinds: dict[str, Change]
        if name == "head_splits":
            kinds = HEAD_SPLITS
        elif name == "expr":
            kinds = EXPRESSIONS
        elif isinstance(argument, tuple):
            kinds = NO_TENSOR | PAIR
        elif name == "ks_cpu":
            kinds = KS
        elif name == "expected_m":
            kinds = {"None": lambda m: None, "a fraction": lambda m: 1.5, "negative": lambda m: -1}
        elif name in ("grouped_layout", "masked_m"):
            kinds = NO_TENSOR | TENSOR | SIZES
        elif name in ("c", "d"):
            kinds = {k: v for k, v in NO_TENSOR.items() if (name, k) != ("c", "None")} | TENSOR | RESULT
            if name == "c":
                kinds.pop("numbers at one place")  # it is only read
        else:
            kinds = NO_TENSOR | TENSOR
        for what, how in kinds.items():
            yield name, what, how


CASES = [
    pytest.param(function, name, how, id=f"{function} {name}: {what}")
    for function, arguments in FITTING.items()
    for name, what, how in wrong(arguments())
    if not (function.startswith("k_grouped") and what == "integer scales")  # these would fit: they are packed scales
]


@pytest.mark.parametrize("function", FITTING)
def test_the_arguments_fit_otherwise(function: str):
    arguments = FITTING[function]()
    before = arguments["d"].clone()
    getattr(deep_gemm, function)(**arguments)
    assert not torch.equal(arguments["d"], before)


@pytest.mark.parametrize(
    ("function", "name", "given"),
    [
        ("fp8_gemm_nn", "b", r"b as \[N, K\], given as \[K, N\]"),
        ("fp8_gemm_tt", "a", r"a as \[M, K\], given as \[K, M\]"),
        ("fp8_gemm_tn", "a", r"a as \[M, K\], given as \[K, M\] and b as \[N, K\], given as \[K, N\]"),
        ("bf16_gemm_nn", "b", r"b as \[N, K\], given as \[K, N\]"),
        ("m_grouped_fp8_gemm_nn_contiguous", "b", r"b as \[N, K\], given as \[K, N\]"),
        ("m_grouped_bf16_gemm_nn_contiguous", "b", r"b as \[N, K\], given as \[K, N\]"),
    ],
)
def test_shapes_of_transposed_operands_are_said_to_be_so(function: str, name: str, given: str):
    def shorter(operand: Any) -> Any:
        if isinstance(operand, tuple):
            return operand[0][..., :128, :], operand[1][..., :1, :]
        return operand[..., :128, :]

    with pytest.raises(ValueError, match=rf"{name} is \(.*128\).* \(shapes of {given}\)$"):
        getattr(deep_gemm, function)(**change(FITTING[function](), **{name: shorter}))
    with pytest.raises(ValueError, match=r"^d must be \(.*, not \(\d+, \d+\)$"):
        getattr(deep_gemm, function)(**change(FITTING[function](), d=lambda d: d[1:]))


def numpy_integers(argument: Any) -> Any:
    if isinstance(argument, int):
        return np.int64(argument)
    if isinstance(argument, tuple | list) and all(isinstance(number, int) for number in argument):
        return type(argument)(np.int64(number) for number in argument)
    return argument


@pytest.mark.parametrize("function", FITTING)
def test_integers_may_be_those_of_numpy(function: str):
    arguments, expected = FITTING[function](), FITTING[function]()
    getattr(deep_gemm, function)(**expected)
    if "recipe" in inspect.signature(getattr(deep_gemm, function)).parameters:
        arguments["recipe"] = (1, 1, 128) if function.startswith("k_grouped") else (1, 128, 128)
    getattr(deep_gemm, function)(**{name: numpy_integers(argument) for name, argument in arguments.items()})
    assert torch.equal(arguments["d"], expected["d"])


def test_sizes_may_be_an_array_of_numpy():
    arguments, expected = (FITTING["k_grouped_fp8_gemm_tn_contiguous"]() for _ in range(2))
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(**expected)
    deep_gemm.k_grouped_fp8_gemm_tn_contiguous(**change(arguments, ks_cpu=np.array))
    assert torch.equal(arguments["d"], expected["d"])


@pytest.mark.one_case
@pytest.mark.parametrize(("function", "name", "how"), CASES)
def test_d_is_unchanged(function: str, name: str, how: Change):
    arguments = change(FITTING[function](), **{name: how})
    copies = {n: arguments[n].clone() for n in ("c", "d") if isinstance(arguments.get(n), Tensor)}
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        getattr(deep_gemm, function)(**arguments)
    for n, before in copies.items():
        assert before.is_meta or torch.equal(arguments[n], before)


@pytest.mark.parametrize("function", FITTING)
@pytest.mark.parametrize("name", ["c", "d"])
def test_results_and_addends_that_require_a_gradient_are_refused(function: str, name: str):
    arguments = FITTING[function]()
    if name not in arguments:
        return
    before = arguments["d"].clone()
    arguments[name].requires_grad_()
    message = rf"{name} must not require a gradient, which is not computed; pass {name}\.detach\(\)"
    with pytest.raises(ValueError, match=message):
        getattr(deep_gemm, function)(**arguments)
    assert torch.equal(arguments["d"], before)
    with torch.no_grad():
        getattr(deep_gemm, function)(**arguments)


@pytest.mark.parametrize("offset", [1, N, (M - 1) * N, M * N - 1])
@pytest.mark.parametrize("function", ["fp8_gemm_nt", "bf16_gemm_nt"])
def test_an_addend_that_overlaps_the_result_is_refused(function: str, offset: int):
    buffer = random(2 * M * N)
    one, other = buffer[: M * N].view(M, N), buffer[offset : offset + M * N].view(M, N)
    before = buffer.clone()
    for c, d in ((one, other), (other, one)):
        with pytest.raises(ValueError, match=r"c must be d itself or share no memory with it; pass c\.clone\(\)"):
            getattr(deep_gemm, function)(**FITTING[function]() | {"c": c, "d": d})
    assert torch.equal(buffer, before)


@pytest.mark.parametrize(("columns", "fits"), [(N, True), (N - 1, False), (1, False)])
def test_an_addend_may_lie_between_the_rows_of_the_result(columns: int, fits: bool):
    buffer, arguments = random(M, 2 * N), fp8_dense()
    c, d = buffer[:, columns : columns + N], buffer[:, :N]
    if not fits:
        with pytest.raises(ValueError, match="c must be d itself or share no memory"):
            deep_gemm.fp8_gemm_nt(**arguments | {"c": c, "d": d})
        return
    expected = torch.empty(M, N)
    deep_gemm.fp8_gemm_nt(**arguments | {"c": c, "d": expected})
    deep_gemm.fp8_gemm_nt(**arguments | {"c": c, "d": d})
    assert torch.equal(d, expected)


PSUM = {
    "m_grouped_fp8_gemm_nt_contiguous": lambda: change(
        FITTING["m_grouped_fp8_gemm_nt_contiguous"]() | result(160, N), a=lambda _: tiles(160, K)
    ),
    "m_grouped_bf16_gemm_nt_contiguous": lambda: change(
        FITTING["m_grouped_bf16_gemm_nt_contiguous"]() | result(160, N), a=lambda _: bf16(160, K)
    ),
    "k_grouped_fp8_gemm_tn_contiguous": lambda: change(
        FITTING["k_grouped_fp8_gemm_tn_contiguous"](),
        a=lambda _: columns(M, 160),
        b=lambda _: columns(N, 160),
        ks_cpu=lambda _: None,
    ),
}


@pytest.mark.parametrize("ends", [(100, 90), (100, 110), (-1, 160), (100, 161)])
@pytest.mark.parametrize("function", PSUM)
def test_ends_of_no_groups_are_refused(function: str, ends: tuple[int, int]):
    arguments = PSUM[function]() | {"grouped_layout": int32(*ends)}
    before = arguments["d"].clone()
    what = r"grouped_layout must hold ends of groups that begin at multiples of 128, up to the 160 rows, not"
    with pytest.raises(ValueError, match=what):
        getattr(deep_gemm, function)(**arguments, use_psum_layout=True)
    assert torch.equal(arguments["d"], before)


@pytest.mark.parametrize("ks", [[128, 64], [100, 130], [300, 32]])
def test_sizes_that_the_ends_do_not_say_are_refused(ks: list[int]):
    arguments = PSUM["k_grouped_fp8_gemm_tn_contiguous"]() | {"grouped_layout": int32(100, 128), "ks_cpu": ks}
    before = arguments["d"].clone()
    with pytest.raises(ValueError, match="ks_cpu"):
        deep_gemm.k_grouped_fp8_gemm_tn_contiguous(**arguments, use_psum_layout=True)
    assert torch.equal(arguments["d"], before)


@pytest.mark.parametrize("scale", [lambda s: s[:, :0], lambda s: s[1:], lambda s: s[None], lambda s: s[0, 0]])
def test_packed_scales_have_the_shape_of_theirs(scale: Change):
    data, fitting = tiles(M, K, power_of_2=True)
    arguments = fp8_dense() | {"a": (data, scale(pack_ue8m0(fitting)))}
    before = arguments["d"].clone()
    with pytest.raises(ValueError, match=r"a's scale must be \(24, 1\) where it is packed, not"):
        deep_gemm.fp8_gemm_nt(**arguments)
    assert torch.equal(arguments["d"], before)


@pytest.mark.parametrize(
    "recipes",
    [
        {"recipe": 128},
        {"recipe": (1, 128, 0)},
        {"recipe": ("1", "128", "128")},
        {"recipe_a": (1,), "recipe_b": (128, 128)},
        {"recipe_a": (1, 128), "recipe_b": 128},
    ],
)
@pytest.mark.parametrize("function", [name for name in FITTING if "fp8" in name and name[0] != "k"])
def test_recipes_that_are_none_are_refused(function: str, recipes: Arguments):
    arguments = FITTING[function]() | recipes
    before = arguments["d"].clone()
    with pytest.raises((TypeError, ValueError), match="recipe"):
        getattr(deep_gemm, function)(**arguments)
    assert torch.equal(arguments["d"], before)
