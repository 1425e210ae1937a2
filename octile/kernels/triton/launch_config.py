"""Sizes and numbers of warps on which the speed of memory-bound kernels depends.

They follow from arithmetic and from the compiler's register counts. On an H200 these kernels reach 0.16 to 0.80 of the
speed of a copy (benchmarks/LOG.md); Hopper has CUDA kernels of its own (`octile.kernels.cuda.quantize.launcher`).
"""

from typing import Any, NamedTuple


class RowSizes(NamedTuple):
    """Sizes of a program that takes whole rows: its least elements, the elements of a warp, and its most warps."""

    elements: int
    elements_per_warp: int
    max_warps: int


EXACT = {"enable_fp_fusion": False}  # a fused multiply-add would round once where the specification rounds twice

# Elements of a program at least and at most, and of a warp: 32 per thread, so that each thread has 64 bytes of BF16 in
# flight. To saturate its memory bandwidth, an H200 needs about 30 KB in flight per SM.
MIN_TILE_ELEMENTS = 4096
MAX_TILE_ELEMENTS = 16384
MAX_RAGGED_TILE_ELEMENTS = 8192  # if elements are loaded one by one (`layout.is_vectorizable`)
ELEMENTS_PER_WARP = 1024

ELEMENTWISE: dict[str, Any] = {"ROWS": 32, "COLS": 128, "num_warps": 4}  # dequantize, and quantize_with_scale
SWIGLU: dict[str, Any] = {"ROWS": 32, "num_warps": 4}
NORM = RowSizes(elements=4096, elements_per_warp=ELEMENTS_PER_WARP, max_warps=32)
# a program holds a row's sums, and has the next row in flight
NORM_BACKWARD = RowSizes(elements=4096, elements_per_warp=256, max_warps=16)
NORM_BACKWARD_PROGRAMS = 1  # per SM
NORM_BACKWARD_OF_SEVERAL_ROWS = RowSizes(elements=4096, elements_per_warp=512, max_warps=16)
PERMUTE_BYTES, PERMUTE_BYTES_PER_WARP = 4096, 1024  # bytes that a program and a warp read
PERMUTE_SCALES: dict[str, Any] = {"ROWS": 1024, "TILES": 1}  # of the result, per program
PEER_SMS = 128  # of an exchange with other ranks
PEER_SMS_OVERLAPPED = 32  # of one that overlaps with GEMMs
PEER_FLOPS_PER_BYTE = 3000  # of GEMMs that an H200 computes while an exchange fills a byte of its buffer, at most
PEER_BLOCK = 1024  # entries per program where experts are sent to other ranks
PEER_CHUNK = 16  # rows that are sent before a flag of the receiving rank is set, at least
PEER_ROWS: dict[str, int] = {"words": 16384, "num_warps": 16}  # of rows that a program sends at a time
DECODE_ROWS: dict[str, int] = {"splits": 4, "words": 4096, "num_warps": 4}  # programs of an expert, and as PEER_ROWS
ADAMW: dict[str, Any] = {"ELEMENTS": 1024, "num_warps": 4}
GRADIENT_NORMS: dict[str, Any] = {"ELEMENTS": 4096, "num_warps": 4}
GRADIENT_NORMS_SUM: dict[str, Any] = {"ELEMENTS": 512, "num_warps": 4}  # partial sums of a tensor at a time
ROPE: dict[str, int] = {"MAX_HEADS": 16, "ELEMENTS": 1024, "num_warps": 2}  # heads, and elements in all, per program
ROTATE: dict[str, int] = {"MAX_HEADS": 16, "ELEMENTS": 512, "num_warps": 2}  # the same of a rotation in place
ROPE_HALVES: dict[str, int] = {"MAX_HEADS": 16, "ELEMENTS": 4096, "num_warps": 4}
INDEX_ROWS: dict[str, int] = {"num_warps": 1}  # of a row's program
WRITE_LATENTS: dict[str, int] = {"num_warps": 4}  # of a row's program
DECODE_LATENTS: dict[str, int] = {"HEADS": 16, "num_warps": 4}  # heads of a program, and warps of each
# Columns and most rows of a program that multiplies a head; rows of one that quantizes, or few if there are no more.
HEADS: dict[str, int] = {"COLS": 64, "MAX_ROWS": 64, "num_warps": 4}
QUANTIZED_HEADS: dict[str, int] = {"ROWS": 64, "FEW_ROWS": 16, "num_warps": 8}
# Heads of a program of paged attention and splits of a row at most; positions at a time, which divide a page; programs
# an SM (benchmarks/history/serve).
PAGED_ATTENTION: dict[str, int] = {
    "MAX_HEADS": 16, "MAX_HEADS_OF_ROWS": 128, "MAX_SPLITS": 64, "KEYS": 32, "KEYS_OF_ROWS": 64, "PROGRAMS": 8,
    "num_stages": 2, "STAGES_OF_ROWS": 5,
}  # fmt: skip
# Rows of a program, and keys at a time; on GPUs with less shared memory than Hopper smaller ones, which do not spill.
RAGGED_ATTENTION: dict[str, int] = {"ROWS": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3}
RAGGED_ATTENTION_SMALL: dict[str, int] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 2}
RAGGED_ATTENTION_LEAST: dict[str, int] = {"ROWS": 32, "KEYS": 32, "num_warps": 4, "num_stages": 2}
# Of the gradients of keys and values: rows at a time, and keys of a program; of queries the other way round.
KEY_GRADIENTS: dict[str, int] = {"ROWS": 16, "KEYS": 64, "num_warps": 4, "num_stages": 3}
KEY_GRADIENTS_SMALL: dict[str, int] = {"ROWS": 32, "KEYS": 32, "num_warps": 4, "num_stages": 1}
QUERY_GRADIENTS: dict[str, int] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
QUERY_GRADIENTS_SMALL: dict[str, int] = {"ROWS": 64, "KEYS": 32, "num_warps": 4, "num_stages": 1}
GRADIENTS_LEAST: dict[str, int] = {"ROWS": 32, "KEYS": 32, "num_warps": 4, "num_stages": 1}  # of either
OUTPUT_PRODUCTS: dict[str, int] = {"ROWS": 32, "num_warps": 4}
# Logits of a program at a time, programs an SM, and parts of a row at most.
SAMPLE_TOKENS: dict[str, int] = {"BLOCK": 4096, "PROGRAMS": 2, "MAX_PARTS": 128, "num_warps": 8}
SEARCH_OF_SAMPLE_TOKENS: dict[str, int] = {"BLOCK": 512, "WAYS": 16, "num_warps": 8}  # keys at a time, ways of a pass
ROW_INVARIANT: dict[str, int] = {"TILE_M": 64, "TILE_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
ROW_INVARIANT_OF_MANY: dict[str, int] = ROW_INVARIANT | {"TILE_N": 128, "num_stages": 4}
ROW_INVARIANT_WIDE: dict[str, int] = ROW_INVARIANT | {"TILE_M": 128, "TILE_N": 256, "num_warps": 8}
MERGE_SPLITS: dict[str, int] = {"num_warps": 4}
GATE_ELEMENTS, GATE_PROGRAMS = 1024, 128  # logits of a program at most, and programs at least, if there are tokens
GATE_BACKWARD_ROWS = 16  # most tokens of a program in backward
GATE_WITH_GEMM_TOKENS = 2048  # with fewer, programs of all their experts leave SMs idle
# Tokens of a program, or in backward at a time, and columns at a time in forward, of a program in backward.
GATE_WITH_GEMM: dict[str, int] = {"ROWS": 64, "COLS": 64, "num_warps": 4, "num_stages": 3}
GATE_BACKWARD_GEMMS: dict[str, int] = {"ROWS": 64, "COLS": 128, "num_warps": 4, "num_stages": 3}
PARTIAL_SUMS: dict[str, int] = {"elements": 2048, "ROWS": 32, "num_warps": 4}  # of a program at a time
# Logits of a program at a time, and the most programs, about; counts and sums of a sequence's programs at a time.
SEQUENCE_BALANCE: dict[str, int] = {"elements": 1024, "max_programs": 512, "num_warps": 4}
SEQUENCE_BALANCE_BACKWARD: dict[str, int] = {"elements": 512, "num_warps": 4}
SEQUENCE_BALANCE_SUM: dict[str, int] = {"elements": 4096, "num_warps": 8}
BFLOAT16_TERMS: dict[str, int] = {"ELEMENTS": 1024, "num_warps": 4}
COUNT_TOKENS: dict[str, int] = {"ROWS": 1024, "num_warps": 8}  # entries of a program
ROUTING_PLAN: dict[str, int] = {"ROWS": 128, "num_warps": 4}  # entries of a program, one per thread
ROUTING_PLAN_SCAN: dict[str, int] = {"blocks": 1024, "elements": 4096, "num_warps": 8}  # counts of a program at a time
GROUP_TILES: dict[str, int] = {"elements": 4096, "num_warps": 4}  # pairs of a tile and a group per program
CROSS_ENTROPY = {"cols": 4096, "cols_per_warp": 1024}  # columns of a row at a time; the next ones are in flight
UNPERMUTE_BACKWARD = {"elements": 2048, "cols": 1024, "num_warps": 4}  # elements and columns of rows at a time
UNPERMUTE = {"cols": 1024, "cols_per_warp": 128}  # columns of K rows per program, fewer if a row has fewer

# Warps per 128×128 block, by kernel. Two programs of 8 warps or one of 16 fill an SM at 128 registers per thread: two
# overlap the loads of one with the arithmetic of the other, one has registers for twice the elements per program.
BLOCK_WARPS: dict[str, dict[str, Any]] = {
    "quantize_rows_and_columns": {"num_warps": 16},
    "requantize": {"num_warps": 8},
    "quantize_and_transpose": {"num_warps": 16},
    "transpose_encoded": {"num_warps": 8},
    "swiglu_backward": {"num_warps": 16},
    "swiglu_transposed": {"num_warps": 16},
}
