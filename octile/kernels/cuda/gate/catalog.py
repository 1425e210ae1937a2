"""Catalog of the gate's kernels: those of training that are compiled without a GPU."""

from functools import partial

import torch

from octile.kernels.cuda.gate import backward_launcher, launcher
from octile.kernels.cuda.gate.launcher import LaunchPlan
from octile.kernels.terms import TERMS


def plans() -> dict[str, LaunchPlan]:
    """Return the launch of each case, by the name of the case."""
    empty = partial(torch.empty, device="meta")
    bf16, fp32 = torch.bfloat16, torch.float32
    x_few, x_many = empty(32768, 768, dtype=bf16), empty(32768, 2048, dtype=bf16)
    dys = empty(32768, TERMS * 64, dtype=bf16)
    few, many = empty(16, 768, dtype=fp32), empty(64, 2048, dtype=fp32)
    return {
        "gate of 16 experts in groups": launcher.plan(x_few, few, 4, 4, 2, 2, False, True, True),
        "gate of 64 experts": launcher.plan(x_many, many, 6, 1, 1, 1, False, True, True),
        "gate of 64 experts, softmax": launcher.plan(x_many, many, 6, 1, 1, 1, True, False, False),
        "gate of 64 experts, BF16": launcher.plan(x_many, many.to(bf16), 6, 1, 1, 1, False, True, True),
        "gradients of a gate of 64 experts": backward_launcher.plan(dys, x_many, many, 132).launch,
        "gradients of a gate of 64 experts, BF16": backward_launcher.plan(dys, x_many, many.to(bf16), 132).launch,
    }
