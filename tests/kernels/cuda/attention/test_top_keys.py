"""Hopper's choice of keys in the emulator: the reference's columns in its order, also where the sample misleads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octile.kernels.cuda.attention import top_keys as launcher
from octile.kernels.cuda.gemm import request
from octile.ops.top_keys import top_keys
from tests.ops.paged_keys import int32
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def choose(logits: Tensor, starts: Tensor, ends: Tensor, k: int, seed: int = 0, n_sms: int = 1) -> Tensor:
    s, w = logits.shape
    constants = launcher.plan(s, w, k, logits.dtype, n_sms)
    top_k = torch.full((s, k), -7, dtype=torch.int32)
    emulator.run(
        "top_keys",
        constants,
        grid=s,
        threads=constants["threads"],
        shared_bytes=constants["shared_bytes"],
        arguments=[
            logits, logits.stride(0) * logits.itemsize, starts, ends, top_k, w, k, starts.stride(0), ends.stride(0),
            launcher.target(constants, k),
        ],
        seed=seed,
    )  # fmt: skip
    return top_k


def assert_as_reference(logits: Tensor, starts: Tensor, ends: Tensor, k: int, **options: int) -> None:
    assert torch.equal(choose(logits, starts, ends, k, **options), top_keys.reference(logits, starts, ends, k))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@DTYPES
@pytest.mark.parametrize("k", [1, 7, 128, 200, 301, 500])
def test_rows_of_few_columns(k: int, dtype: torch.dtype):
    starts, ends = int32([0, 3, -4, 300, 17, 5]), int32([301, 299, 150, 20, 900, -(2**31)])
    assert_as_reference(random(6, 301).to(dtype), starts, ends, k)


@emulated
@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32), st.integers(1, 40), st.data())
def test_logits_of_any_bits(seed: int, k: int, data: st.DataObject):
    bits = torch.randint(-(2**31), 2**31, (2, 50), generator=torch.Generator().manual_seed(seed))
    starts, ends = (int32(data.draw(st.lists(st.integers(-3, 55), min_size=2, max_size=2))) for _ in range(2))
    assert_as_reference(bits.int().view(torch.float32), starts, ends, k)


@pytest.mark.one_case
@emulated
@DTYPES
def test_ties_are_broken_by_the_column(dtype: torch.dtype):
    logits = random(3, 700).mul(2).round().to(dtype)
    logits[1] = 0.0
    logits[1, ::2] *= -1  # −0 equals 0
    logits[2, 100:300] = math.nan
    logits[2, 300:] = -math.inf
    assert_as_reference(logits, int32([0, 5, 50]), int32([700, 690, 700]), 250)


@emulated
@pytest.mark.parametrize("n_sms", [1, 9], ids=["512 threads", "1024 threads"])
def test_a_sample_finds_the_candidates_of_long_rows(n_sms: int):
    assert_as_reference(random(2, 20001), int32([0, 2]), int32([20001, 19999]), 100, n_sms=n_sms)


@emulated
@pytest.mark.parametrize("k", [1, 2048])
@pytest.mark.parametrize("where", ["first", "last"])
def test_a_sample_that_misleads_costs_time_alone(where: str, k: int):
    logits = random(1, 20000)
    logits[0, slice(0, 64) if where == "first" else slice(-64, None)] += 10  # all of them are in the sample
    logits[0, 70:3000] += 5 if where == "last" else 0
    assert_as_reference(logits, int32([0]), int32([20000]), k)


@pytest.mark.slow
@emulated
def test_rows_with_more_equal_logits_than_fit():
    logits = torch.zeros(3, 20000)
    logits[1] = random(20000).sign()
    logits[2, 12345] = 1.0
    assert_as_reference(logits, int32([0, 0, 3]), int32([20000, 20000, 20000]), 2048)


@emulated
def test_columns_outside_of_the_range_are_not_looked_at():
    logits = torch.full((2, 90), math.nan)
    logits[:, 21:66] = random(2, 45)
    assert_as_reference(logits, int32([21, 21]), int32([66, 66]), 60)


@emulated
def test_rows_and_ranges_of_any_stride():
    logits = random(4, 903)[:, 2:402]
    starts, ends = (int32([[0, 1], [2, 300], [4, 399], [6, 400]])[:, i] for i in (0, 1))
    assert_as_reference(logits, starts, ends, 37)


@emulated
def test_the_choice_does_not_depend_on_when_threads_run():
    logits, starts, ends = random(1, 9000).mul(4).round(), int32([0]), int32([9000])
    first = choose(logits, starts, ends, 300)
    assert all(torch.equal(choose(logits, starts, ends, 300, seed=seed), first) for seed in range(1, 4))


@pytest.mark.parametrize(("k", "width", "supported"), [(4096, 65536, True), (4097, 4096, True), (4097, 4097, False)])
def test_up_to_4096_columns_are_found(k: int, width: int, supported: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    assert (launcher.why_unsupported(torch.empty(2, width, device="meta"), k) is None) == supported


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_nothing_to_choose_is_left_to_torch(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    assert launcher.why_unsupported(torch.empty(shape), 3) == "there are no rows or columns"
