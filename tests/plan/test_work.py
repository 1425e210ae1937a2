"""The kernels of each layer with their FLOPs and bytes, written out for a small model; see toy.py for its sizes."""

from collections.abc import Iterable
from dataclasses import replace

import pytest

from octile.plan.work import (
    Work,
    attention_work,
    dense_work,
    embedding_work,
    expand_latents,
    gradient_sums,
    head_work,
    linear,
    mixture_work,
    prediction_work,
    tiles,
)
from tests.plan.toy import TOY

FORWARD, INPUT, WEIGHT = "forward", "input_gradient", "weight_gradient"
T = 64  # tokens
FP8, BF16, FP32 = 1, 2, 4  # bytes of a value
D, V = 256, 1000


def gemms(rows: float, n: int, k: int, groups: int = 1) -> list[Work]:
    """Fprop, dgrad and wgrad of a layer in FP8: operands in FP8, results in BF16; wgrad adds to FP32."""
    flops, weights = 2 * rows * n * k, groups * n * k
    return [
        Work("fp8_gemm", FORWARD, flops, FP8 * rows * k + FP8 * weights + BF16 * rows * n),
        Work("fp8_gemm", INPUT, flops, FP8 * rows * n + FP8 * weights + BF16 * rows * k),
        Work("fp8_wgrad", WEIGHT, flops, FP8 * rows * (n + k) + 2 * FP32 * weights, weights=weights),
    ]


def bf16_gemms(rows: float, n: int, k: int, terms: int = 1) -> list[Work]:
    flops, moved = terms * 2 * rows * n * k, BF16 * (rows * n + rows * k + n * k)
    return [
        Work("bf16_gemm", phase, flops, moved, weights=(phase == WEIGHT) * n * k) for phase in (FORWARD, INPUT, WEIGHT)
    ]


def op(unit, phase, bytes_of_a_token, calls=1, tokens=T) -> Work:
    return Work(unit, phase, bytes=tokens * bytes_of_a_token, calls=calls)


def same(found: Iterable[Work], expected: Iterable[Work]) -> None:
    def lines(work: Iterable[Work]) -> list[tuple[object, ...]]:
        return sorted((w.unit, w.phase, w.flops, w.bytes, w.calls, w.keys, w.weights) for w in work)

    assert lines(found) == lines(expected)


def test_a_tile_of_128_values_has_a_scale():
    assert [tiles(n) for n in (1, 128, 129, 256)] == [1 + 4, 128 + 4, 129 + 8, 256 + 8]


def test_the_three_gemms_of_a_layer_with_groups():
    same(linear(100, 48, 32, groups=3), gemms(100, 48, 32, groups=3))


ATTENTION = [
    *gemms(T, 96 + 144, 256),  # both compressions
    *gemms(T, 4 * 48, 96),
    *gemms(T, 4 * 72, 128),
    *gemms(T, 256, 4 * 40),
    Work("attention_forward", FORWARD, 2 * T * 16 * 4 * 88, keys=16),  # half of 32 tokens
    Work("attention_backward", INPUT, 5 * T * 16 * 4 * 88, keys=16),
    op("norm", FORWARD, 3 * 240, 2),  # BF16 read, FP8 written
    op("norm", FORWARD, 3 * 256),
    op("rotate", FORWARD, 2 * BF16 * 4 * 16),
    op("latent_keys", FORWARD, BF16 * 4 * (32 + 48)),
    op("quantize", FORWARD, (BF16 + FP8) * 160 + (BF16 + 1.5) * 160, 2),
    op("copy", FORWARD, 3 * BF16 * 256),
    op("quantize", INPUT, (BF16 + 2 * FP8) * 256),
    op("requantize", INPUT, (1.5 + BF16) * 160 + (1.5 + FP8) * 160, 2),
    op("rotate", INPUT, 2 * BF16 * 4 * 16),
    op("latent_keys_backward", INPUT, BF16 * 4 * (48 + 40 + 32 + 40)),
    op("quantize", INPUT, (BF16 + 2 * FP8) * (4 * 48 + 4 * 72 + 240), 4),
    op("requantize", INPUT, 2 * FP8 * (256 + 240), 3),
    op("norm_backward", INPUT, 4 * BF16 * (256 + 240), 3),
    op("copy", INPUT, 2 * BF16 * 240),
]
UP_AGAIN = [  # norms, queries, keys and values
    op("norm", INPUT, 3 * 256),
    op("norm", INPUT, 3 * 240, 2),
    op("rotate", INPUT, 2 * BF16 * 4 * 16),
    Work("fp8_gemm", INPUT, 2 * T * 192 * 96, T * 96 + 192 * 96 + BF16 * T * 192),
    Work("fp8_gemm", INPUT, 2 * T * 288 * 128, T * 128 + 288 * 128 + BF16 * T * 288),
    op("latent_keys", INPUT, BF16 * 4 * (32 + 48)),
]


def test_attention_whose_inputs_are_saved():
    same(attention_work(TOY, T, 32, saved=True), ATTENTION)


def test_attention_whose_inputs_are_recomputed():
    same(attention_work(TOY, T, 32, saved=False), [*ATTENTION, *UP_AGAIN])


def test_queries_that_are_not_compressed_come_from_the_hidden_state():
    found = list(attention_work(replace(TOY, q_lora_rank=None), T, 32, saved=False))
    gemm = [*gemms(T, 144, 256), *gemms(T, 192, 256), *gemms(T, 288, 128), *gemms(T, 256, 160)]
    again = [
        Work("fp8_gemm", INPUT, 2 * T * 192 * 256, T * 256 + 192 * 256 + BF16 * T * 192),
        Work("fp8_gemm", INPUT, 2 * T * 288 * 128, T * 128 + 288 * 128 + BF16 * T * 288),
    ]
    same((work for work in found if work.unit.startswith("fp8")), [*gemm, *again])


def test_latents_are_expanded_in_any_phase():
    gemm = Work("fp8_gemm", FORWARD, 2 * T * 288 * 128, T * 128 + 288 * 128 + BF16 * T * 288)
    same(expand_latents(TOY, T, FORWARD), [gemm, op("latent_keys", FORWARD, BF16 * 4 * (32 + 48))])


def feed_forward(rows: float, width: int, groups: int = 1, passed: float | None = None) -> list[Work]:
    passed = rows if passed is None else passed
    return [
        *gemms(rows, 2 * width, D, groups),
        *gemms(rows, D, width, groups),
        op("swiglu", FORWARD, (2 * BF16 + FP8 + 2 * FP8) * width, tokens=passed),
        op("swiglu_backward", INPUT, (BF16 + 2 * FP8 + 2 * 2 * FP8 + FP8) * width, tokens=passed),
    ]


def for_all_tokens(width: int) -> list[Work]:
    return [
        *feed_forward(T, width),
        op("quantize", INPUT, (BF16 + 2 * FP8) * D),
        op("requantize", INPUT, 2 * FP8 * D),
    ]


RESIDUAL = op("copy", FORWARD, 3 * BF16 * D)
NORM_AGAIN = op("norm", INPUT, 3 * D)


@pytest.mark.parametrize("saved", [True, False])
def test_a_layer_without_experts(saved):
    norm = [op("norm", FORWARD, (BF16 + FP8) * D), op("norm_backward", INPUT, 4 * BF16 * D)]
    expected = [*for_all_tokens(320), RESIDUAL, *norm]
    same(dense_work(TOY, T, saved), expected if saved else [*expected, NORM_AGAIN])


@pytest.mark.parametrize(
    ("ep", "load", "spare", "rows", "passed"),
    [
        (1, 1, 0, T * 4 + 16 * 64, T * 4 + 16 * 64),  # an expert's rows are padded by 64 on average
        (4, 1.5, 0.5, 1.5 * T * 4 + 4 * 64, 1.5 * (1.5 * T * 4 + 4 * 64)),
    ],
)
@pytest.mark.parametrize("saved", [True, False])
def test_a_layer_with_experts(saved, ep, load, spare, rows, passed):
    expected = [
        RESIDUAL,
        op("norm", FORWARD, (BF16 + FP8 + BF16) * D),  # the gate reads BF16
        op("norm_backward", INPUT, (4 + 2) * BF16 * D),  # the gradients of gate, experts and shared experts
        *bf16_gemms(T, 16, D, terms=3),
        *(op("copy", phase, 8 * 16, 8) for phase in (FORWARD, INPUT)),
        *feed_forward(rows, 192, 16 // ep, passed),
        Work("permute", FORWARD, bytes=T * D + passed * D),
        Work("unpermute", FORWARD, bytes=BF16 * (rows * D + 2 * T * D)),  # with the shared experts' result
        op("quantize", INPUT, (BF16 + FP8) * D),
        Work("permute", INPUT, bytes=T * D + passed * D),
        Work("requantize", INPUT, bytes=2 * passed * 2 * FP8 * D, calls=2),
        Work("unpermute", INPUT, bytes=BF16 * (rows * D + T * D)),
        *for_all_tokens(2 * 192),
    ]
    again = [op("norm", INPUT, (BF16 + FP8 + BF16) * D), NORM_AGAIN]  # of the gate and of the shared experts
    if ep == 1:
        again.append(NORM_AGAIN)  # of the experts, which save the rows that other ranks sent
    same(mixture_work(TOY, T, ep, saved, load, spare), expected if saved else [*expected, *again])


def test_the_head_with_its_norm_and_loss():
    expected = [
        *bf16_gemms(T, V, D),
        op("norm", FORWARD, 2 * BF16 * D),
        op("norm_backward", INPUT, 4 * BF16 * D),
        op("cross_entropy", FORWARD, BF16 * V),
        op("cross_entropy", INPUT, 2 * BF16 * V),
    ]
    same(head_work(TOY, T), expected)


def test_the_embedding():
    rows = op("copy", FORWARD, (FP32 + BF16) * D)
    gradient = Work("copy", WEIGHT, bytes=T * (BF16 + 2 * FP32) * D, weights=V * D)
    same(embedding_work(TOY, T), [rows, gradient])


def test_multi_token_prediction_projects_two_norms():
    expected = [
        *bf16_gemms(T, D, 2 * D),
        op("norm", FORWARD, 2 * 2 * BF16 * D, 2),
        op("norm_backward", INPUT, 2 * 4 * BF16 * D, 2),
        op("copy", FORWARD, 4 * BF16 * D),
        op("copy", INPUT, 4 * BF16 * D),
    ]
    same(prediction_work(TOY, T), expected)


def test_all_gradients_but_the_first_micro_batchs_are_added_in_fp32():
    work = [*linear(T, 8, 4), *linear(T, 16, 2), op("norm", FORWARD, 1)]
    same(gradient_sums(work, 4), [Work("copy", WEIGHT, bytes=0.75 * 3 * FP32 * (32 + 32), calls=0.75 * 2)])
    same(gradient_sums(work, 1), [Work("copy", WEIGHT, calls=0)])
