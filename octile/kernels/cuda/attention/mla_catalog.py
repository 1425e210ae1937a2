"""Catalog of the kernels of decoding's attention that are compiled without a GPU."""

from collections.abc import Mapping
from typing import NamedTuple

from octile.kernels.cuda.attention import mla_decode

SMS = 132


class KernelPlan(NamedTuple):
    """A kernel, what it is specialized by, and its generated headers."""

    kernel: str
    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]


def plans() -> dict[str, KernelPlan]:
    """Return the kernels of each case, by the name of the case."""
    found = {}
    for n_splits, splits in ((0, "even splits"), (16, "16 splits")):
        for is_fp8, form in ((False, "BF16"), (True, "FP8")):
            for heads in (16, 32, 64, 128):
                made = mla_decode.plan(128, heads, is_fp8, n_splits, 1, SMS)
                case = f"MLA decode, {heads} heads, {form}, {splits}"
                found[case] = KernelPlan(made.kernel, made.constants, made.headers)
        found[f"MLA decode, merge, {splits}"] = KernelPlan("mla_merge", made.merge_constants, {})
    return found
