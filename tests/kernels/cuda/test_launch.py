"""A product's launch is decided once for a layout; a further one only fills in addresses."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from octile.kernels.cuda import launch as launching
from octile.kernels.cuda import limits, tensor_map
from octile.kernels.cuda.config import Scales, Schedule
from octile.kernels.cuda.plan import Product
from tests.kernels.cuda.emulated import operand


class FakeKernel:
    device = 0

    def __init__(self) -> None:
        self.launches: list[tuple] = []

    def launch(self, *arguments) -> None:
        self.launches.append(arguments)


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> FakeKernel:
    """A GPU of 132 multiprocessors that takes any launch."""
    fake = FakeKernel()
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launching.jit, "load", lambda *arguments: fake)
    monkeypatch.setattr(launching, "current_stream", lambda device: 7)
    monkeypatch.setattr(limits, "num_sms", lambda device: 132)
    monkeypatch.setattr(tensor_map, "encode", lambda described, pointer: (described, pointer))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launching, "_prepared", {})
    monkeypatch.setattr(launching, "_workspaces", {})
    return fake


def _product(m: int = 1000, k: int = 1024, out: Tensor | None = None) -> Product:
    a, b = operand((m, k), Scales.PER_ROW), operand((256, k), Scales.PER_BLOCK, 1)
    out = torch.empty(m, 256, dtype=torch.bfloat16) if out is None else out
    return Product(Schedule.DENSE, out, *a, *b, None, False, True)


def test_a_second_launch_is_the_same(kernel: FakeKernel):
    p = _product()
    launching.launch(p)
    launching.launch(p)
    assert kernel.launches[0] == kernel.launches[1]


def test_other_memory_of_the_same_layout_shares_the_plan(kernel: FakeKernel):
    launching.launch(_product())
    launching.launch(_product())
    assert len(launching._prepared) == 1
    assert kernel.launches[0] != kernel.launches[1], "but it has other addresses"


def test_other_alignment_is_another_plan(kernel: FakeKernel):
    launching.launch(_product())
    launching.launch(_product(out=torch.empty(1000 * 256 + 2, dtype=torch.bfloat16)[2:].view(1000, 256)))
    assert len(launching._prepared) == 2


def test_scales_that_lie_otherwise_are_copied_at_every_launch(kernel: FakeKernel):
    p = _product()
    p = p._replace(a_scale=p.a_scale.contiguous())
    for _ in range(2):
        launching.launch(p)
    addresses = [arguments[4][5] for arguments in kernel.launches]
    assert len(addresses) == 2
    assert p.a_scale.data_ptr() not in addresses


def test_split_products_of_a_stream_share_their_workspace(kernel: FakeKernel):
    for k in (8192, 4096):
        launching.launch(_product(m=16, k=k))
    assert len(launching._workspaces) == 1
    (_, arrivals), *_ = launching._workspaces.values()
    assert not arrivals.any()


def test_fewer_multiprocessors_are_another_plan(kernel: FakeKernel, monkeypatch):
    p = _product()
    launching.launch(p)
    monkeypatch.setattr(limits, "num_sms", lambda device: 4)
    launching.launch(p)
    assert [grid for grid, *_ in kernel.launches][1] <= 4
