"""What a small floating-point number is.

A number of E exponent bits and M mantissa bits is a sign, an exponent field f and a mantissa t, in that order:

    f > 0:  ±(1 + t / 2^M) · 2^(f − bias)              a normal number: M + 1 significant bits, the first one implied
    f = 0:  ±(t / 2^M) · 2^(1 − bias)                  zero and the subnormal numbers: evenly spaced down to zero

Counting the codes upwards therefore counts the values upwards, and rounding needs one algorithm for all formats: find
the spacing of the format's values near x, count how many spacings fit into |x|, round that count to the nearest even
integer, and add it to the code at which this spacing begins. A count that is rounded up to the next power of two
carries into the exponent field by itself.

What the largest codes mean is where formats differ. IEEE formats (E5M2, FP16, ...) give the whole top exponent to Inf
and NaN; E4M3 gives only its last code to NaN, so that it reaches 448, and has no Inf. E2M1 has neither: all of its 16
codes are numbers. UE8M0 stores powers of two, the scales of blocks: no sign, no mantissa, no zero.

Sources: Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433) for E4M3 and E5M2; OCP Microscaling
Formats v1.0 §5.3.3 for E2M1, §5.4 for UE8M0; E5M6 is DeepSeek-V3's (arXiv 2412.19437 §3.3.3), its details not
published: IEEE-like here.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

FP32_MANTISSA = 23
FP32_BIAS = 127
FP32_MAGNITUDE = 0x7FFFFFFF  # all but the sign


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format of at most 32 bits.

    Attributes:
        name: how recipes, reports and files call it.
        exponent_bits, mantissa_bits, bias: E, M and the exponent's offset.
        dtype: the torch dtype that stores it, or None (E5M6: see `pack12`).
        has_inf: the top exponent means Inf and NaN, as in IEEE 754; otherwise only the last code is NaN.
        signed: False for UE8M0, which has neither negative numbers nor zero.
        has_nan: False for E2M1, whose last code is a number too.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    dtype: torch.dtype | None
    has_inf: bool = True
    signed: bool = True
    has_nan: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def encoded_dtype(self) -> torch.dtype:
        """The integers that hold codes: uint8 up to 8 bits, int32 for 12 and 16, int64 for 32."""
        return torch.uint8 if self.bits <= 8 else torch.int32 if self.bits <= 16 else torch.int64

    @property
    def max(self) -> float:
        """The largest finite value."""
        field, mantissa = divmod(self._max_code, 1 << self.mantissa_bits)
        return (1 + mantissa * self.epsilon) * 2.0 ** (field - self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest value with all M + 1 significant bits. UE8M0 has no zero: its code 0 is a number as well."""
        return 2.0 ** (1 - self.bias) if self.signed else 2.0**-self.bias

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value; UE8M0 has no subnormal numbers, so there it is the smallest normal one."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """The spacing of the values between 1 and 2: rounding a normal number is off by at most epsilon / 2 of it."""
        return 2.0**-self.mantissa_bits

    @property
    def _max_code(self) -> int:
        top = 1 << (self.exponent_bits + self.mantissa_bits)
        return top - (1 << self.mantissa_bits) - 1 if self.has_inf else top - 1 - self.has_nan

    @property
    def _nan_code(self) -> int:
        return self._max_code + 1 + (1 << self.mantissa_bits >> 1) if self.has_inf else self._max_code + 1

    def encode(self, x: Tensor, saturate: bool = True) -> Tensor:
        """Rounds to nearest, ties to even, and returns the codes.

        Without a mantissa the significand is always 1, which is odd: UE8M0's ties go up (1.5 → 2, 3 → 4). Below 2⁻¹²⁶
        its last spacing is 2⁻¹²⁶, as that of FP32 itself, and what rounds to nothing is 2⁻¹²⁷; zero and negative
        numbers, which it can't express, become NaN.

        Args:
            x: any shape, a floating-point dtype that FP32 contains (float64 would be rounded twice).
            saturate: what is too large, Inf too, becomes ±max; otherwise Inf, or NaN in a format without Inf.

        Returns:
            codes of x's shape in `encoded_dtype`. A NaN stays NaN, with its sign and the format's one quiet code. E2M1,
            which can't express it, always saturates, and makes +max of a NaN as NVIDIA's GPUs do (PTX ISA, `cvt`).

        Raises:
            TypeError: x is float64 or not floating-point.
        """
        _check_input(x)
        x = x.float()
        magnitude = x.view(torch.int32) & FP32_MAGNITUDE

        # |x| = significand · 2^(field − 127 − 23), for subnormal FP32 (field 0 read as 1) without the implied bit
        field = (magnitude >> FP32_MANTISSA).clamp(min=1)
        significand = magnitude - (field - 1 << FP32_MANTISSA)

        first_field = FP32_BIAS + 1 - self.bias  # of the format's smallest spacing, in FP32's counting
        shift = FP32_MANTISSA - self.mantissa_bits + (first_field - field).clamp(0, self.mantissa_bits + 2)
        odd = significand >> shift & 1
        count = (2 * significand + (1 << shift) - 1 + odd) >> shift + 1  # doubled, so that a shift by 0 rounds too
        code = ((field - first_field).clamp(min=0) << self.mantissa_bits) + count

        too_large = self._max_code + (self.has_nan and not saturate)  # the code after the largest: Inf, or else NaN
        code = code.clamp(max=too_large)
        invalid = x.isnan() if self.signed else ~(x > 0)
        code = code.masked_fill(invalid, self._nan_code if self.has_nan else self._max_code).to(self.encoded_dtype)
        negative = x.signbit() if self.has_nan else x.signbit() & ~invalid
        return torch.where(negative, code | 1 << self.bits - 1, code) if self.signed else code

    def decode(self, codes: Tensor) -> Tensor:
        """The values of codes, float32, exactly.

        Args:
            codes: any shape, uint8, int16, int32 or int64 (bits above the format's are ignored); an 8-bit format also
                takes its own `dtype`.

        Raises:
            TypeError: codes are of another dtype.
        """
        if self.bits == 8 and codes.dtype == self.dtype:
            codes = codes.view(torch.uint8)
        if codes.dtype not in (torch.uint8, torch.int16, torch.int32, torch.int64):
            raise TypeError(f"codes must be uint8, int16, int32 or int64 codes of {self.name}, not {codes.dtype}")
        codes = codes.to(torch.int32)
        magnitude = codes & (1 << self.exponent_bits + self.mantissa_bits) - 1
        field = magnitude >> self.mantissa_bits
        mantissa = magnitude - (field << self.mantissa_bits)

        # A subnormal is built with the implied bit, as a normal of exponent field 1, and that bit subtracted: exact.
        # UE8M0's code 0 fits in: 2⁻¹²⁶ − 2⁻¹²⁷.
        exponent = field.clamp(min=1) - self.bias + FP32_BIAS
        value = (exponent << FP32_MANTISSA | mantissa << FP32_MANTISSA - self.mantissa_bits).view(torch.float32)
        value = torch.where(field == 0, value - self.smallest_normal, value)

        value = value.masked_fill(magnitude > self._max_code, float("nan"))
        if self.has_inf:
            value = value.masked_fill(magnitude == self._max_code + 1, float("inf"))
        return torch.where((codes >> self.bits - 1 & 1).bool(), -value, value) if self.signed else value

    def round(self, x: Tensor, saturate: bool = True) -> Tensor:
        """The nearest values of this format, in x's dtype; see `encode`, whose errors it raises.

        Only a float16 x can't hold every result: 65504 is 65536 in BF16 and UE8M0, and comes back as Inf.
        """
        return self.decode(self.encode(x, saturate)).to(x.dtype)

    def values(self) -> Tensor:
        """The values of all codes in order, float32 [2^bits]: 256 for an 8-bit format.

        Raises:
            ValueError: the format has more than 16 bits.
        """
        if self.bits > 16:
            raise ValueError(f"{self.name} has 2^{self.bits} values; a table is made for formats of up to 16 bits")
        return self.decode(torch.arange(1 << self.bits))


@dataclass(frozen=True)
class IntFormat:
    """Integers from −max to max, for the baseline that asks why tiles are FP8 and not INT8.

    No integer is NaN or Inf: in a quantised block these stay visible through the block's scale.
    """

    name: str
    bits: int
    dtype: torch.dtype
    has_inf: ClassVar[bool] = False
    has_nan: ClassVar[bool] = False

    @property
    def max(self) -> float:
        """The largest value. The smallest is −max, so that negating never overflows."""
        return 2.0 ** (self.bits - 1) - 1

    def round(self, x: Tensor) -> Tensor:
        """The nearest integers within ±max, ties to even, in x's dtype. NaN stays NaN; float64 is a TypeError."""
        _check_input(x)
        return x.round().clamp(-self.max, self.max)


def pack12(codes: Tensor) -> Tensor:
    """Stores 12-bit codes, two in three bytes: a and b as [a's low 8 bits | b's low 4, a's high 4 | b's high 8].

    Args:
        codes: [..., n] integers in [0, 4096), as `E5M6.encode` gives them. An odd n is padded with one zero.

    Returns:
        bytes [..., 3·⌈n/2⌉] uint8.

    Raises:
        TypeError: codes are not int32 or int64.
    """
    if codes.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"codes must be int32 or int64, not {codes.dtype}")
    a, b = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a & 0xFF, a >> 8 | (b & 0xF) << 4, b >> 4), dim=-1).to(torch.uint8).flatten(-2)


def unpack12(packed: Tensor, n: int) -> Tensor:
    """The n codes that `pack12` stored: [..., 3·⌈n/2⌉] uint8 → [..., n] int32.

    Raises:
        TypeError: packed is not uint8.
        ValueError: packed does not hold n codes.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed must be uint8, not {packed.dtype}")
    if packed.shape[-1] != 3 * -(-n // 2):
        raise ValueError(f"packed must have {3 * -(-n // 2)} bytes a row for n = {n} codes, not {packed.shape[-1]}")
    low, middle, high = packed.to(torch.int32).unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack((low | (middle & 0xF) << 8, middle >> 4 | high << 4), dim=-1).flatten(-2)[..., :n]


def _check_input(x: Tensor) -> None:
    if not x.dtype.is_floating_point or x.dtype == torch.float64:
        raise TypeError(f"x must be float32 or a smaller floating-point dtype, not {x.dtype}")


E4M3 = FloatFormat("e4m3", 4, 3, 7, torch.float8_e4m3fn, has_inf=False)
E5M2 = FloatFormat("e5m2", 5, 2, 15, torch.float8_e5m2)
E5M6 = FloatFormat("e5m6", 5, 6, 15, None)
E2M1 = FloatFormat("e2m1", 2, 1, 1, None, has_inf=False, has_nan=False)
UE8M0 = FloatFormat("ue8m0", 8, 0, 127, torch.float8_e8m0fnu, has_inf=False, signed=False)
FP16 = FloatFormat("fp16", 5, 10, 15, torch.float16)
BF16 = FloatFormat("bf16", 8, 7, 127, torch.bfloat16)
FP32 = FloatFormat("fp32", 8, 23, 127, torch.float32)
INT8 = IntFormat("int8", 8, torch.int8)

# Blocks R×C, the elements of a matrix [M, K] that share one scale; Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2.
TILE: tuple[int, int] = (1, 128)  # one token, 128 channels
COLUMN_TILE: tuple[int, int] = (128, 1)  # 128 tokens, one channel
BLOCK: tuple[int, int] = (128, 128)  # of a weight

_ALL: tuple[FloatFormat | IntFormat, ...] = (E4M3, E5M2, E5M6, E2M1, UE8M0, FP16, BF16, FP32, INT8)
by_name: dict[str, FloatFormat | IntFormat] = {f.name: f for f in _ALL}
