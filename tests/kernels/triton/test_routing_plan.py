"""The kernels of the routing plan equal the reference."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import launch_config
from octile.kernels.triton import routing_plan as kernel
from octile.ops.permute import count_tokens, routing_plan
from tests.kernels.triton.comparison import assert_same
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
# tokens, experts per token, experts
SHAPES = [(0, 2, 5), (1, 1, 1), (3, 6, 64), (64, 2, 8), (100, 8, 256), (45, 3, 700), (7, 2, 4096)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _experts(t: int, k: int, n_experts: int) -> Tensor:
    """Experts of which some have most of the tokens, and some none."""
    share = torch.rand(t, k, generator=torch.Generator().manual_seed(t))
    return (share.pow(3) * n_experts).long()


@every_shape
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_rows_are_sorted_by_expert_then_by_token(shape: tuple[int, int, int], dtype: torch.dtype):
    experts = _experts(*shape).to(dtype)
    load = count_tokens(experts, shape[2])[0]
    assert_same(kernel.launch(experts, load), routing_plan(experts, load))


@pytest.mark.parametrize("sizes", [{"blocks": 2, "elements": 8}, {"blocks": 4, "elements": 2}], ids=str)
def test_blocks_are_summed_in_parts(sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch):
    for name, size in sizes.items():
        monkeypatch.setitem(launch_config.ROUTING_PLAN_SCAN, name, size)
    monkeypatch.setitem(launch_config.ROUTING_PLAN, "ROWS", 32)
    experts = _experts(100, 3, 9)
    load = count_tokens(experts, 9)[0]
    assert_same(kernel.launch(experts, load), routing_plan(experts, load))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 40])
@pytest.mark.parametrize("k", [1, 6])
def test_tokens_are_counted_by_sequence(length: int, batch: int, k: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(launch_config.COUNT_TOKENS, "ROWS", 64)
    experts = _experts(length * batch, k, 12)
    assert_same([kernel.launch_count(experts, 12, batch)], [count_tokens(experts, 12, batch)])


def test_strides_do_not_matter():
    experts = _experts(3, 50, 7).mT
    load = torch.stack([count_tokens(experts, 7)[0]] * 2, dim=1)[:, 0]
    assert_same(kernel.launch(experts, load), routing_plan(experts, load))
    assert_same([kernel.launch_count(experts, 7, 2)], [count_tokens(experts, 7, 2)])


def test_with_wrong_experts_and_loads_nothing_is_written_outside():
    experts = torch.tensor([[-1, 5], [2**40, 1]])
    row_ids, order, _ = kernel.launch(experts, torch.tensor([-9, 100, 3]))
    assert row_ids.min() >= 0
    assert row_ids.max() < 4
    assert order.shape == (4,)
    assert kernel.launch_count(experts, 3, 1).tolist() == [[1, 1, 2]]
