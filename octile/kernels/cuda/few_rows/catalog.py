"""Catalog of the kernels of few rows that are compiled without a GPU: those of DeepSeek-V2-Lite."""

import torch

from octile.kernels.cuda.attention.mla_catalog import SMS, KernelPlan
from octile.kernels.cuda.few_rows import attention, launcher, mixture
from octile.kernels.cuda.gate import choice

FP32, BF16 = torch.float32, torch.bfloat16
SIZES = 2048, 1408, 2816, 64  # columns, those of an expert and of the shared experts, and experts
CHOICE = 6, 1, 1, 1, "softmax", False, 1.0


def plans() -> dict[str, KernelPlan]:
    """Return the kernels of each case, by the name of the case."""
    found = {
        "attention of few rows": KernelPlan("mla_few_rows", attention.plan_attention(), {}),
        "attention of one row, exact": KernelPlan("mla_one_row", attention.plan_one_row(), {}),
        "merge and values of one row, exact": KernelPlan("values_one_row", attention.plan_values(128), {}),
    }
    for rows in (1, 8):
        kernels = {
            "normalized product": ("few_rows_nt", launcher.plan(rows, 2048, FP32, False, False)),
            "product and residual": ("few_rows_nt", launcher.plan(rows, 2048, None, True, True)),
            "product, long rows": ("few_rows_nt", launcher.plan(rows, 10944, None, False, False)),
            "queries, BF16": ("latent_queries", attention.plan_queries(rows, 512, 128, 64, False, FP32)),
            "queries, FP8": ("latent_queries", attention.plan_queries(rows, 512, 128, 64, True, BF16)),
            "merge and values": ("merge_values", attention.plan_merge(rows, 128)),
        }
        found |= {
            f"few rows: {case}, {rows}": KernelPlan(*arguments, launcher.HEADERS) for case, arguments in kernels.items()
        }
        made = mixture.plan(rows, *SIZES, FP32, BF16, CHOICE, False, False, SMS)
        found |= {f"few rows: {plan.kernel}, {rows}": _planned(plan) for plan in made}
    made = mixture.plan(1, *SIZES, BF16, BF16, CHOICE, False, False, SMS, True)
    found |= {f"one row: {plan.kernel}": _planned(plan) for plan in made}
    products = {"normalized product": (FP32, False, False), "product and residual": (None, True, True)}
    found["choice of experts"] = KernelPlan("choose_experts", choice.plan(64, 64, CHOICE, False), {})
    for case, arguments in products.items():
        found[f"one row: {case}"] = KernelPlan("one_row_nt", launcher.plan(1, 2048, *arguments, True), launcher.HEADERS)
    return found


def _planned(plan: mixture.Plan) -> KernelPlan:
    return KernelPlan(plan.kernel, plan.constants, launcher.HEADERS)
