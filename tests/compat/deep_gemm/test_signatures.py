"""Names, order and defaults of arguments are DeepGEMM 2.6.1's, and the page says them."""

import inspect
import re
from pathlib import Path

import pytest

import octile.compat.deep_gemm as deep_gemm

PAGE = Path(__file__).parents[3] / "docs" / "deep_gemm.md"
RECIPES = "recipe=None, recipe_a=None, recipe_b=None"
OF_FP8 = f"(a, b, d, c=None, {RECIPES}, compiled_dims='{{}}', disable_ue8m0_cast=False)"
OF_ROWS = f"(a, b, d, grouped_layout, {RECIPES}, compiled_dims='nk', disable_ue8m0_cast=False, use_psum_layout=False"
OF_K = "(a, b, d, ks_cpu, grouped_layout, c=None, {}compiled_dims='mn', use_psum_layout=False)"
OF_BF16_ROWS = "(a, b, d, grouped_layout, compiled_dims='nk', use_psum_layout=False, ensure_zero_padding=True"
LAST = ", expected_m_for_psum_layout=None)"
OF_LOGITS = "(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0{})"
OF_PAGES = (
    "(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False{}, "
    "indices=None)"
)
SIGNATURES = {
    "fp8_gemm_nt": OF_FP8.format("nk"),
    "fp8_gemm_nn": OF_FP8.format("nk"),
    "fp8_gemm_nt_skip_head_mid": "(a, b, d, head_splits, recipe=None, compiled_dims='nk', disable_ue8m0_cast=False)",
    "einsum": "(expr, a, b, d, c=None, use_cublaslt=False)",
    "fp8_einsum": "(expr, a, b, d, c=None, recipe=(1, 128, 128))",
    "fp8_gemm_tn": OF_FP8.format("mn"),
    "fp8_gemm_tt": OF_FP8.format("mn"),
    "m_grouped_fp8_gemm_nt_contiguous": f"{OF_ROWS}, ensure_zero_padding=True{LAST}",
    "m_grouped_fp8_gemm_nn_contiguous": f"{OF_ROWS}, ensure_zero_padding=True)",
    "m_grouped_fp8_gemm_nt_masked": (
        f"(a, b, d, masked_m, expected_m, {RECIPES}, compiled_dims='nk', disable_ue8m0_cast=False)"
    ),
    "k_grouped_fp8_gemm_tn_contiguous": OF_K.format("recipe=(1, 1, 128), "),
    "k_grouped_fp8_gemm_nt_contiguous": OF_K.format("recipe=(1, 1, 128), "),
    "bf16_gemm_nt": "(a, b, d, c=None, compiled_dims='nk')",
    "bf16_gemm_nn": "(a, b, d, c=None, compiled_dims='nk')",
    "bf16_gemm_tn": "(a, b, d, c=None, compiled_dims='mn')",
    "bf16_gemm_tt": "(a, b, d, c=None, compiled_dims='mn')",
    "m_grouped_bf16_gemm_nt_contiguous": OF_BF16_ROWS + LAST,
    "m_grouped_bf16_gemm_nn_contiguous": OF_BF16_ROWS + ")",
    "m_grouped_bf16_gemm_nt_masked": "(a, b, d, masked_m, expected_m, compiled_dims='nk')",
    "k_grouped_bf16_gemm_tn_contiguous": OF_K.format(""),
    **{f"cublaslt_gemm_{form}": "(a, b, d, c=None)" for form in ("nt", "nn", "tn", "tt")},
    "transform_sf_into_required_layout": (
        "(sf, mn, k, recipe, num_groups=None, is_sfa=None, disable_ue8m0_cast=False, psum_layout=None)"
    ),
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "(sf, psum_layout=None)",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor": (
        "(sf, grouped_layout, ks_cpu, gran_k, k_alignment, use_psum_layout=False)"
    ),
    "get_theoretical_mk_alignment_for_contiguous_layout": "(expected_m=None)",
    "fp8_fp4_mqa_logits": OF_LOGITS.format(", logits_dtype=torch.float32"),
    "fp8_mqa_logits": OF_LOGITS.format(""),
    "fp8_fp4_paged_mqa_logits": OF_PAGES.format(", logits_dtype=torch.float32"),
    "fp8_paged_mqa_logits": OF_PAGES.format(""),
    "get_paged_mqa_logits_metadata": "(context_lens, block_kv, num_sms, indices=None)",
    "get_mk_alignment_for_contiguous_layout": "()",
    "get_num_sms": "()",
    "get_pdl": "()",
    "get_tc_util": "()",
}


def signature(name: str) -> str:
    found = inspect.signature(getattr(deep_gemm, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(inspect.Signature(bare))


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_are_deep_gemms(name: str):
    assert signature(name) == SIGNATURES[name]


@pytest.mark.parametrize("name", ["per_token_cast_to_fp8", "per_channel_cast_to_fp8", "per_block_cast_to_fp8"])
def test_casts_take_what_deep_gemms_do(name: str):
    names = [*inspect.signature(getattr(deep_gemm.utils, name)).parameters]
    assert names == ["x", "use_ue8m0", "gran_k", *["use_packed_ue8m0"] * (name == "per_token_cast_to_fp8")]


PAGE_ROWS = re.findall(r"^\| `(\w[^`]*)` \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
CALLED = [first for first, _ in PAGE_ROWS if "(a, " in first]
LEFT_OUT = [(first, rest.strip("`")) for first, rest in PAGE_ROWS if "compiled_dims" in rest]


def without_dims(signature: str) -> str:
    return re.sub("compiled_dims='..'", "compiled_dims", signature)


@pytest.mark.parametrize("call", CALLED)
def test_the_page_calls_functions_as_they_are(call: str):
    name, arguments = call.rstrip(")").split("(")
    assert SIGNATURES[name].startswith("(" + arguments.removesuffix(", c"))


@pytest.mark.parametrize(("names", "arguments"), LEFT_OUT)
def test_the_page_names_what_may_be_left_out(names: str, arguments: str):
    functions = [name for name in SIGNATURES if re.fullmatch(names.replace("*", "[nt][nt]"), name)]
    assert functions
    assert all(without_dims(SIGNATURES[name]).endswith(f", {arguments})") for name in functions)
