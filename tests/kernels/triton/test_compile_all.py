"""Every kernel compiles for every generation of GPUs, and fits into its registers and shared memory.

Compilation runs in other processes, since Triton interprets in this one.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from octile.kernels.triton.compile_all import ARCHITECTURES, CompiledTritonKernel, compile_all

CHECKED = ("sm_80", "sm_89", "sm_90")


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[CompiledTritonKernel]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            return dict(zip(CHECKED, pool.map(compile_all, CHECKED), strict=True))


@pytest.mark.parametrize("architecture", CHECKED)
def test_nothing_spills(compiled: dict[str, list[CompiledTritonKernel]], architecture: str):
    assert [c for c in compiled[architecture] if c.stack_bytes] == []


@pytest.mark.parametrize("architecture", CHECKED)
def test_shared_memory_suffices(compiled: dict[str, list[CompiledTritonKernel]], architecture: str):
    available = ARCHITECTURES[architecture].shared_bytes
    assert [c for c in compiled[architecture] if c.shared_bytes > available] == []


def test_all_kernels_are_compiled(compiled: dict[str, list[CompiledTritonKernel]]):
    kernels = {
        "quantize_blocks",
        "peer_barrier",
        "send_experts",
        "local_experts",
        "exchange_rows",
        "send_results",
        "gather_rows",
        "send_tokens",
        "sort_tokens",
        "return_results",
        "sum_results",
        "block_amax",
        "quantize_large_block",
        "quantize_with_scale",
        "quantize_rows_and_columns",
        "requantize",
        "quantize_and_transpose",
        "swiglu",
        "swiglu_backward",
        "swiglu_transposed",
        "swiglu_high_precision",
        "swiglu_high_precision_backward",
        "text_rows",
        "continued_tokens",
        "accepted_rows",
        "record_choices",
        "rms_norm",
        "rms_norm_backward",
        "rms_norm_high_precision",
        "write_values",
        "row_maxima",
        "best_of_parts",
        "best_of_rows",
        "write_fp8",
        "write_and_rotate",
        "attend_pages",
        "attend_texts",
        "merge_splits",
        "matmul_nt",
        "adamw",
        "cross_entropy",
        "cross_entropy_backward",
        "gradient_squares",
        "gradient_norms",
        "rotate",
        "rotate_halves",
        "rotate_and_quantize",
        "latent_keys",
        "latent_keys_backward",
        "align_groups",
        "find_tokens",
        "permute",
        "unpermute",
        "unpermute_backward",
        "balance_parts",
        "balance_of_sequences",
        "balance_backward",
        "choose_experts",
        "gate_backward",
        "multiply_and_choose",
        "gate_backward_gemms",
        "partial_sums",
        "bfloat16_terms",
        "count_tokens",
        "count_blocks",
        "sum_blocks",
        "place_rows",
        "dequantize",
        "copy",
        "matmul",
        "grouped",
        "high_precision_nt",
        "high_precision_tn",
        "zero_past_groups",
        "masked",
        "wgrad",
        "tensor_core",
    }
    assert {c.kernel for c in compiled["sm_90"]} == kernels


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="not 'sm_75'"):
        compile_all("sm_75")
