"""Backends on a GPU: which kernels each operator uses, and why.

GEMMs, quantizations, the choice and routing of experts, and attention over the paged latent cache have two backends:
kernels for Hopper in CUDA C++, and Triton kernels for every GPU from sm_80. `TABLE` names both, with a function that
returns why Hopper's do not support a call; `run` calls the first that supports it. All other operators have one backend
(`ONLY_TRITON`, `ONLY_TORCH`). `octile doctor` prints `choices`.

The arguments of `run` are already checked. GEMMs take a `GemmRequest`; others take the arguments of
the operators of the same names, quantizations with dtypes instead of formats. Triton is imported
at the first call that needs it, since a machine without a GPU does not have it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.kernels import cpu, flash_attn_4
from octile.kernels.cuda.attention import mla_decode
from octile.kernels.cuda.gate import backward_launcher as gate_backward_launcher
from octile.kernels.cuda.gate import choice
from octile.kernels.cuda.gate import few_rows as gate_few_rows
from octile.kernels.cuda.gate import launcher as gate_launcher
from octile.kernels.cuda.gemm import launch_cache, request
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, why_unsupported
from octile.kernels.cuda.quantize import launcher
from octile.kernels.cuda.routing import launcher as routing_launcher


class Backends(NamedTuple):
    """The kernels of an operator.

    Attributes:
        why_not_hopper: returns why Hopper's kernels do not support a call; None: they do.
        hopper, triton: run the call. All three functions take the same arguments.
    """

    why_not_hopper: Callable[..., str | None]
    hopper: Callable[..., Any]
    triton: Callable[..., Any]


def run(operator: str, *args: Any) -> Any:
    """Run an operator of `TABLE` with Hopper's kernels if they support the call, else with Triton's.

    Raises:
        ValueError: neither support the call.
    """
    backends = TABLE[operator]
    return backends.hopper(*args) if has_hopper_kernel(operator, *args) else backends.triton(*args)


def has_hopper_kernel(operator: str, *args: Any) -> bool:
    """Return whether `run` takes Hopper's kernels for a call."""
    return TABLE[operator].why_not_hopper(*args) is None


def _triton(module: str, function: str) -> Callable[..., Any]:
    return lambda *args: getattr(import_module(f"octile.kernels.triton.{module}"), function)(*args)


def _triton_gemm(gemm: GemmRequest) -> Tensor:
    from octile.kernels.triton import grouped, matmul

    if not gemm.promote:
        raise ValueError(f"only Hopper's kernels sum without promotion: {why_unsupported(gemm)}")
    launch = {
        Schedule.DENSE: matmul.launch,
        Schedule.GROUPED: grouped.launch,
        Schedule.MASKED: grouped.launch_masked,
        Schedule.ALONG_K: grouped.launch_wgrad,
    }[gemm.schedule]
    if gemm.accumulate and gemm.row_invariant:  # which rounds twice, and Triton's kernel once
        assert gemm.out is not None
        return gemm.out.add_(launch(replace(gemm, out=None, accumulate=False)))
    return launch(gemm)


def _why_not_quantize(x: Tensor, block_rows: int, block_cols: int, dtype: torch.dtype, *_: bool) -> str | None:
    supported = (TILE,) if dtype == torch.uint8 else (TILE, COLUMN_TILE, BLOCK)
    if (block_rows, block_cols) not in supported:
        return f"they do not quantize blocks of {block_rows}×{block_cols} to {dtype}"
    return launcher.why_unsupported(x, out=dtype)


def _why_not_dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int, *_: torch.dtype) -> str | None:
    is_per_tensor = block_rows >= data.shape[-2] and block_cols >= launcher.columns(data)
    if (block_rows, block_cols) not in (TILE, COLUMN_TILE, BLOCK) and not is_per_tensor:
        return f"they do not dequantize blocks of {block_rows}×{block_cols}"
    if not data.is_contiguous() or not launcher.reads_scale(scale, block_cols):
        return "the data or the scales are not contiguous"
    return launcher.why_unsupported(data)


def _why_not_requantize(data: Tensor, scale: Tensor, *others: Any) -> str | None:
    rows = others[-3]
    if not launcher.reads_tile_scales(scale) or (rows is not None and not rows.is_contiguous()):
        return "the scales or the row indices are not contiguous"
    return launcher.why_unsupported(data)


def _why_not_rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, power_of_2: bool, values: bool
) -> str | None:
    narrow = launcher.NARROW_ROWS_WITH_VALUES if values else launcher.NARROW_ROWS
    if x.shape[1] <= narrow:
        return f"Triton's kernel is faster for rows of at most {narrow} columns"
    if x.shape[1] > launcher.MAX_COLUMNS or not launcher.is_vector(weight):
        return f"rows have more than {launcher.MAX_COLUMNS} columns, or the weight is not contiguous"
    return launcher.why_unsupported(x)


def _why_not_high_precision_rms_norm(x: Tensor, weight: Tensor, eps: float) -> str | None:
    return _why_not_rms_norm(x, weight, eps, torch.float8_e4m3fn, False, True)


def _gate_launcher(x: Tensor) -> Any:
    return gate_few_rows if len(x) <= gate_few_rows.MAX_ROWS else gate_launcher


def _why_not_first(count: int) -> Callable[..., str | None]:
    """Return a `why_not_hopper` for calls whose first `count` arguments are the matrices."""
    return lambda *args: launcher.why_unsupported(*args[:count])


def _swiglu(gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool, *weight_and_ends: Any) -> Any:
    weight, ends = weight_and_ends
    return launcher.swiglu(gate, up, dtype, power_of_2, weight, ends=ends)[:2]


def _swiglu_and_save(gate: Tensor, up: Tensor, dtype: torch.dtype, power_of_2: bool, *saved_and_weight: Any) -> Any:
    saved_dtype, saved_power_of_2, weight = saved_and_weight
    return launcher.swiglu(gate, up, dtype, power_of_2, weight, saved_dtype, saved_power_of_2)


# `choices` needs the names of all operators, also of those whose modules are not imported.
GEMMS = (  # they call "gemm" of `TABLE`
    "matmul_nt", "matmul_nt_out", "grouped_matmul_nt", "grouped_matmul_nt_out", "masked_grouped_matmul_nt",
    "masked_grouped_matmul_nt_out", "grouped_wgrad", "grouped_wgrad_out", "row_invariant_scaled_nt_out",
)  # fmt: skip
ONLY_TRITON = (
    "accepted_rows", "adamw", "align_groups", "bfloat16_terms", "continued_tokens", "cross_entropy",
    "cross_entropy_backward", "gradient_norms", "high_precision_grouped_nt", "high_precision_grouped_tn", "index_rows",
    "latent_keys", "latent_keys_backward", "packed_attention", "packed_attention_backward", "packed_matmul_nt",
    "permute", "ragged_attention", "record_choices", "rms_norm_backward", "rotate_", "rotate_and_copy_",
    "rotate_halves", "row_invariant_matmul_nt", "row_invariant_matmul_nt_out", "sample_tokens",
    "sequence_balance_backward", "swiglu", "swiglu_backward", "text_rows", "transpose_encoded", "unpermute",
    "unpermute_add_", "unpermute_backward", "write_and_rotate", "write_latents",
)  # fmt: skip
COMPILED_ON_CPU = (  # bit for bit the reference
    "adamw", "quantize", "dequantize", "quantize_rows_and_columns", "quantize_joined_rows_and_columns",
    "requantize_transposed", "swiglu_backward_quantize",
)  # fmt: skip
BLOCKS_OF_32 = "GEMMs in blocks of 32 (mxfp8) are emulated in FP16"
GEMMS_ON_CPU = (  # E4M3 operands, where the processor multiplies BF16
    "matmul_nt", "matmul_nt_out", "grouped_matmul_nt", "grouped_matmul_nt_out", "grouped_wgrad", "grouped_wgrad_out",
)  # fmt: skip
TORCH_ON_CPU = {
    "attention": "torch's FlashAttention for CPUs where rows attend to all keys, the reference where they are causal",
    "ragged_attention": "one text after the other, by torch's attention for CPUs where there are more keys than rows",
}
ATTENTION_REASON = "cuDNN or FlashAttention, as torch's own attention chooses"
PROMPTS_REASON = "a kernel for texts of any lengths, and cuDNN's where all texts have the same multiple of 1,024 rows"
PACKED_REASON = "kernels that add in a fixed order"
ONLY_TORCH = {  # and why
    "attention": ATTENTION_REASON,
    "attention_backward": ATTENTION_REASON,
    "read_latents": "torch gathers the rows of the cache",
    "paged_mqa_schedule": "torch sums and searches lengths on the device",
}
HOPPER_OR_TORCH = {  # called by their own modules: what torch does, and what Hopper's kernels support
    **dict.fromkeys(
        ("mqa_logits", "paged_mqa_logits"),
        ("multiplies the heads one after the other", "32 or 64 heads of 32, 64 or 128 channels"),
    ),
    "top_keys": ("takes the topk of integers that hold logit and position", "up to 4096 keys"),
    **dict.fromkeys(
        ("sparse_attention", "sparse_attention_with_lse", "paged_sparse_attention"),
        ("gathers the top-k positions and multiplies them", "latents of 512 + 64 channels in BF16 or FP8"),
    ),
    **dict.fromkeys(
        ("sparse_attention_backward", "sparse_attention_weights"),
        ("gathers the top-k positions and multiplies them", "latents of 512 + 64 channels in BF16"),
    ),
    "few_rows_mixture": ("calls what it consists of", "up to 8 rows in BF16, and experts of a multiple of 128 columns"),
    "few_rows_nt": ("calls quantization and GEMM", "up to 8 rows in BF16"),
    "heads_nt_out": ("multiplies the heads", "up to 256 rows of heads of up to 256 channels, a power of two"),
    "heads_nt_quantize": (
        "calls what it consists of",
        "up to 256 rows of heads of up to 512 channels, a power of two, with results of 128, 256, …",
    ),
    "latent_attention": (
        "calls what it consists of",
        "up to 8 rows, and latents of 512 + 64 channels in BF16, of FP8 ones for queries",
    ),
    "weighted_routing_plan": (
        "calls what it consists of",
        f"up to {routing_launcher.MAX_ENTRIES_ALONE} entries of up to {routing_launcher.MAX_EXPERTS} experts",
    ),
}
TRITON_ON_HOPPER = ("heads_nt_out", "heads_nt_quantize")  # of these: Triton's kernels, which only Hopper uses
TABLE = {
    "gemm": Backends(why_unsupported, launch_cache.launch, _triton_gemm),
    "gate": Backends(
        lambda x, *others: _gate_launcher(x).why_unsupported(x, *others),
        lambda x, *others: _gate_launcher(x).launch(x, *others),
        _triton("gate", "launch_from_x"),
    ),
    "gate_backward": Backends(
        gate_backward_launcher.why_unsupported, gate_backward_launcher.launch, _triton("gate", "launch_gradients")
    ),
    "count_tokens": Backends(
        lambda experts, n_experts, _: routing_launcher.why_not_entries(experts, n_experts),
        routing_launcher.count_tokens,
        _triton("routing_plan", "launch_count"),
    ),
    "routing_plan": Backends(
        routing_launcher.why_not_plan, routing_launcher.routing_plan, _triton("routing_plan", "launch")
    ),
    "sequence_balance": Backends(
        routing_launcher.why_not_balance, routing_launcher.sequence_balance, _triton("sequence_balance", "launch")
    ),
    "paged_attention": Backends(mla_decode.why_unsupported, mla_decode.launch, _triton("paged_attention", "launch")),
    "paged_attention_with_lse": Backends(
        mla_decode.why_unsupported, mla_decode.launch_with_lse, _triton("paged_attention", "launch_with_lse")
    ),
    "quantize": Backends(_why_not_quantize, launcher.quantize, _triton("quantize", "launch")),
    "quantize_with_scale": Backends(
        _why_not_first(1), launcher.quantize_with_scale, _triton("quantize", "launch_with_scale")
    ),
    "dequantize": Backends(_why_not_dequantize, launcher.dequantize, _triton("quantize", "launch_dequantize")),
    "quantize_rows_and_columns": Backends(
        _why_not_first(1), launcher.rows_and_columns, _triton("transpose", "launch_rows_and_columns")
    ),
    "quantize_joined_rows_and_columns": Backends(
        lambda parts, *_: launcher.why_unsupported(*parts),
        launcher.joined_rows_and_columns,
        _triton("transpose", "launch_joined_rows_and_columns"),
    ),
    "requantize_transposed": Backends(
        _why_not_requantize, launcher.requantize, _triton("transpose", "launch_requantize")
    ),
    "quantize_and_transpose": Backends(
        _why_not_first(1), launcher.quantize_and_transpose, _triton("transpose", "launch_block")
    ),
    "quantize_transposed": Backends(
        _why_not_first(1), launcher.quantize_transposed, _triton("transpose", "launch_transposed_block")
    ),
    "quantize_joined": Backends(
        lambda weights, *_: launcher.why_unsupported(*weights),
        launcher.quantize_joined,
        _triton("transpose", "launch_joined"),
    ),
    "quantize_matrices": Backends(
        lambda groups, *_: launcher.why_unsupported(*chain(*groups)),
        launcher.quantize_matrices,
        _triton("transpose", "launch_matrices"),
    ),
    "swiglu_quantize": Backends(_why_not_first(2), _swiglu, _triton("swiglu", "launch")),
    "swiglu_quantize_and_save": Backends(_why_not_first(2), _swiglu_and_save, _triton("swiglu", "launch_and_save")),
    "swiglu_backward_quantize": Backends(
        _why_not_first(3), launcher.swiglu_backward, _triton("swiglu", "launch_backward")
    ),
    "rms_norm": Backends(
        _why_not_high_precision_rms_norm, launcher.rms_norm_high_precision, _triton("norm", "launch_high_precision")
    ),
    "rms_norm_quantize": Backends(_why_not_rms_norm, launcher.rms_norm, _triton("norm", "launch")),
}
ROUTING = ("gate", "gate_backward", "count_tokens", "routing_plan", "sequence_balance")
ATTENTION = ("paged_attention", "paged_attention_with_lse")
ROW_INVARIANT = "row_invariant_matmul_nt"
QUANTIZATIONS = tuple(name for name in TABLE if name not in ("gemm", *ROUTING, *ATTENTION))
WITH_HOPPER = (*GEMMS, *QUANTIZATIONS, *ROUTING, *ATTENTION)  # operators that have kernels for Hopper
OPERATORS = (*WITH_HOPPER, *HOPPER_OR_TORCH, *ONLY_TRITON, *ONLY_TORCH)
PROMOTED_BY_TRITON = (*GEMMS, "packed_matmul_nt")
_ALIGNED = "rows that begin at multiples of 16 bytes"
_AND_UP_TO = f"columns (Triton's is faster for fewer), and up to {launcher.MAX_COLUMNS}"
_UP_TO = f"up to {routing_launcher.MAX_EXPERTS} experts"
SUPPORTED_BY_HOPPER = {  # what the functions `why_not_hopper` of `TABLE` accept
    **dict.fromkeys(GEMMS, "FP8 in blocks of 1×128 and 128×128, or with one scale an operand"),
    **dict.fromkeys(QUANTIZATIONS, _ALIGNED),
    "quantize": f"{_ALIGNED}, in blocks of 1×128, 128×1 or 128×128",
    "dequantize": f"{_ALIGNED}, in blocks of 1×128, 128×1 or 128×128, or with one scale",
    "rms_norm": f"{_ALIGNED}, of more than {launcher.NARROW_ROWS_WITH_VALUES} {_AND_UP_TO}",
    "rms_norm_quantize": f"{_ALIGNED}, of more than {launcher.NARROW_ROWS} {_AND_UP_TO}",
    "gate": f"up to {choice.MAX_EXPERTS} experts and {gate_few_rows.MAX_ROWS} tokens, and 8, 16, … "
    f"{gate_launcher.MAX_EXPERTS} experts and at least {gate_launcher.MIN_TOKENS} tokens",
    "gate_backward": f"{gate_backward_launcher.MIN_EXPERTS}, … {gate_backward_launcher.MAX_EXPERTS} experts in "
    f"multiples of 8, and at least {gate_backward_launcher.MIN_TOKENS} tokens",
    "count_tokens": _UP_TO,
    "routing_plan": _UP_TO,
    "sequence_balance": "16, 32, … 512 experts, whose counts are not given",
    **dict.fromkeys(ATTENTION, f"BF16 queries of {mla_decode.LATENT} + {mla_decode.ROTARY} channels"),
}


def choices() -> dict[str, tuple[str, str]]:
    """Return the kernels that each operator uses on this machine, and why, by the operator's name.

    Where an operator has a faster kernel, which cannot be used here or does not support all calls, the reason says so.
    """
    if not torch.cuda.is_available():
        return _choices_on_cpu()
    sm = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if torch.cuda.get_device_capability() < (8, 0):
        return _all("none", f"{sm} is older than sm_80, the oldest that the Triton kernels compile for")
    if find_spec("triton") is None:
        return _all("none", 'Triton is not installed: pip install "octile[cuda]"')
    chosen = _all("Triton", "its only kernel on GPUs, for sm_80 and later")
    chosen |= _each(PROMOTED_BY_TRITON, "Triton", _triton_gemms(sm))
    chosen |= {operator: ("torch", why) for operator, why in ONLY_TORCH.items()}
    training = f"{flash_attn_4.SUPPORTED} in MLA and MHA layers, except in deterministic mode"
    chosen |= _each(("attention", "attention_backward"), *_attention("torch", ATTENTION_REASON, training))
    chosen["ragged_attention"] = _attention("Triton", PROMPTS_REASON, flash_attn_4.SUPPORTED_PROMPTS)
    packed = f"{flash_attn_4.SUPPORTED_PACKED}, except in deterministic mode"
    chosen |= _each(("packed_attention", "packed_attention_backward"), *_attention("Triton", PACKED_REASON, packed))
    why_not_hopper = request.why_not_on(torch.device("cuda"))
    if why_not_hopper is None:
        for operator, supported in SUPPORTED_BY_HOPPER.items():
            others = f"Triton's for others, of which {BLOCKS_OF_32}" if operator in GEMMS else "Triton's for others"
            chosen[operator] = "CUDA C++", f"for {supported}; {others}"
        for operator, (_, supported) in HOPPER_OR_TORCH.items():
            kernel = "Triton" if operator in TRITON_ON_HOPPER else "CUDA C++"
            chosen[operator] = kernel, f"for {supported}; torch computes others"
        return chosen
    for operator in WITH_HOPPER:
        reason = _triton_gemms(sm) if operator in GEMMS else "its kernel for sm_80 and later"
        chosen[operator] = "Triton", f"{reason}; Hopper's are not used: {why_not_hopper}"
    for operator, (work, _) in HOPPER_OR_TORCH.items():
        chosen[operator] = "torch", f"torch {work}; Hopper's kernel is not used: {why_not_hopper}"
    return chosen


def _choices_on_cpu() -> dict[str, tuple[str, str]]:
    reference = "reference (torch, CPU)"
    chosen = _all(reference, "torch finds no GPU, and there is no other kernel for CPUs")
    chosen |= {operator: ("torch", why) for operator, why in TORCH_ON_CPU.items()}
    if cpu.library() is None:
        compiled = *COMPILED_ON_CPU, *ATTENTION, ROW_INVARIANT, *GEMMS_ON_CPU
        return chosen | _each(compiled, reference, "its kernel was not compiled: a C++ compiler is missing, or failed")
    why = "compiled by this machine's C++ compiler for E4M3 and AdamW, bit for bit the reference"
    chosen |= _each(COMPILED_ON_CPU, "C++", why)
    why = "compiled by this machine's C++ compiler; its sums have another order than the reference's"
    chosen |= _each((*ATTENTION, ROW_INVARIANT), "C++", why)
    if not cpu.can_multiply():
        return chosen | _each(
            GEMMS_ON_CPU, reference, "its kernel needs a processor that multiplies BF16 (AVX512-BF16)"
        )
    why = "the processor multiplies BF16 (AVX512-BF16), exactly for E4M3; other operands run on the reference"
    return chosen | _each(GEMMS_ON_CPU, "C++", why)


def _attention(otherwise: str, why: str, calls: str) -> tuple[str, str]:
    """flash-attn-4 for these calls and what `why` says for others; where it is not used, the other kernel for all."""
    why_not = flash_attn_4.why_not_on(torch.device("cuda"))
    if why_not is not None:
        return otherwise, f"{why}; {flash_attn_4.PACKAGE} is not used: {why_not}"
    try:
        flash_attn_4.load()
    except ImportError as error:
        return "none", str(error)
    return flash_attn_4.PACKAGE, f"for {calls}; for others {why}"


def _triton_gemms(sm: str) -> str:
    if torch.cuda.get_device_capability() < (8, 9):
        return f"{sm} has no FP8 tensor cores: operands are converted to FP16, exactly"
    return f"{sm} multiplies FP8, and Triton promotes to FP32 every 128 along K; {BLOCKS_OF_32}"


def _all(kernel: str, why: str) -> dict[str, tuple[str, str]]:
    return _each(OPERATORS, kernel, why)


def _each(operators: Iterable[str], kernel: str, why: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(operators, (kernel, why))
