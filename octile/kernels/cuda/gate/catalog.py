"""Catalog of the gate's kernels: those of training that are compiled without a GPU."""

from functools import partial

import torch

from octile.kernels.cuda.gate import backward_launcher, few_rows, launcher
from octile.kernels.cuda.jit.mapped import MappedLaunch
from octile.kernels.terms import TERMS


def plans() -> dict[str, MappedLaunch]:
    """Return the launch of each case, by the name of the case."""
    empty = partial(torch.empty, device="meta")
    bf16, fp32 = torch.bfloat16, torch.float32
    x_few, x_many = empty(32768, 768, dtype=bf16), empty(32768, 2048, dtype=bf16)
    dys = empty(32768, TERMS * 64, dtype=bf16)
    few, many = empty(16, 768, dtype=fp32), empty(64, 2048, dtype=fp32)
    v3 = few_rows.plan(256, 7168, 256, fp32, (8, 8, 4, 2, "sigmoid", True, 2.5), True)
    v2_lite = few_rows.plan(32, 2048, 64, bf16, (6, 1, 1, 1, "softmax", False, 1.0), False)
    v3_exact = few_rows.plan(256, 7168, 256, bf16, (8, 8, 4, 2, "sigmoid", True, 2.5), True, True)
    v2_lite_exact = few_rows.plan(32, 2048, 64, bf16, (6, 1, 1, 1, "softmax", False, 1.0), False, True)
    threads = 32 * few_rows.WARPS
    return {
        "gate of V3, few rows": MappedLaunch("gate_few_rows", v3, {}, few_rows.grid(256), threads, ()),
        "gate of V2-Lite, few rows, BF16": MappedLaunch("gate_few_rows", v2_lite, {}, few_rows.grid(32), threads, ()),
        "gate of V3, few rows, exact": MappedLaunch("gate_few_rows", v3_exact, {}, few_rows.grid(256), threads, ()),
        "gate of V2-Lite, few rows, exact": MappedLaunch(
            "gate_few_rows", v2_lite_exact, {}, few_rows.grid(32), threads, ()
        ),
        "gate of 16 experts in groups": launcher.plan(x_few, few, 4, 4, 2, 2, False, True, True),
        "gate of 64 experts": launcher.plan(x_many, many, 6, 1, 1, 1, False, True, True),
        "gate of 64 experts, softmax": launcher.plan(x_many, many, 6, 1, 1, 1, True, False, False),
        "gate of 64 experts, BF16": launcher.plan(x_many, many.to(bf16), 6, 1, 1, 1, False, True, True),
        "gradients of a gate of 64 experts": backward_launcher.plan(dys, x_many, many, 132).launch,
        "gradients of a gate of 64 experts, BF16": backward_launcher.plan(dys, x_many, many.to(bf16), 132).launch,
    }
