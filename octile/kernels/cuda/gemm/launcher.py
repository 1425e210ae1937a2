"""Launches products: what follows from shapes, strides and dtypes is found once, and a launch at one place made once.

The second launch of a product with the same tensors is then two dictionary look-ups and one call of the driver.
"""

import torch
from torch import Tensor

from octile.kernels.bounded_cache import BoundedCache
from octile.kernels.cuda.gemm import launch_cache, num_sms
from octile.kernels.cuda.gemm.launch_cache import Look
from octile.kernels.cuda.gemm.launch_plan import GemmRequest, LaunchPlan, is_tma_readable, make_tma_readable, plan
from octile.kernels.cuda.gemm.problem import Chip
from octile.kernels.cuda.jit import specialize, tensor_map
from octile.kernels.cuda.jit.driver import Kernel, Launch, current_stream

MAX_SHAPES = 4096  # whose plans are kept, some 4 kB each
MAX_PLACES = 8192  # launches that are kept, some 2 kB each: steps of training allocate the same addresses again

_prepared: "BoundedCache[PreparedGemm]" = BoundedCache(MAX_SHAPES)
_launches: BoundedCache[Launch] = BoundedCache(MAX_PLACES)
_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def launch(p: GemmRequest, look: Look | None = None) -> None:
    """Makes a product, of which no side is empty, on the current stream of the operands' GPU.

    Args:
        look: what has been checked; products that look like it are then launched by `again.launched`.
    """
    sms, pointers = num_sms.num_sms(p.a.get_device()), p.pointers()
    key = (sms, *_decisive(p, pointers))
    if (prepared := _prepared.get(key)) is None:
        if not is_tma_readable(p):
            return launch(make_tma_readable(p))
        prepared = _prepared[key] = _prepare(p, Chip(sms))
    prepared(pointers, p.a.device)
    if look is not None and pointers[:-1] == look[1]:  # nothing is copied for products that look so
        launch_cache.remember(look, prepared, p.out)


def _decisive(p: GemmRequest, pointers: tuple[int, ...]) -> tuple[object, ...]:
    """All that a plan depends on, but the number of multiprocessors."""
    a, b, a_scale, b_scale, _, out = pointers
    return (
        p.a.get_device(),
        *(p.schedule, p.a_scales, p.b_scales, p.accumulate, p.promote, p.zero_rest, p.expected_rows),
        *(p.a.dtype, p.b.dtype, p.out.dtype),
        *(p.a.shape, p.b.shape),
        *(p.a.stride(), p.b.stride(), p.out.stride(), p.a_scale.stride(), p.b_scale.stride()),
        *(a & 15, b & 15, a_scale & 15, b_scale & 15, out & 15),
        0 if p.sizes is None else p.sizes.shape[0],
    )


class PreparedGemm:
    """A plan and its kernel on one GPU."""

    def __init__(self, plan: LaunchPlan, kernel: Kernel) -> None:
        self.plan, self.kernel, config = plan, kernel, plan.config
        self.shape = (plan.grid, config.cluster_size, config.threads, config.shared_bytes)

    def __call__(self, pointers: tuple[int, ...], device: torch.device) -> None:
        """Makes the product of the tensors at these addresses, in the order of `GemmRequest.pointers`."""
        stream = current_stream(self.kernel.device)
        workspace = _workspace(self.plan, device, stream) if self.plan.parts else (0, 0)
        key = (self, pointers, workspace, stream)
        launch = _launches.get(key)
        if launch is None:
            with self.kernel.in_context():
                arguments = self.plan.arguments(pointers, *workspace, tensor_map.encode)
            launch = _launches[key] = self.kernel.ready(*self.shape, arguments, stream)
        launch()


def _prepare(p: GemmRequest, chip: Chip) -> PreparedGemm:
    found = plan(p, chip)
    kernel = specialize.load("gemm", found.config.constants(), p.a.device, found.config.headers())
    return PreparedGemm(found, kernel)


def _workspace(plan: LaunchPlan, device: torch.device, stream: int) -> tuple[int, int]:
    """Addresses of room for the parts of a split product, and of the counts of those that are there.

    Products on one stream follow each other and share it. In a graph that is captured it comes from the graph's own
    memory, and is cleared at every replay, which may run beside whatever the stream does then.
    """
    if torch.cuda.is_current_stream_capturing():
        parts, arrivals = _new_workspace(plan, device)
        return parts.data_ptr(), arrivals.data_ptr()
    there = _workspaces.get((device.index, stream))
    if there is None or there[0].numel() < plan.parts or there[1].numel() < plan.arrivals:
        there = _workspaces[device.index, stream] = _new_workspace(plan, device)
    return there[0].data_ptr(), there[1].data_ptr()


def _new_workspace(plan: LaunchPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    parts = torch.empty(plan.parts, dtype=torch.float32, device=device)
    return parts, torch.zeros(plan.arrivals, dtype=torch.int32, device=device)
