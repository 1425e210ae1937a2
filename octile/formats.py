"""Number formats (FP8 and others), exact conversions to and from them, and the common shapes of a block.

An encoded value of E exponent bits and M mantissa bits is a sign, an exponent field f and a mantissa t, in that order:

    f > 0:  ±(1 + t / 2^M) · 2^(f − bias)              a normal number: M + 1 significant bits, the first one implied
    f = 0:  ±(t / 2^M) · 2^(1 − bias)                  zero and the subnormal numbers, evenly spaced

So the order of the encoded values is the order of the numbers, and one algorithm rounds to all formats. Find the
spacing of the format's numbers near x, divide |x| by it, round to the nearest even integer, and add this count to the
encoded value at which this spacing begins. A count that is rounded up to the next power of two carries into the
exponent field.

Formats differ in what the largest encoded values mean. IEEE formats (E5M2, FP16, …) use the top exponent for Inf and
NaN. E4M3 uses only its last encoded value for NaN, so that it reaches 448, and has no Inf. E2M1 has neither: all 16
encoded values are numbers. UE8M0 stores powers of two, the scales of blocks: it has no sign, no mantissa and no zero.

Sources: Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433) for E4M3 and E5M2; OCP Microscaling
Formats v1.0 §5.3.3 for E2M1, §5.4 for UE8M0; E5M6 is DeepSeek-V3's (arXiv 2412.19437 §3.3.3), its details not
published: IEEE-like here.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.validation import Range, check_fields

FP32_MANTISSA = 23
FP32_BIAS = 127
FP32_MAGNITUDE = 0x7FFFFFFF  # all but the sign


@dataclass(frozen=True)
class FloatFormat:
    """A floating-point format of at most 32 bits.

    Attributes:
        name: its name in recipes, reports and files.
        exponent_bits, mantissa_bits, bias: E, M and the bias of the exponent.
        dtype: the torch dtype that stores it, or None (for E5M6 see `pack12`).
        has_inf: whether the top exponent means Inf and NaN, as in IEEE 754; else only the last encoded value is NaN.
        signed: False for UE8M0, which has neither negative numbers nor zero.
        has_nan: False for E2M1, whose last encoded value is a number.

    Raises:
        TypeError: a field has another type.
        ValueError: the name is empty, a number of bits is out of range, or the numbers are not all normal or subnormal
            numbers of FP32; dtype is too small, or the fields contradict each other.
    """

    name: str
    exponent_bits: Annotated[int, Range(at_least=1, at_most=8)]
    mantissa_bits: Annotated[int, Range(at_least=0, at_most=FP32_MANTISSA)]
    bias: Annotated[int, Range(at_most=FP32_BIAS)]
    dtype: torch.dtype | None
    has_inf: bool = True
    signed: bool = True
    has_nan: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype | None):
            raise TypeError(f"dtype must be a torch.dtype or None, not {self.dtype!r}")
        check_fields(self)
        if not self.name:
            raise ValueError("name must not be empty")
        if self.has_inf and not self.has_nan:
            raise ValueError("has_nan must be True, not False, with has_inf: the top exponent means both")
        if self.has_inf and self.mantissa_bits == 0:
            raise ValueError("mantissa_bits must be at least 1, not 0, with has_inf: the mantissa tells NaN from Inf")
        if not self.signed and self.mantissa_bits > 0:
            raise ValueError(f"mantissa_bits must be 0, not {self.mantissa_bits}, in a format without a sign")
        if not self.signed and not self.has_nan:
            raise ValueError("has_nan must be True, not False, in a format without a sign: its zero is NaN")
        top_field = self._max_encoded >> self.mantissa_bits  # of a finite number
        if top_field < 1:
            raise ValueError(f"exponent_bits must be more than {self.exponent_bits}: no normal number is left")
        if top_field - self.bias > FP32_BIAS:
            raise ValueError(
                f"bias must be at least {top_field - FP32_BIAS}, not {self.bias}: the largest number is none of FP32"
            )
        if self.dtype is not None and 8 * self.dtype.itemsize < self.bits:
            raise ValueError(f"dtype must have at least {self.bits} bits, which {self.dtype} has not")

    @property
    def bits(self) -> int:
        """The number of bits of an encoded value."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def encoded_dtype(self) -> torch.dtype:
        """The integer dtype of `encode`'s result: uint8 up to 8 bits, int32 for 12 and 16, int64 for 32."""
        return torch.uint8 if self.bits <= 8 else torch.int32 if self.bits <= 16 else torch.int64

    @property
    def max(self) -> float:
        """The largest finite value."""
        field, mantissa = divmod(self._max_encoded, 1 << self.mantissa_bits)
        return (1 + mantissa * self.epsilon) * 2.0 ** (field - self.bias)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with M + 1 significant bits. For UE8M0, which has no zero, it is the encoded value 0."""
        return 2.0 ** (1 - self.bias) if self.signed else 2.0**-self.bias

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number; for UE8M0, which has no subnormal numbers, the smallest normal one."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """The spacing of the numbers between 1 and 2; half of it bounds the relative rounding error."""
        return 2.0**-self.mantissa_bits

    @property
    def _max_encoded(self) -> int:
        top = 1 << (self.exponent_bits + self.mantissa_bits)
        return top - (1 << self.mantissa_bits) - 1 if self.has_inf else top - 1 - self.has_nan

    @property
    def _nan_encoded(self) -> int:
        return self._max_encoded + 1 + (1 << self.mantissa_bits >> 1) if self.has_inf else self._max_encoded + 1

    def encode(self, x: Tensor, saturate: bool = True) -> Tensor:
        """Round to nearest, ties to even, and return the encoded values.

        UE8M0 has no mantissa, so that the significand is always 1, which is odd, and ties round up (1.5 → 2, 3 → 4).
        Positive numbers below its smallest, 2⁻¹²⁷, become 2⁻¹²⁷. Zero and negative numbers, which it cannot express,
        become NaN.

        Args:
            x: any shape, a floating-point dtype that FP32 contains (float64 would be rounded twice).
            saturate: whether values that are too large, Inf too, become ±max; otherwise they become Inf, or NaN in a
                format without Inf.

        Returns:
            encoded values of x's shape in `encoded_dtype`. NaN becomes the format's quiet NaN with the sign of x. E2M1
            has no NaN: it always saturates, and a NaN becomes +max as on NVIDIA's GPUs (PTX ISA, `cvt`).

        Raises:
            TypeError: x is float64 or not floating-point.
        """
        _check_input(x)
        x = x.float()
        magnitude = x.view(torch.int32) & FP32_MAGNITUDE

        # |x| = significand · 2^(field − 127 − 23), for subnormal FP32 (field 0 read as 1) without the implied bit
        field = (magnitude >> FP32_MANTISSA).clamp(min=1)
        significand = magnitude - (field - 1 << FP32_MANTISSA)

        first_field = FP32_BIAS + 1 - self.bias  # FP32's exponent field of the format's smallest spacing
        shift = FP32_MANTISSA - self.mantissa_bits + (first_field - field).clamp(0, self.mantissa_bits + 2)
        odd = significand >> shift & 1
        count = (2 * significand + (1 << shift) - 1 + odd) >> shift + 1  # doubled, so that a shift by 0 rounds too
        encoded = ((field - first_field).clamp(min=0) << self.mantissa_bits) + count
        if not self.signed:  # encoded value 0 is the smallest power of two instead of zero
            tie = torch.tensor(1.5 * self.smallest_normal, dtype=torch.float32, device=x.device).view(torch.int32)
            encoded = encoded.masked_fill(magnitude < tie, 0)

        too_large = self._max_encoded + (self.has_nan and not saturate)  # the next one after the largest: Inf or NaN
        encoded = encoded.clamp(max=too_large)
        invalid = x.isnan() if self.signed else ~(x > 0)
        encoded = encoded.masked_fill(invalid, self._nan_encoded if self.has_nan else self._max_encoded).to(
            self.encoded_dtype
        )
        negative = x.signbit() if self.has_nan else x.signbit() & ~invalid
        return torch.where(negative, encoded | 1 << self.bits - 1, encoded) if self.signed else encoded

    def decode(self, encoded: Tensor) -> Tensor:
        """Convert encoded values to float32, exactly.

        Args:
            encoded: any shape, uint8, int16, int32 or int64, of which only the lowest `bits` bits are read; for an
                8-bit format also its own `dtype`.

        Returns:
            float32 of encoded's shape.

        Raises:
            TypeError: encoded has another dtype.
        """
        if self.bits == 8 and encoded.dtype == self.dtype:
            encoded = encoded.view(torch.uint8)
        if encoded.dtype not in (torch.uint8, torch.int16, torch.int32, torch.int64):
            raise TypeError(f"encoded must hold {self.name} in uint8, int16, int32 or int64, not {encoded.dtype}")
        encoded = encoded.to(torch.int32)
        magnitude = encoded & (1 << self.exponent_bits + self.mantissa_bits) - 1
        field = magnitude >> self.mantissa_bits
        mantissa = magnitude - (field << self.mantissa_bits)

        # A subnormal number is built as a normal one of exponent field 1, and the implied bit subtracted, exactly. This
        # is right for the encoded value 0 of UE8M0 too: 2⁻¹²⁶ − 2⁻¹²⁷.
        exponent = field.clamp(min=1) - self.bias + FP32_BIAS
        value = (exponent << FP32_MANTISSA | mantissa << FP32_MANTISSA - self.mantissa_bits).view(torch.float32)
        value = torch.where(field == 0, value - self.smallest_normal, value)

        value = value.masked_fill(magnitude > self._max_encoded, float("nan"))
        if self.has_inf:
            value = value.masked_fill(magnitude == self._max_encoded + 1, float("inf"))
        return torch.where((encoded >> self.bits - 1 & 1).bool(), -value, value) if self.signed else value

    def round(self, x: Tensor, saturate: bool = True) -> Tensor:
        """Round x to the nearest numbers of this format and return them in x's dtype; arguments and errors as `encode`.

        Only float16 cannot hold every result: 65504 rounds to 65536 in BF16 and UE8M0, which is Inf in float16.
        """
        return self.decode(self.encode(x, saturate)).to(x.dtype)

    def values(self) -> Tensor:
        """The numbers of all encoded values in order, float32 [2^bits]: 256 for an 8-bit format.

        Raises:
            ValueError: the format has more than 16 bits.
        """
        if self.bits > 16:
            raise ValueError(f"{self.name} has 2^{self.bits} values; a table is made for formats of up to 16 bits")
        return self.decode(torch.arange(1 << self.bits))


@dataclass(frozen=True)
class IntFormat:
    """A format of integers from −max to max: the baseline that FP8 is compared with.

    It has neither NaN nor Inf; in a quantized block they make the scale NaN.
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
        """Round x to the nearest integers within ±max, ties to even, in x's dtype; NaN stays NaN.

        Raises:
            TypeError: x is float64 or not floating-point.
        """
        _check_input(x)
        return x.round().clamp(-self.max, self.max)


def pack12(encoded: Tensor) -> Tensor:
    """Pack 12-bit values, two in three bytes: a and b as [a's low 8 bits | b's low 4, a's high 4 | b's high 8].

    Args:
        encoded: [..., n] integers in [0, 4096), as `E5M6.encode` returns them. An odd n is padded with one zero.

    Returns:
        bytes [..., 3·⌈n/2⌉] uint8.

    Raises:
        TypeError: encoded is not int32 or int64.
    """
    if encoded.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"encoded must be int32 or int64, not {encoded.dtype}")
    a, b = F.pad(encoded, (0, encoded.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a & 0xFF, a >> 8 | (b & 0xF) << 4, b >> 4), dim=-1).to(torch.uint8).flatten(-2)


def unpack12(packed: Tensor, n: int) -> Tensor:
    """Unpack 12-bit values, the inverse of `pack12`: [..., 3·⌈n/2⌉] uint8 → [..., n] int32.

    Raises:
        TypeError: packed is not uint8.
        ValueError: packed does not hold n values per row.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed must be uint8, not {packed.dtype}")
    if packed.shape[-1] != 3 * -(-n // 2):
        raise ValueError(f"packed must have {3 * -(-n // 2)} bytes per row for n = {n} values, not {packed.shape[-1]}")
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

# The formats that tensors are quantized to, by name, with the torch dtype in which the encoded values are stored.
STORAGE_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e5m6": torch.uint8, "int8": torch.int8}
GEMM_FORMATS = ("e4m3", "e5m2", "int8")  # those of a GEMM's operands; E5M6 is dequantized or requantized first

# Blocks R×C, the elements of a matrix [M, K] that share one scale; Source: DeepSeek-V3 (arXiv 2412.19437) §3.3.2.
TILE: tuple[int, int] = (1, 128)  # one token, 128 channels
COLUMN_TILE: tuple[int, int] = (128, 1)  # 128 tokens, one channel
BLOCK: tuple[int, int] = (128, 128)  # of a weight
MX_TILE: tuple[int, int] = (1, 32)  # of the OCP Microscaling formats, and along the rows for wgrad
MX_COLUMN_TILE: tuple[int, int] = (32, 1)

_ALL: tuple[FloatFormat | IntFormat, ...] = (E4M3, E5M2, E5M6, E2M1, UE8M0, FP16, BF16, FP32, INT8)
by_name: dict[str, FloatFormat | IntFormat] = {f.name: f for f in _ALL}
