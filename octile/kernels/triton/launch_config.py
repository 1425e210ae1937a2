"""The sizes that the casts' speed depends on, in one place: a sweep on a GPU sets other ones here and measures again.

Chosen by arithmetic and by the compiler's count of registers. On an H200 these kernels came to 0.16 to 0.80 of a copy's
speed (benchmarks/LOG.md); Hopper has its own since (`octile.kernels.cuda.quantize.launcher`).
"""

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """Of a program that takes whole rows: how many numbers at least, and how many warps share them at most."""

    numbers: int
    numbers_a_warp: int
    warps: int


EXACT = {"enable_fp_fusion": False}  # a fused multiply-add rounds once where the specification rounds twice

# Numbers that a program takes at least and at most, and one of its warps: 32 a thread, which is 64 bytes of BF16 under
# way for each of the many threads that a multiprocessor runs. To keep up with its memory, an H200 needs about 30 KB on
# their way to each.
CAST_NUMBERS = 4096
LARGEST_TILE = 16384
LARGEST_RAGGED_TILE = 8192  # where numbers are loaded one by one (`layout.in_vectors`)
NUMBERS_A_WARP = 1024

ELEMENTWISE: dict[str, Any] = {"ROWS": 32, "COLS": 128, "num_warps": 4}  # dequantize, and casts by a given scale
SWIGLU: dict[str, Any] = {"ROWS": 32, "num_warps": 4}
NORM = Rows(numbers=8192, numbers_a_warp=NUMBERS_A_WARP, warps=32)
NORM_BACKWARD = Rows(numbers=4096, numbers_a_warp=256, warps=16)  # holds a row's sums, and the next row on its way
PERMUTE_BYTES, PERMUTE_BYTES_A_WARP = 8192, 2048  # of one row, for a program and for one of its warps
PERMUTE_SCALES: dict[str, Any] = {"ROWS": 1024, "TILES": 1}  # of the result, for a program
ADAMW: dict[str, Any] = {"NUMBERS": 1024, "num_warps": 4}
ROPE: dict[str, Any] = {"HEADS": 16, "num_warps": 4}  # heads of a token
UNPERMUTE: dict[str, Any] = {"COLS": 1024, "num_warps": 8}  # numbers of K rows

# How many warps share a square of 128×128, by kernel. Two programs of 8 warps or one of 16 fill a multiprocessor at 128
# registers a thread: two overlap one's loads with the other's arithmetic, one has registers for twice the numbers.
SQUARES: dict[str, dict[str, Any]] = {
    "quantize_both": {"num_warps": 16},
    "requantize": {"num_warps": 8},
    "quantize_block": {"num_warps": 16},
    "swiglu_backward": {"num_warps": 16},
    "swiglu_turned": {"num_warps": 16},
}
