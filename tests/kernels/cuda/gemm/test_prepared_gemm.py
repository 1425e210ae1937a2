"""Tests of PreparedGemm: planned once per layout, and prepared once for tensors at the same addresses."""

import threading
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")

from octile.kernels.cuda.gemm import launch_cache, num_sms
from octile.kernels.cuda.gemm.config import Scales, Schedule
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.cuda.jit import prepared, tensor_map
from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.cuda.jit.prepared import BoundedCache
from tests.kernels.cuda.emulated import block_of, operand


class FakeKernel:
    device, stream = 0, 7

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.made = self.entered = 0

    def current_stream(self) -> int:
        return self.stream

    @contextmanager
    def in_context(self):
        self.entered += 1
        yield

    def ready(self, *arguments):
        self.made += 1
        return lambda: self.launches.append(arguments)


@pytest.fixture
def kernel(monkeypatch, tmp_path) -> FakeKernel:
    """A GPU of 132 SMs that accepts any launch."""
    fake = FakeKernel()
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch_cache.specialize, "load", lambda *arguments: fake)
    monkeypatch.setattr(num_sms, "chip", lambda device: Chip(num_sms.limit or 132, gpu_multiprocessors=132))
    monkeypatch.setattr(tensor_map, "encode", lambda described, pointer: (described, pointer))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launch_cache, "_prepared", BoundedCache(8))
    monkeypatch.setattr(launch_cache, "_repeated", BoundedCache(8))
    monkeypatch.setattr(prepared, "_launches", BoundedCache(8))
    monkeypatch.setattr(launch_cache, "_workspaces", {})
    return fake


def _request(m: int = 1000, k: int = 1024, out: Tensor | None = None) -> GemmRequest:
    quantized = operand((m, k), Scales.PER_ROW), operand((256, k), Scales.PER_BLOCK, 1)
    a, b = (Operand(data, scale, block_of(kind, data)) for data, scale, kind in quantized)
    out = torch.empty(m, 256, dtype=torch.bfloat16) if out is None else out
    return GemmRequest(Schedule.DENSE, a, b, out.dtype, out)


def test_a_second_launch_is_the_same_and_is_not_prepared_again(kernel: FakeKernel):
    p = _request()
    launch_cache.launch(p)
    launch_cache.launch(p)
    assert kernel.launches[0] == kernel.launches[1]
    assert kernel.made == 1


def test_tensor_maps_are_encoded_in_the_kernels_context(kernel: FakeKernel, monkeypatch):
    entered = []
    monkeypatch.setattr(tensor_map, "encode", lambda described, pointer: entered.append(kernel.entered) or b"")
    launch_cache.launch(_request())
    assert entered
    assert set(entered) == {1}


def test_another_stream_is_another_launch(kernel: FakeKernel, monkeypatch):
    p = _request()
    for stream in (7, 8, 7):
        kernel.stream = stream
        launch_cache.launch(p)
    assert [arguments[5] for arguments in kernel.launches] == [7, 8, 7]
    assert kernel.made == 2


def test_another_workspace_is_another_launch(kernel: FakeKernel):
    p = _request(m=16, k=8192)
    launch_cache.launch(p)
    first = launch_cache._workspaces.copy()  # held, so that the next one gets another address
    launch_cache._workspaces.clear()
    launch_cache.launch(p)
    launch_cache.launch(p)
    for workspaces, launches in ((first, kernel.launches[:1]), (launch_cache._workspaces, kernel.launches[1:])):
        (workspace,) = workspaces.values()
        addresses = {workspace.partials.data_ptr(), workspace.arrivals.data_ptr()}
        assert all(addresses <= set(arguments[4]) for arguments in launches)
    assert kernel.made == 2


def test_an_operand_that_must_be_copied_does_not_share_the_plan_of_scales_with_its_alignment(kernel: FakeKernel):
    """Both are 4 bytes past a multiple of 16, where only block scales may be."""
    p = _request()
    moved = torch.empty(p.b.scale.numel() + 1)[1:].view(p.b.scale.shape).copy_(p.b.scale)
    launch_cache.launch(replace(p, b=replace(p.b, scale=moved)))
    buffer = torch.empty(p.a.scale.numel() + 1)[1:].view(p.a.scale.mT.shape).mT.copy_(p.a.scale)
    launch_cache.launch(replace(p, a=replace(p.a, scale=buffer)))
    assert moved.data_ptr() in kernel.launches[0][4]
    assert buffer.data_ptr() not in kernel.launches[1][4]


def test_a_launch_that_may_start_early_is_not_one_that_waits_for_the_previous_kernel(kernel: FakeKernel):
    p = _request()
    for context in (nullcontext(), overlapping_launches(), nullcontext()):
        with context:
            launch_cache.launch(p)
    assert [programmatic for *_, programmatic in kernel.launches] == [False, True, False]


def test_other_memory_of_the_same_layout_shares_the_plan(kernel: FakeKernel):
    for request in [_request() for _ in range(2)]:  # both are alive, so neither has the other's addresses
        launch_cache.launch(request)
    assert len(launch_cache._prepared) == 1
    assert kernel.launches[0] != kernel.launches[1], "but it has other addresses"


def test_other_alignment_is_another_plan(kernel: FakeKernel):
    launch_cache.launch(_request())
    launch_cache.launch(_request(out=torch.empty(1000 * 256 + 2, dtype=torch.bfloat16)[2:].view(1000, 256)))
    assert len(launch_cache._prepared) == 2


def test_scales_in_another_layout_are_copied_at_every_launch(kernel: FakeKernel):
    p = _request()
    p = replace(p, a=replace(p.a, scale=p.a.scale.contiguous()))
    for _ in range(2):
        launch_cache.launch(p)
    addresses = [arguments[4][5] for arguments in kernel.launches]
    assert len(addresses) == 2
    assert p.a.scale.data_ptr() not in addresses


def test_split_k_gemms_of_a_stream_share_their_workspace(kernel: FakeKernel):
    for k in (8192, 4096):
        launch_cache.launch(_request(m=16, k=k))
    assert len(launch_cache._workspaces) == 1
    (workspace,) = launch_cache._workspaces.values()
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("shares", [False, True])
def test_split_k_gemms_of_a_captured_graph_share_a_workspace_where_it_is_promised(
    kernel: FakeKernel, monkeypatch, shares: bool
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    zeros, cleared = torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: cleared.append(args) or zeros(*args, **kwargs))
    for _ in range(2):  # two graphs
        with launch_cache.one_workspace_in_capture() if shares else nullcontext():
            for _ in range(3):
                launch_cache.launch(_request(m=16, k=8192))
    assert len(cleared) == (2 if shares else 6)
    assert not launch_cache._workspaces, "that of eager GEMMs is not the graphs'"


def test_fewer_sms_are_another_plan(kernel: FakeKernel, monkeypatch):
    p = _request()
    launch_cache.launch(p)
    monkeypatch.setattr(num_sms, "limit", 4)
    launch_cache.launch(p)
    assert [grid for grid, *_ in kernel.launches][1] <= 4


def test_threads_launch_on_their_own_streams_with_their_own_addresses(kernel: FakeKernel, monkeypatch):
    monkeypatch.setattr(kernel, "current_stream", threading.get_ident)
    done: list[tuple[int, list[object]]] = []
    monkeypatch.setattr(kernel, "ready", lambda *shape: lambda: done.append((threading.get_ident(), [*shape[4:6]])))
    ours, together = [[_request() for _ in range(3)] for _ in range(3)], threading.Barrier(3)

    def work(mine: list[GemmRequest]) -> None:
        together.wait()  # also so that no thread reuses the identifier of a finished one
        for _ in range(50):
            for p in mine:
                launch_cache.launch(p)

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
            assert {p.out.data_ptr(), p.a.scale.data_ptr(), p.b.scale.data_ptr()} <= set(arguments)


CHANGES = {
    "schedule": {"schedule": Schedule.MASKED},
    "accumulate": {"accumulate": True},
    "promote": {"promote": False},
    "rows past the groups": {"zero_rest": False},
    "expected rows": {"expected_rows": 16},
    "alignment of groups": {"alignment": 128},
    "rows that do not depend on each other": {"row_invariant": True},
    "dtype of the result": {"out_dtype": torch.float32},
    "groups": {"sizes": torch.zeros(3, dtype=torch.int32)},
}


def _key(p: GemmRequest) -> object:
    return launch_cache.launch_key(p)[0]


@pytest.mark.parametrize("change", CHANGES)
def test_the_request_decides_on_the_plan(change: str):
    p = _request()
    assert _key(p) == _key(_request())
    assert _key(p) != _key(replace(p, **CHANGES[change]))


@pytest.mark.parametrize("name", ["a", "b"])
def test_blocks_decide_on_the_plan(name: str):
    p = _request()
    whole = replace(getattr(p, name), block=(1000, 1024))
    assert _key(p) != _key(replace(p, **{name: whole}))


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "out"])
def test_layouts_of_tensors_decide_on_the_plan(name: str):
    buffer = torch.zeros(64)
    tensors = dict.fromkeys(["a", "b", "a_scale", "b_scale", "out"], buffer.as_strided((4, 4), (8, 1)))

    def key(**others) -> object:
        t = tensors | others
        a, b = Operand(t["a"], t["a_scale"], (1, 128)), Operand(t["b"], t["b_scale"], (1, 128))
        return _key(GemmRequest(Schedule.DENSE, a, b, torch.float32, t["out"]))

    others = [
        buffer.as_strided((4, 4), (8, 1), 1),
        buffer.as_strided((4, 4), (9, 1)),
        torch.zeros(64, dtype=torch.int32).as_strided((4, 4), (8, 1)),
        buffer.as_strided((4, 3), (8, 1)),
    ]
    assert key() == key(**{name: buffer.as_strided((4, 4), (8, 1), 4)})
    assert key() not in [key(**{name: other}) for other in others]
