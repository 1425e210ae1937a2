"""A product's launch is decided once for a layout, and made once for tensors at the same addresses."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from octile.kernels.bounded_cache import BoundedCache
from octile.kernels.cuda.gemm import launcher as launching
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.gemm.config import Scales, Schedule
from octile.kernels.cuda.gemm.launch_plan import GemmRequest
from octile.kernels.cuda.jit import tensor_map
from tests.kernels.cuda.emulated import operand


class FakeKernel:
    device = 0

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.made = self.entered = 0

    @contextmanager
    def in_context(self):
        self.entered += 1
        yield

    def ready(self, *arguments):
        self.made += 1
        return lambda: self.launches.append(arguments)


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> FakeKernel:
    """A GPU of 132 multiprocessors that takes any launch."""
    fake = FakeKernel()
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launching.specialize, "load", lambda *arguments: fake)
    monkeypatch.setattr(launching, "current_stream", lambda device: 7)
    monkeypatch.setattr(num_sms, "num_sms", lambda device: 132)
    monkeypatch.setattr(tensor_map, "encode", lambda described, pointer: (described, pointer))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launching, "_prepared", BoundedCache(8))
    monkeypatch.setattr(launching, "_launches", BoundedCache(8))
    monkeypatch.setattr(launching, "_workspaces", {})
    return fake


def _product(m: int = 1000, k: int = 1024, out: Tensor | None = None) -> GemmRequest:
    a, b = operand((m, k), Scales.PER_ROW), operand((256, k), Scales.PER_BLOCK, 1)
    out = torch.empty(m, 256, dtype=torch.bfloat16) if out is None else out
    return GemmRequest(Schedule.DENSE, out, *a, *b, None, False, True)


def test_a_second_launch_is_the_same_and_is_not_made_again(kernel: FakeKernel):
    p = _product()
    launching.launch(p)
    launching.launch(p)
    assert kernel.launches[0] == kernel.launches[1]
    assert kernel.made == 1


def test_maps_are_made_in_the_kernels_context(kernel: FakeKernel, monkeypatch):
    entered = []
    monkeypatch.setattr(tensor_map, "encode", lambda described, pointer: entered.append(kernel.entered) or b"")
    launching.launch(_product())
    assert entered
    assert set(entered) == {1}


def test_another_stream_is_another_launch(kernel: FakeKernel, monkeypatch):
    p = _product()
    for stream in (7, 8, 7):
        monkeypatch.setattr(launching, "current_stream", lambda device, stream=stream: stream)
        launching.launch(p)
    assert [arguments[-1] for arguments in kernel.launches] == [7, 8, 7]
    assert kernel.made == 2


def test_another_workspace_is_another_launch(kernel: FakeKernel):
    p = _product(m=16, k=8192)
    launching.launch(p)
    first = launching._workspaces.copy()  # kept, so that the next one lies elsewhere
    launching._workspaces.clear()
    launching.launch(p)
    launching.launch(p)
    for workspaces, launches in ((first, kernel.launches[:1]), (launching._workspaces, kernel.launches[1:])):
        ((parts, arrivals),) = workspaces.values()
        assert all({parts.data_ptr(), arrivals.data_ptr()} <= set(arguments[4]) for arguments in launches)
    assert kernel.made == 2


def test_an_operand_that_must_be_copied_does_not_find_the_plan_of_scales_that_lie_alike(kernel: FakeKernel):
    """Both are at 4 bytes past a multiple of 16; only scales of blocks may be."""
    p = _product()
    moved = torch.empty(p.b_scale.numel() + 1)[1:].view(p.b_scale.shape).copy_(p.b_scale)
    launching.launch(p._replace(b_scale=moved))
    room = torch.empty(p.a_scale.numel() + 1)[1:].view(p.a_scale.mT.shape).mT.copy_(p.a_scale)
    launching.launch(p._replace(a_scale=room))
    assert moved.data_ptr() in kernel.launches[0][4]
    assert room.data_ptr() not in kernel.launches[1][4]


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
    monkeypatch.setattr(num_sms, "num_sms", lambda device: 4)
    launching.launch(p)
    assert [grid for grid, *_ in kernel.launches][1] <= 4


def test_threads_launch_on_their_own_streams_with_their_own_addresses(kernel: FakeKernel, monkeypatch):
    monkeypatch.setattr(launching, "current_stream", lambda device: threading.get_ident())
    done: list[tuple[int, list[object]]] = []
    monkeypatch.setattr(kernel, "ready", lambda *shape: lambda: done.append((threading.get_ident(), [*shape[4:]])))
    ours, together = [[_product() for _ in range(3)] for _ in range(3)], threading.Barrier(3)

    def work(mine: list[GemmRequest]) -> None:
        together.wait()  # also so that no thread has the name of one that has ended
        for _ in range(50):
            for p in mine:
                launching.launch(p)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in ours]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3 * 3 * 50
    assert all(stream == thread for thread, (_, stream) in done)
    for thread, mine in zip(threads, ours, strict=True):
        found = [arguments for name, (arguments, _) in done if name == thread.ident]
        for p, arguments in zip(mine * 50, found, strict=True):
            assert {p.out.data_ptr(), p.a_scale.data_ptr(), p.b_scale.data_ptr()} <= set(arguments)


CHANGES = {
    "schedule": {"schedule": Schedule.MASKED},
    "a's kind of scales": {"a_scales": Scales.PER_TENSOR},
    "b's kind of scales": {"b_scales": Scales.PER_TENSOR},
    "accumulate": {"accumulate": True},
    "promote": {"promote": False},
    "rows past the groups": {"zero_rest": False},
    "groups": {"sizes": torch.zeros(3, dtype=torch.int32)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_to_be_done_decides_on_the_plan(change: str):
    p = _product()
    other = p._replace(**CHANGES[change])
    assert launching._decisive(p, p.pointers()) == launching._decisive(_product(), p.pointers())
    assert launching._decisive(p, p.pointers()) != launching._decisive(other, p.pointers())


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "out"])
def test_how_tensors_lie_decides_on_the_plan(name: str):
    room, place = torch.zeros(64), ["a", "b", "a_scale", "b_scale", None, "out"].index(name)
    p = _product()._replace(**dict.fromkeys(["a", "b", "a_scale", "b_scale", "out"], room.as_strided((4, 4), (8, 1))))
    pointers, others = [0] * 6, [0] * 6
    others[place] = 4
    known = launching._decisive(p, tuple(pointers))
    found = [
        launching._decisive(p, tuple(others)),
        launching._decisive(p._replace(**{name: room.as_strided((4, 4), (9, 1))}), tuple(pointers)),
    ]
    if "scale" not in name:
        other = torch.zeros(64, dtype=torch.int32).as_strided((4, 4), (8, 1))
        found.append(launching._decisive(p._replace(**{name: other}), tuple(pointers)))
    if name in "ab":
        found.append(launching._decisive(p._replace(**{name: room.as_strided((4, 3), (8, 1))}), tuple(pointers)))
    assert known not in found
