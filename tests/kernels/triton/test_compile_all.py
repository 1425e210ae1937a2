"""Every kernel compiles for Hopper, and in all its forms for every generation of GPUs, and fits into its memory.

Compilation runs in another process, since Triton interprets in this one.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from octile.kernels.triton.compile_all import ARCHITECTURES, CompiledTritonKernel, compile_all

Compiled = tuple[str, list[CompiledTritonKernel]]
EXHAUSTIVE = pytest.mark.exhaustive  # LLVM takes minutes; the tests of each kernel run it in the interpreter


@pytest.fixture(scope="module", params=[pytest.param(name, marks=EXHAUSTIVE) for name in ("sm_80", "sm_89", "sm_90")])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return request.param, pool.submit(compile_all, request.param).result()


def test_nothing_spills(compiled: Compiled):
    assert [c for c in compiled[1] if c.stack_bytes] == []


def test_shared_memory_suffices(compiled: Compiled):
    available = ARCHITECTURES[compiled[0]].shared_bytes
    assert [c for c in compiled[1] if c.shared_bytes > available] == []


def test_all_kernels_are_compiled(compiled: Compiled):
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
        "count_weights",
        "list_tokens",
        "find_borders",
        "best_of_parts",
        "best_of_rows",
        "write_fp8",
        "write_and_rotate",
        "attend_pages",
        "attend_texts",
        "output_products",
        "key_gradients",
        "query_gradients",
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
        "add_parts",
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
    architecture, found = compiled[0], {c.kernel for c in compiled[1]}
    if architecture == "sm_90":
        kernels |= {"multiply_heads", "multiply_and_quantize"}
    assert found == kernels if ARCHITECTURES[architecture].fp8 else found < kernels


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ValueError, match="not 'sm_75'"):
        compile_all("sm_75")
