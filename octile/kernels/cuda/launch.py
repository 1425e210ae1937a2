"""Launches products: what follows from shapes, strides and dtypes is found once, a further call fills in addresses."""

import torch
from torch import Tensor

from octile.kernels.cuda import jit, limits, tensor_map
from octile.kernels.cuda.driver import Kernel, current_stream
from octile.kernels.cuda.plan import Plan, Product, is_readable, plan, readable
from octile.kernels.cuda.problem import Chip

MOST_SHAPES = 4096  # whose plans are kept, some 4 kB each

_prepared: dict[tuple[object, ...], "Prepared"] = {}
_workspaces: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def launch(p: Product) -> None:
    """Makes a product, of which no side is empty, on the current stream of the operands' GPU."""
    device = p.a.get_device()
    sms = limits.num_sms(device)
    pointers = p.pointers()
    key = (device, sms, p.schedule, p.accumulate, p.promote, p.zero_rest, *_layout(p, pointers))
    if (prepared := _prepared.get(key)) is None:
        if not is_readable(p):
            return launch(readable(p))
        if len(_prepared) >= MOST_SHAPES:  # a mixture's number of tokens may change at every step
            _prepared.clear()
        prepared = _prepared[key] = _prepare(p, Chip(sms))
    prepared(pointers, p.a.device)


def _layout(p: Product, pointers: tuple[int, ...]) -> tuple[object, ...]:
    """All that a plan depends on, of the tensors."""
    a, b, a_scale, b_scale, out, _ = pointers
    return (
        (a | b | a_scale | b_scale) & 15,
        out & 15,
        p.a_scales,
        p.b_scales,
        *(p.a.dtype, p.b.dtype, p.out.dtype),
        *(p.a.shape, p.b.shape),
        *(p.a.stride(), p.b.stride(), p.out.stride(), p.a_scale.stride(), p.b_scale.stride()),
        0 if p.sizes is None else p.sizes.shape[0],
    )


class Prepared:
    """A plan and its kernel on one GPU."""

    def __init__(self, plan: Plan, kernel: Kernel) -> None:
        self.plan, self.kernel, config = plan, kernel, plan.config
        self.shape = (plan.grid, config.cluster, config.threads, config.shared_bytes)

    def __call__(self, pointers: tuple[int, ...], device: torch.device) -> None:
        stream = current_stream(self.kernel.device)
        parts, arrivals = _workspace(self.plan, device, stream) if self.plan.parts else (0, 0)
        arguments = self.plan.arguments(pointers, parts, arrivals, tensor_map.encode)
        self.kernel.launch(*self.shape, arguments, stream)


def _prepare(p: Product, chip: Chip) -> Prepared:
    found = plan(p, chip)
    kernel = jit.load("product", found.config.constants(), p.a.device, found.config.headers())
    return Prepared(found, kernel)


def _workspace(plan: Plan, device: torch.device, stream: int) -> tuple[int, int]:
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


def _new_workspace(plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
    parts = torch.empty(plan.parts, dtype=torch.float32, device=device)
    return parts, torch.zeros(plan.arrivals, dtype=torch.int32, device=device)
