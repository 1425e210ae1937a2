"""Catalog of the routing kernels that are compiled without a GPU: those of training, and of a decode step.

The launcher is called with tensors on the meta device; its launches are recorded and not started.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.cuda.quantize.catalog import Launched
from octile.kernels.cuda.routing import launcher


def launches() -> dict[str, Launched]:
    """Return the launch of each case, by the name of the case."""
    empty = partial(torch.empty, device="meta")
    found = {}
    for n_experts, k in ((16, 4), (64, 6), (256, 8)):
        experts, load = empty(32768, k, dtype=torch.int64), empty(n_experts, dtype=torch.int64)
        with _recorded_launches() as recorded:
            launcher.count_tokens(experts, n_experts, 1)
            launcher.routing_plan(experts, load)
            for t in (32, 128, 256):
                launcher.weighted_routing_plan(experts[:t], empty(t, k), n_experts)
                with overlapping_launches():
                    launcher.weighted_routing_plan(experts[:t], empty(t, k), n_experts)
            launcher.sequence_balance(empty(32768, n_experts), None, k, 8, "sigmoid")
        for i, launched in enumerate(recorded):
            found[f"routing of {n_experts} experts, {i}: {launched.name}"] = launched
    return found


@contextmanager
def _recorded_launches() -> Iterator[list[Launched]]:
    recorded: list[Launched] = []

    def record(name: str, constants: Mapping[str, int | bool], *others: Any) -> None:
        recorded.append(Launched(name, constants, others[3]))

    launch, multiprocessors = launcher._launch, num_sms.multiprocessors
    launcher._launch, num_sms.multiprocessors = record, lambda device: 132  # type: ignore[assignment]
    try:
        yield recorded
    finally:
        launcher._launch, num_sms.multiprocessors = launch, multiprocessors
