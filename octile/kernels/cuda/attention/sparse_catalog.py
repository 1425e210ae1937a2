"""Catalog of the kernels of sparse attention and of the choice of keys that are compiled without a GPU."""

import torch

from octile.kernels.cuda.attention import sparse_mla, sparse_mla_backward, sparse_weights, top_keys
from octile.kernels.cuda.attention.mla_catalog import SMS, KernelPlan


def plans() -> dict[str, KernelPlan]:
    """Return the kernels of each case, by the name of the case."""
    found = {"sparse MLA, merge": KernelPlan("sparse_merge", {"shared_bytes": 0}, {})}
    for is_fp8, form in ((False, "BF16"), (True, "FP8")):
        for is_paged, source in ((False, "rows"), (True, "pages")):
            for heads in (64, 128):
                made = sparse_mla.plan(4096, heads, 2048, is_fp8, is_paged, 0, SMS)
                case = f"sparse MLA, {heads} heads, {form}, {source}"
                found[case] = KernelPlan(made.kernel, made.constants, made.headers)
                if is_fp8 and heads > sparse_mla.HEADS:
                    few = sparse_mla.plan(1, heads, 2048, is_fp8, is_paged, 0, SMS)
                    found[f"{case}, few steps"] = KernelPlan(few.kernel, few.constants, few.headers)
    backward, weights = sparse_mla_backward.plan(), sparse_weights.plan(8192, 128, SMS)
    found["sparse MLA, backward"] = KernelPlan("sparse_mla_backward", backward.constants, backward.headers)
    found["sparse MLA, backward, entries"] = KernelPlan("sparse_entries", {"shared_bytes": 0}, {})
    found["sparse MLA, backward, sums"] = KernelPlan("sparse_latent_gradient", backward.sum_constants, {})
    found["sparse MLA, weights"] = KernelPlan("sparse_weights", weights.constants, weights.headers)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows in (1, 4096):
            for k in (64, 2048, 4096):
                constants = top_keys.plan(rows, 65536, k, dtype, SMS)
                found[f"choice of {k} keys, {rows} rows, {dtype}"] = KernelPlan("top_keys", constants, {})
    return found
