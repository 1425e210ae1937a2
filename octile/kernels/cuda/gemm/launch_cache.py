"""Launch cache for GEMMs, keyed by shapes, strides, alignment, dtypes and blocks.

A request whose key was launched before is not checked or planned again: the checks, the choice of a backend and the
launch plan depend on the key alone, never on values or addresses. Reading the key from the tensors takes the most time.
So a request at known addresses is compared with the earlier one by torch's guards, which check all tensors in one call.
A repeated GEMM costs two dictionary look-ups by address, this check and one call of the driver.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.gemm.launch_plan import LaunchPlan, make_tma_readable, plan_launch
from octile.kernels.cuda.gemm.request import GemmRequest
from octile.kernels.cuda.jit import specialize, tensor_map
from octile.kernels.cuda.jit.launch import loads_others_early, overlaps
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel

if TYPE_CHECKING:
    from octile.kernels.cuda.jit.driver import Kernel

Pointers = tuple[int, ...]  # addresses of a, b, their scales, sizes and out
MAX_KEYS = 8192  # some 6 kB each
MAX_REPEATED = 16384  # some 2 kB each


class RepeatedGemm(NamedTuple):
    """A GEMM that was launched before, for requests with the same addresses and options.

    Attributes:
        guards: compare the tensors of a request with those of the launch: types, dtypes, devices, shapes and strides.
        prepared: plan and kernel.
        shape: shape of the result.
        pointers: addresses of the launch; 0 for a result that each request allocates.
    """

    guards: TensorGuards
    prepared: "PreparedGemm"
    shape: tuple[int, ...]
    pointers: Pointers


class Workspace(NamedTuple):
    """Split-K partials and the counters of those that have arrived, with what each launch needs of these tensors."""

    partials: Tensor
    arrivals: Tensor
    n_partials: int
    n_arrivals: int
    addresses: tuple[int, int]


_prepared: "BoundedCache[tuple[PreparedGemm, tuple[int, ...]]]" = BoundedCache(MAX_KEYS)  # by key; the shape is out's
_repeated: BoundedCache[RepeatedGemm] = BoundedCache(MAX_REPEATED)  # by addresses, elements of a, and options
Workspaces = dict[tuple[int, int], Workspace]  # by GPU and stream
_workspaces: Workspaces = {}
_captured_workspaces: Workspaces | None = None  # those of one_workspace_in_capture


def launch_cached(request: GemmRequest) -> Tensor | None:
    """Launch a request whose key was launched before and return its result; None: there was none, nothing happens."""
    tensors = request.tensors()
    at = (*map(Tensor.data_ptr, tensors), request.a.data.numel(), _options(request))
    repeated = _repeated[at]
    if repeated is not None and repeated.guards.check(*tensors):
        _, prepared, shape, pointers = repeated
    else:
        key, pointers = launch_key(request)
        found = _prepared[key]
        if found is None:
            return None
        prepared, shape = found
        if len({*map(id, tensors)}) == len(tensors):  # guards refuse a tensor that is given twice
            _repeated[at] = RepeatedGemm(_guards(tensors), prepared, shape, pointers)
    out = request.out
    if out is None:
        out = request.a.data.new_empty(shape, dtype=request.out_dtype)
        pointers = (*pointers[:-1], out.data_ptr())
    if prepared.plan.partials:
        pointers = prepared.with_workspace(pointers, out)
    prepared.launch_at(pointers)()
    _count(request)
    return out


def _guards(tensors: list[Tensor]) -> TensorGuards:
    """Return torch's guards, whose `check` finds whether as many others are like these tensors."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def launch(request: GemmRequest) -> Tensor:
    """Launch a request that is checked and supported on the current stream of its GPU, and return its result."""
    out = request.output()
    if out.numel() == 0:
        return out
    if request.a.data.numel() == 0 or request.b.data.numel() == 0:  # K is empty
        return out if request.accumulate else out.masked_fill_(_written_rows(request, out), 0.0)
    sizes = None if request.sizes is None else request.sizes.contiguous()
    readable = make_tma_readable(replace(request, out=out, sizes=sizes))
    key, pointers = launch_key(readable)
    found = _prepared[key]
    if found is None:
        found = _prepared[key] = _prepare(readable), tuple(out.shape)
    prepared, _ = found
    prepared.launch_at(prepared.with_workspace(pointers, out))()
    _count(request)
    request_key, request_pointers = launch_key(request)
    if request_pointers[:-1] == pointers[:-1]:  # requests of this key need no copies
        _prepared[request_key] = found
    return out


def _count(request: GemmRequest) -> None:
    if num_sms.left_free:
        num_sms.count_launched(request.flops())


def launch_key(request: GemmRequest) -> tuple[Hashable, Pointers]:
    """Return what decides on a launch, and the addresses of its tensors: 0 where there is none.

    Also invalid requests have a key.
    """
    a, b, out, sizes = request.a, request.b, request.out, request.sizes
    a_data, a_scale, b_data, b_scale = a.data, a.scale, b.data, b.scale
    at_a, at_a_scale, at_b, at_b_scale = a_data.data_ptr(), a_scale.data_ptr(), b_data.data_ptr(), b_scale.data_ptr()
    out_key = sizes_key = None
    at_out = at_sizes = 0
    if out is not None:
        at_out = out.data_ptr()
        out_key = out.shape, out.stride(), out.dtype, at_out & 15, out.get_device()
    if sizes is not None:
        at_sizes = sizes.data_ptr()
        sizes_key = sizes.shape, sizes.stride(), sizes.dtype, sizes.get_device()
    key = (
        _options(request), out_key, sizes_key,
        a_data.shape, a_data.stride(), a_data.dtype, at_a & 15, a_data.get_device(),
        b_data.shape, b_data.stride(), b_data.dtype, at_b & 15, b_data.get_device(),
        a_scale.shape, a_scale.stride(), a_scale.dtype, at_a_scale & 15, a_scale.get_device(),
        b_scale.shape, b_scale.stride(), b_scale.dtype, at_b_scale & 15, b_scale.get_device(),
    )  # fmt: skip
    return key, (at_a, at_b, at_a_scale, at_b_scale, at_sizes, at_out)


def _options(request: GemmRequest) -> tuple[Hashable, ...]:
    """Return what decides on a launch besides the tensors."""
    return (
        request.schedule, request.out_dtype, request.accumulate, request.promote, request.zero_rest,
        request.expected_rows, request.alignment, request.row_invariant, tuple(request.a.block),
        tuple(request.b.block), num_sms.limit, num_sms.left_free, overlaps(), loads_others_early(),
    )  # fmt: skip


class PreparedGemm(PreparedKernel):
    """A launch plan and its kernel on one GPU."""

    def __init__(self, plan: LaunchPlan, kernel: "Kernel") -> None:
        config = plan.config
        super().__init__(
            kernel, plan.grid, config.cluster_size, config.threads, config.shared_bytes, config.programmatic
        )
        self.plan = plan

    def with_workspace(self, pointers: Pointers, out: Tensor) -> tuple[int, ...]:
        """Return the values of a launch: the addresses, and those of a workspace if the kernel needs one."""
        if not self.plan.partials:
            return pointers
        return *pointers, *_workspace(self.plan, out.device, self.kernel.current_stream())

    def arguments(self, values: tuple[int, ...]) -> list[Any]:
        """Return the kernel's arguments for the values of a launch."""
        *pointers, partials, arrivals = values if self.plan.partials else (*values, 0, 0)
        with self.kernel.in_context():
            return self.plan.arguments(pointers, partials, arrivals, tensor_map.encode)


@contextmanager
def one_workspace_in_capture() -> Iterator[None]:
    """Promise that what is captured inside is one CUDA graph, so that its GEMMs on a stream share a workspace.

    Their counters are then cleared once a replay, and not before each GEMM that needs them. The memory stays the
    graph's own; nothing refers to it after the end.
    """
    global _captured_workspaces
    outer, _captured_workspaces = _captured_workspaces, {}
    try:
        yield
    finally:
        _captured_workspaces = outer


def _prepare(request: GemmRequest) -> PreparedGemm:
    device = request.a.data.device
    plan = plan_launch(request, num_sms.chip(request.a.data.get_device()))
    return PreparedGemm(plan, specialize.load("gemm", plan.config.constants(), device, plan.config.headers()))


def _written_rows(request: GemmRequest, out: Tensor) -> Tensor:
    """Return which rows of out a request writes: bool, one for all rows or [T, 1]."""
    sizes = request.sizes
    if request.zero_rest or sizes is None:
        return torch.ones((), dtype=torch.bool, device=out.device)
    rows = sizes[-1] if len(sizes) else 0
    return torch.arange(out.shape[0], device=out.device)[:, None] < rows


def _workspace(plan: LaunchPlan, device: torch.device, stream: int) -> tuple[int, int]:
    """Return the addresses of split-K partials and of the counters of those that have arrived.

    GEMMs on one stream follow each other and share it. In a CUDA graph that is captured it comes from the graph's own
    memory and is cleared at every replay, which may run at the same time as whatever the stream does then. Each GEMM
    there has its own, unless they share it by `one_workspace_in_capture`.
    """
    workspaces: Workspaces = _workspaces
    if torch.cuda.is_current_stream_capturing():
        workspaces = {} if _captured_workspaces is None else _captured_workspaces
    found = workspaces.get((device.index, stream))
    if found is None or found.n_partials < plan.partials or found.n_arrivals < plan.arrivals:
        partials = torch.empty(plan.partials, dtype=torch.float32, device=device)
        arrivals = torch.zeros(plan.arrivals, dtype=torch.int32, device=device)
        addresses = partials.data_ptr(), arrivals.data_ptr()
        found = Workspace(partials, arrivals, plan.partials, plan.arrivals, addresses)
        workspaces[device.index, stream] = found
    return found.addresses
