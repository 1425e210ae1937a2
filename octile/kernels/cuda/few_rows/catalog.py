"""Catalog of the kernels of few rows that are compiled without a GPU: those of DeepSeek-V2-Lite."""

import torch

from octile.kernels.cuda.attention.mla_catalog import SMS, KernelPlan
from octile.kernels.cuda.few_rows import attention, launcher, mixture

FP32, BF16 = torch.float32, torch.bfloat16


def plans() -> dict[str, KernelPlan]:
    """Return the kernels of each case, by the name of the case."""
    found = {"attention of few rows": KernelPlan("mla_few_rows", attention.plan_attention(), {})}
    for rows in (1, 8):
        kernels = {
            "normalized product": ("few_rows_nt", launcher.plan(rows, 2048, FP32, False, False)),
            "product and residual": ("few_rows_nt", launcher.plan(rows, 2048, None, True, True)),
            "product, long rows": ("few_rows_nt", launcher.plan(rows, 10944, None, False, False)),
            "queries, BF16": ("latent_queries", attention.plan_queries(rows, 512, 128, 64, False, FP32)),
            "queries, FP8": ("latent_queries", attention.plan_queries(rows, 512, 128, 64, True, BF16)),
            "merge and values": ("merge_values", attention.plan_merge(rows, 128)),
        }
        found |= {f"few rows: {case}, {rows}": KernelPlan(*arguments, {}) for case, arguments in kernels.items()}
        made = mixture.plan(
            rows, 2048, 1408, 2816, 64, FP32, BF16, (6, 1, 1, 1, "softmax", False, 1.0), False, False, SMS
        )
        found |= {f"few rows: {plan.kernel}, {rows}": KernelPlan(plan.kernel, plan.constants, {}) for plan in made}
    return found
