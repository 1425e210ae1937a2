"""The kinds of the kernels of a training step, by their names."""

import re

KINDS = {  # of a kernel by its name; the first that matches counts
    "FP8 GEMMs": r"^gemm$",
    "BF16 GEMMs": r"nvjet|cutlass|splitKreduce|bfloat16_terms|gate_backward_gemm|^gate$",
    "attention": r"sdpa|convert_dq|dot_do_o",
    "loss": r"cross_entropy",
    "optimizer": r"adamw|gradient_squares|gradient_norms|multi_tensor|^matrices",  # and weights
    "routing": r"permute|gather_kernel<16, int|scatter_gather|count_|place_|find_|choose_|balance|sum_blocks|gate_",
    "quantization and norms": r"^blocks|^tiles|^dequantize|rms_norm|swiglu|rotate|latent_keys|reduce_kernel|partial_",
    "elementwise": r"CUDAFunctor_add|vectorized_gather_kernel|elementwise_kernel|compute_grad_weight|sum_and_scatter",
}


def kind_of(name: str) -> str:
    """The kind of a kernel; `others` if it has none of these."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "others")
