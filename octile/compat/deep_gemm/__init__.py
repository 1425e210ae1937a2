"""DeepGEMM's functions, layouts and settings over octile's operators: `import octile.compat.deep_gemm as deep_gemm`.

Signatures are those of DeepGEMM 2.6.1 (github.com/deepseek-ai/DeepGEMM): operands are pairs (data, scale), the result
is written to `d`, and `c`, which may be d itself, is added to it.  `docs/deep_gemm.md` has the table of layouts and the
differences: any sizes are supported, wrong arguments raise TypeError or ValueError, and GEMMs also run on a CPU.

    dense           FP8 GEMMs d = a · bᵀ and their transposed forms
    grouped         FP8 GEMMs of rows sorted by expert, or masked
    k_grouped       FP8 weight gradients of all experts
    bf16            the same GEMMs in BF16, by cuBLASLt
    einstein_sums   batches of GEMMs in FP8 and BF16
    attention       logits of the lightning indexer, of contiguous keys and of pages
    layout          layouts of scales
    settings        number of SMs, alignment of groups
    utils           `deep_gemm.utils`: quantization in `math`, scales in `layout`
    testing         `deep_gemm.testing`: the difference of two results

`compiled_dims` and the expected sizes are hints for DeepGEMM's compiler and tile choice. octile uses `expected_m` of
masked GEMMs; the others are accepted and have no effect.
"""

from octile.compat.deep_gemm import testing, utils
from octile.compat.deep_gemm.attention import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
)
from octile.compat.deep_gemm.bf16 import (
    bf16_gemm_nn,
    bf16_gemm_nt,
    bf16_gemm_tn,
    bf16_gemm_tt,
    cublaslt_gemm_nn,
    cublaslt_gemm_nt,
    cublaslt_gemm_tn,
    cublaslt_gemm_tt,
    k_grouped_bf16_gemm_tn_contiguous,
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
)
from octile.compat.deep_gemm.dense import (
    fp8_gemm_nn,
    fp8_gemm_nt,
    fp8_gemm_nt_skip_head_mid,
    fp8_gemm_tn,
    fp8_gemm_tt,
)
from octile.compat.deep_gemm.einstein_sums import einsum, fp8_einsum
from octile.compat.deep_gemm.grouped import (
    m_grouped_fp8_gemm_nn_contiguous,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from octile.compat.deep_gemm.k_grouped import k_grouped_fp8_gemm_nt_contiguous, k_grouped_fp8_gemm_tn_contiguous
from octile.compat.deep_gemm.layout import (
    get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_packed_ue8m0_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
    transform_sf_into_required_layout,
)
from octile.compat.deep_gemm.settings import (
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_num_sms,
    get_pdl,
    get_tc_util,
    get_theoretical_mk_alignment_for_contiguous_layout,
    set_mk_alignment_for_contiguous_layout,
    set_num_sms,
    set_pdl,
    set_tc_util,
)
from octile.compat.deep_gemm.stand_in import install
from octile.compat.deep_gemm.utils.math import (
    align,
    ceil_div,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_token_cast_to_fp8,
)

__version__ = "2.6.1"  # of DeepGEMM, whose functions these are; code that imports it asks for the version

# DeepGEMM has several names for these functions
fp8_fp4_gemm_nt, fp8_fp4_gemm_nn, fp8_fp4_gemm_tn, fp8_fp4_gemm_tt = fp8_gemm_nt, fp8_gemm_nn, fp8_gemm_tn, fp8_gemm_tt
m_grouped_fp8_fp4_gemm_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_fp8_fp4_gemm_nn_contiguous = m_grouped_fp8_gemm_nn_contiguous
m_grouped_fp8_fp4_gemm_nt_masked = fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked

# What DeepGEMM 2 has for the names of DeepGEMM 1. Arguments have other names, too, so these are no second names.
_NAMES_NOW = {
    "gemm_fp8_fp8_bf16_nt": "fp8_gemm_nt",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous": "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked": "m_grouped_fp8_gemm_nt_masked",
    "wgrad_gemm_fp8_fp8_fp32_nt": "fp8_gemm_nt, with c=d and recipe=(1, 1, 128)",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt": "k_grouped_fp8_gemm_nt_contiguous, with c=d",
    "get_col_major_tma_aligned_tensor": "get_mn_major_tma_aligned_tensor",
    "cell_div": "ceil_div",
    "calc_diff": "testing.calc_diff",
}

__all__ = [
    "__version__",
    "align",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "bf16_m_grouped_gemm_nt_masked",
    "ceil_div",
    "cublaslt_gemm_nn",
    "cublaslt_gemm_nt",
    "cublaslt_gemm_tn",
    "cublaslt_gemm_tt",
    "einsum",
    "fp8_einsum",
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_nt_skip_head_mid",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_k_alignment_for_contiguous_layout",
    "get_k_grouped_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
    "get_pdl",
    "get_tc_util",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "install",
    "k_grouped_bf16_gemm_tn_contiguous",
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_token_cast_to_fp8",
    "set_mk_alignment_for_contiguous_layout",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "testing",
    "transform_sf_into_required_layout",
    "utils",
]


def __getattr__(name: str) -> object:
    if name in _NAMES_NOW:
        raise AttributeError(f"deep_gemm has no {name}, a name of DeepGEMM 1: DeepGEMM 2 has {_NAMES_NOW[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
