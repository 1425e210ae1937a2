"""Conversions between the memory layouts of scales that GEMM kernels read.

    MN-major, TMA-aligned   [..., MN, k] float32, contiguous along MN, with each column at a multiple of 16 bytes, as a
                            TMA load of one column of scales needs it (Hopper)
    packed UE8M0            four consecutive scales along k in one int32, the first in the lowest byte, MN-major as
                            above (Blackwell): a scale is a power of two, stored as its biased exponent
    packed, grouped         packed UE8M0 for the wgrad of a mixture of experts: scales [k of all groups, MN], where no
                            int32 holds scales of two groups
    128×4 tiles             the layout of MX scales in cuBLASLt and torch: 512 bytes for 128 rows and 4 columns

All functions are a few torch operations, run on every device and read nothing back to the host.

Sources: CUDA programming guide on tensor maps (alignment); OCP Microscaling Formats v1.0 §5.4 (UE8M0: the exponent e
stands for 2^(e − 127), 255 for NaN); cuBLAS documentation, "1D block scaling factors layout" (tiles).

Shapes: MN rows of an operand, k scales along the summed dimension, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.operator import check_tensor

ALIGNMENT = 16  # bytes, of each column that TMA loads
PER_INT = 4  # UE8M0 scales in an int32
SMALLEST = 2.0**-127  # of UE8M0, exponent 0; a subnormal number in FP32


def tma_aligned(rows: int, element_size: int) -> int:
    """Round rows up until they fill a multiple of 16 bytes."""
    unit = ALIGNMENT // element_size
    return -(-rows // unit) * unit


def mn_major(scale: Tensor) -> Tensor:
    """Lay out scale [..., MN, k] MN-major and TMA-aligned; returns the tensor itself if it has this layout already."""
    check_tensor("scale", scale)
    *batch, mn, k = scale.shape
    column = tma_aligned(mn, scale.element_size())
    strides = torch.empty(*batch, k, column, device="meta").mT.stride()
    if scale.stride() == strides:
        return scale
    return torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device).copy_(scale)


def to_ue8m0(scale: Tensor) -> Tensor:
    """Encode scales as UE8M0.

    Args:
        scale: float32, any shape, powers of two from 2⁻¹²⁷ to 2¹²⁷ or NaN.

    Returns:
        exponents of scale's shape, uint8.

    Raises:
        TypeError: scale is not float32.
        ValueError: a scale is another number. On a GPU, where nothing is read back, a device-side assertion fails.
    """
    check_tensor("scale", scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"scale must be float32, not {scale.dtype}")
    is_exact = ((scale.frexp().mantissa == 0.5) & (scale >= SMALLEST)) | scale.isnan()
    refuse_unless(is_exact.all(), "scale must be powers of two from 2⁻¹²⁷ to 2¹²⁷ to be stored as UE8M0")
    return ((scale.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def refuse_unless(holds: Tensor, message: str) -> None:
    """Raise ValueError unless `holds`; on a GPU, where nothing is read back, assert it on the device."""
    if holds.is_cuda:
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)


def from_ue8m0(exponents: Tensor) -> Tensor:
    """Decode UE8M0 exponents, uint8 of any shape, to float32. 0 stands for 2⁻¹²⁷, a subnormal number; 255 for NaN."""
    bits = exponents.to(torch.int32) << 23
    special = torch.where(exponents == 0, 0x00400000, 0x7FC00000)
    return torch.where((exponents == 0) | (exponents == 255), special, bits).to(torch.int32).view(torch.float32)


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Pack scales [..., MN, k] as UE8M0 into int32 [..., MN, ⌈k/4⌉], MN-major and TMA-aligned, padded with exponent 0.

    Raises:
        TypeError, ValueError: as `to_ue8m0`.
    """
    exponents = F.pad(to_ue8m0(scale), (0, -scale.shape[-1] % PER_INT))
    return mn_major(_join(exponents.unflatten(-1, (exponents.shape[-1] // PER_INT, PER_INT))))


def unpack_ue8m0(packed: Tensor, k: int) -> Tensor:
    """Unpack int32 [..., MN, ⌈k/4⌉], any strides, to scales [..., MN, k] float32: the inverse of `pack_ue8m0`.

    Raises:
        TypeError, ValueError: as `unpack_exponents`.
    """
    return from_ue8m0(unpack_exponents(packed, k))


def unpack_exponents(packed: Tensor, k: int) -> Tensor:
    """Unpack int32 [..., MN, ⌈k/4⌉], any strides, to UE8M0 exponents [..., MN, k] uint8.

    Raises:
        TypeError: packed is not int32.
        ValueError: packed does not hold k scales per row.
    """
    check_tensor("packed", packed)
    if packed.dtype != torch.int32:
        raise TypeError(f"packed must be int32, not {packed.dtype}")
    if packed.shape[-1] != -(-k // PER_INT):
        raise ValueError(f"packed must have {-(-k // PER_INT)} columns for {k} scales, not {packed.shape[-1]}")
    return _split(packed).flatten(-2)[..., :k]


def _join(exponents: Tensor) -> Tensor:
    """Join four exponents [..., 4] into one int32, the first in the lowest byte."""
    return (exponents.to(torch.int32) << _shifts(exponents)).sum(-1, dtype=torch.int32)


def _split(packed: Tensor) -> Tensor:
    """The inverse of `_join`: uint8 [..., 4]."""
    return ((packed[..., None] >> _shifts(packed)) & 0xFF).to(torch.uint8)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 8 * PER_INT, 8, dtype=torch.int32, device=like.device)


def pack_grouped_ue8m0(scale: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Pack the scales of all groups as UE8M0, four consecutive scales of one group in an int32.

    Args:
        scale: float32 [≥ Σ counts, MN], the scales of all groups, one group after the other.
        counts: int32 [G] on the device, the number of scales along k of each group.
        rows: number of rows of the result, at least Σ ⌈counts/4⌉; `max_packed_rows` is an upper bound for the host.

    Returns:
        int32 [rows, MN], contiguous.

    Raises:
        TypeError, ValueError: as `to_ue8m0`.
    """
    for name, t in (("scale", scale), ("counts", counts)):
        check_tensor(name, t)
    if not scale.shape[0]:
        return torch.zeros(rows, scale.shape[1], dtype=torch.int32, device=scale.device)
    counts = counts.long()
    packed_counts = (counts + PER_INT - 1) // PER_INT
    row = torch.arange(rows, device=scale.device)
    group, first = _locate(row, packed_counts)
    source = PER_INT * first[:, None] + torch.arange(PER_INT, device=scale.device)
    in_bounds = (source < counts[group, None]) & (row < packed_counts.sum())[:, None]
    source = ((counts.cumsum(0) - counts)[group, None] + source).clamp(max=scale.shape[0] - 1)
    exponents = to_ue8m0(scale)[source.flatten()].unflatten(0, source.shape) * in_bounds[..., None]
    return _join(exponents.mT)


def unpack_grouped_ue8m0(packed: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Unpack the scales of all groups: the inverse of `pack_grouped_ue8m0`.

    Args:
        packed: int32 [≥ Σ ⌈counts/4⌉, MN].
        counts: int32 [G] on the device, the number of scales along k of each group.
        rows: number of rows of the result, at least Σ counts; the contents of further rows are unspecified.

    Returns:
        scales, float32 [rows, MN].
    """
    for name, t in (("packed", packed), ("counts", counts)):
        check_tensor(name, t)
    if not packed.shape[0]:
        return torch.ones(rows, packed.shape[1], device=packed.device)
    counts = counts.long()
    packed_counts = (counts + PER_INT - 1) // PER_INT
    group, within = _locate(torch.arange(rows, device=packed.device), counts)
    source = (packed_counts.cumsum(0) - packed_counts)[group] + within // PER_INT
    exponents = _split(packed)[source.clamp(max=packed.shape[0] - 1)]
    byte = (within % PER_INT)[:, None, None].expand(-1, exponents.shape[1], 1)
    return from_ue8m0(exponents.gather(-1, byte).squeeze(-1))


def max_packed_rows(rows: int, groups: int) -> int:
    """An upper bound of Σ ⌈counts/4⌉ for any counts of this many groups that sum to rows."""
    return (rows + (PER_INT - 1) * groups) // PER_INT


def _locate(row: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The group of each row (the last one for rows past all groups), and the index of the row in its group."""
    ends = counts.cumsum(0)
    group = torch.searchsorted(ends, row, right=True).clamp(max=counts.numel() - 1)
    return group, row - (ends - counts)[group]


def tile_128x4(exponents: Tensor) -> Tensor:
    """Lay out exponents [MN, k] of one byte each in the 128×4 tiles that cuBLASLt reads, padded with exponent 0.

    Row i and column j of a tile lie at byte 16 · (i mod 32) + 4 · ⌊i/32⌋ + j; the tiles of 128 rows are consecutive.

    Returns:
        a vector of ⌈MN/128⌉ · ⌈k/4⌉ · 512 bytes, in exponents' dtype.
    """
    check_tensor("exponents", exponents)
    mn, k = exponents.shape
    padded = F.pad(exponents, (0, -k % 4, 0, -mn % 128)).contiguous()
    return padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()
