"""Catalog of the kernels of decoding's attention that are compiled without a GPU."""

from collections.abc import Mapping
from typing import NamedTuple

from octile.kernels.cuda.attention import mla_decode
from octile.kernels.cuda.jit.launch import only_activations_are_new, overlapping_launches

SMS = 132
PART = 2048  # positions of a part, as `octile.ops.absorbed_attention` has it


class KernelPlan(NamedTuple):
    """A kernel, what it is specialized by, and its generated headers."""

    kernel: str
    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]


def plans() -> dict[str, KernelPlan]:
    """Return the kernels of each case, by the name of the case."""
    found = {}
    ranges = ((16, 1), (32, 1), (64, 1), (128, 1), (64, 4))  # heads, of so many rows of a text
    parts = ((16, 1), (64, 2), (64, 4), (128, 1))
    for part, division, cases in ((0, "even ranges", ranges), (PART, f"parts of {PART}", parts)):
        for is_fp8, form in ((False, "BF16"), (True, "FP8")):
            for heads, rows in cases:
                made = mla_decode.plan(128, heads, is_fp8, part, rows, SMS)
                shared = f", {rows} rows" if rows > 1 else ""
                case = f"MLA decode, {heads} heads{shared}, {form}, {division}"
                found[case] = KernelPlan(made.kernel, made.constants, made.headers)
            with overlapping_launches(), only_activations_are_new():
                made = mla_decode.plan(128, 16, is_fp8, part, 1, SMS)
            found[f"MLA decode, 16 heads, {form}, {division}, early"] = KernelPlan(
                made.kernel, made.constants, made.headers
            )
        found[f"MLA decode, merge, {division}"] = KernelPlan("mla_merge", made.merge_constants, {})
    return found
