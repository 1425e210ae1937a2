"""Hopper's routing kernels in the emulator: integers and rows are the reference's, the balance is close to it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.cuda.routing import launcher
from octile.ops.permute import count_tokens, routing_plan, weighted_routing_plan
from octile.ops.sequence_balance import sequence_balance
from tools import emulator
from tools.emulator import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernels in the emulator, in small blocks on a GPU of two SMs.

    A programmatic kernel begins before the previous one has written what it reads, and writes nothing until then.
    """

    def launch(name: str, constants: Any, x: Tensor, blocks: int, warps: int, shared: int, *arguments: Any) -> None:
        tensors = [t for t in arguments if isinstance(t, Tensor)]
        emulator.run(
            name, constants, grid=blocks, threads=32 * warps, shared_bytes=shared, arguments=arguments, seed=len(x),
            previous=tensors if constants.get("programmatic") else [],
        )  # fmt: skip

    monkeypatch.setattr(launcher, "_launch", launch)
    monkeypatch.setattr(num_sms, "multiprocessors", lambda device: 2)
    for settings in (launcher.COUNT, launcher.SORT):
        monkeypatch.setitem(settings, "warps", 2)
        monkeypatch.setitem(settings, "rounds", 2)
    monkeypatch.setattr(launcher, "SUM_WARPS", 2)


def _experts(t: int, k: int, n_experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(0, n_experts, (t, k), generator=torch.Generator().manual_seed(t)).to(dtype)


SHAPES = pytest.mark.parametrize(("t", "k", "n_experts"), [(1, 1, 1), (100, 4, 16), (64, 2, 64), (50, 3, 300)])


@pytest.mark.one_case
@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_counts(t: int, k: int, n_experts: int, dtype: torch.dtype):
    experts = _experts(t, k, n_experts, dtype)
    for batch in (1, 2)[: 1 + (t % 2 == 0)]:
        assert torch.equal(launcher.count_tokens(experts, n_experts, batch), count_tokens(experts, n_experts, batch))


@pytest.mark.one_case
@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_plan(t: int, k: int, n_experts: int, dtype: torch.dtype):
    experts = _experts(t, k, n_experts, dtype)
    load = count_tokens(experts, n_experts)[0].to(dtype)
    for found, expected in zip(launcher.routing_plan(experts, load), routing_plan(experts, load), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.each_value
@SHAPES
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_the_plan_of_one_block_with_weights(t: int, k: int, n_experts: int, dtype: torch.dtype):
    experts, weights = _experts(t, k, n_experts, dtype), torch.rand(t, k)
    expected = weighted_routing_plan(experts, weights, n_experts)
    for found, wanted in zip(launcher.weighted_routing_plan(experts, weights, n_experts), expected, strict=True):
        assert torch.equal(found, wanted)


def test_nothing_is_read_before_the_previous_kernel_has_ended():
    experts, weights = _experts(100, 4, 16), torch.rand(100, 4)
    expected = weighted_routing_plan(experts, weights, 16)
    with overlapping_launches():
        found = launcher.weighted_routing_plan(experts, weights, 16)
    assert all(map(torch.equal, found, expected))


def test_more_entries_than_one_block_takes_have_the_same_plan(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "MAX_ENTRIES_ALONE", 200)
    experts, weights = _experts(60, 4, 16), torch.rand(60, 4)
    assert "240 entries, and one block sorts 200" in str(launcher.why_not_weighted_plan(experts, 16))
    expected = weighted_routing_plan(experts, weights, 16)
    assert all(map(torch.equal, weighted_routing_plan.kernels["cuda"](experts, weights, 16), expected))


def test_strides_do_not_matter():
    experts, load = _experts(60, 4, 16), count_tokens(_experts(60, 4, 16), 16)[0]
    expected = routing_plan(experts, load)
    found = launcher.routing_plan(experts.mT.contiguous().mT, torch.stack((load, load), 1)[:, 1])
    assert all(map(torch.equal, found, expected))
    weights = torch.rand(4, 60).mT
    weighted = launcher.weighted_routing_plan(experts.mT.contiguous().mT, weights, 16)
    assert all(map(torch.equal, weighted, weighted_routing_plan(experts, weights, 16)))


def test_nothing_is_written_outside_for_a_wrong_load_and_other_numbers_than_experts():
    experts = _experts(60, 4, 16)
    experts[::7], experts[1::7] = -5, 99
    assert torch.equal(launcher.count_tokens(experts, 16, 1), count_tokens(experts.clamp(0, 15), 16))
    row_ids, *_ = launcher.routing_plan(experts, torch.full((16,), 1000))  # the emulator guards the results
    assert row_ids.min() >= 0
    assert row_ids.max() < 240
    weights = torch.rand(60, 4)
    expected = weighted_routing_plan(experts.clamp(0, 15), weights, 16)
    assert all(map(torch.equal, launcher.weighted_routing_plan(experts, weights, 16), expected))


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
@pytest.mark.parametrize(
    ("t", "n_experts", "k", "batch"), [(96, 16, 4, 2), (30, 64, 6, 3), (10, 256, 8, 1), (40, 16, 1, 4)]
)
def test_balance(t: int, n_experts: int, k: int, batch: int, scoring_func: str):
    logits = torch.randn(t, n_experts, generator=torch.Generator().manual_seed(t))
    loss, f = launcher.sequence_balance(logits, None, k, batch, scoring_func)
    expected_loss, expected_f = sequence_balance(logits, None, k, batch, scoring_func)
    assert torch.equal(f, expected_f)
    torch.testing.assert_close(loss, expected_loss, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("k", [3, 16])
def test_equal_logits_zeros_and_nan_are_ordered_as_in_the_reference(k: int):
    logits = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).mul(2).round()
    logits[::3] *= -0.0
    logits[5, 3] = logits[6, 31] = torch.nan
    f = launcher.sequence_balance(logits, None, k, 2, "sigmoid")[1]
    assert torch.equal(f, sequence_balance(logits, None, k, 2, "sigmoid")[1])


@pytest.mark.parametrize("value", [-200.0, 200.0])
def test_sigmoids_that_are_all_small_or_large_have_shares(value: float):
    logits = value + torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    loss, _ = launcher.sequence_balance(logits, None, 4, 1, "sigmoid")
    expected = sequence_balance(logits, None, 4, 1, "sigmoid")[0]
    torch.testing.assert_close(loss, expected, rtol=2.0**-19, atol=0)


def test_calls_of_other_kernels():
    experts, logits = _experts(4, 2, 16), torch.zeros(4, 64)
    assert "1000 experts are more than 512" in str(launcher.why_not_entries(experts, 1000))
    assert "there are 0 entries" in str(launcher.why_not_entries(experts[:0], 16))
    assert "written for Hopper" in str(launcher.why_not_plan(experts, torch.zeros(16)))
    assert "are given" in str(launcher.why_not_balance(logits, experts))
    assert "160 experts are not a power of two" in str(launcher.why_not_balance(torch.zeros(4, 160), None))
    assert "do not begin at multiples of 16" in str(launcher.why_not_balance(torch.zeros(4, 65)[:, 1:], None))
    assert "written for Hopper" in str(launcher.why_not_balance(logits, None))
