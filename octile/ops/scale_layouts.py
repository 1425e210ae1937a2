"""How kernels want scales to lie in memory: the same values elsewhere, or in fewer bits.

    MN-major, TMA-aligned   [..., MN, k] float32 with the rows next to each other and every column on a multiple of 16
                            bytes, as a TMA load of one column of scales needs it (Hopper)
    packed UE8M0            four neighbours along k in one int32, the first in the lowest byte, MN-major as above
                            (Blackwell): a scale is a power of two and its exponent is all that is kept
    packed, grouped         the same for the weight gradient of a mixture of experts: scales [k of all groups, MN],
                            where no int32 holds scales of two groups
    128×4 tiles             cuBLASLt's and torch's layout of MX scales: 512 bytes for 128 rows and 4 columns

Sources: CUDA programming guide on tensor maps (alignment); OCP Microscaling Formats v1.0 §5.4 (UE8M0: code c is
2^(c − 127), 255 is NaN); cuBLAS documentation, "1D block scaling factors layout" (tiles).  Everything here is a few
ordinary torch operations, runs on every device and reads nothing back to the host.

Shapes: MN rows of an operand, k scales along the summed dimension, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.operator import check_tensor

ALIGNMENT = 16  # bytes; of the start of every column that TMA loads
PER_INT = 4
SMALLEST = 2.0**-127  # UE8M0's code 0, a subnormal number in FP32


def tma_aligned(rows: int, element_size: int) -> int:
    """rows rounded up until they fill a multiple of 16 bytes."""
    unit = ALIGNMENT // element_size
    return -(-rows // unit) * unit


def mn_major(scale: Tensor) -> Tensor:
    """[..., MN, k] with the strides (…, 1, MN rounded up to 16 bytes); the tensor itself where it lies so already."""
    check_tensor("scale", scale)
    *batch, mn, k = scale.shape
    column = tma_aligned(mn, scale.element_size())
    strides = torch.empty(*batch, k, column, device="meta").mT.stride()
    if scale.stride() == strides:
        return scale
    return torch.empty_strided(scale.shape, strides, dtype=scale.dtype, device=scale.device).copy_(scale)


def to_ue8m0(scale: Tensor) -> Tensor:
    """The codes of scales that are powers of two from 2⁻¹²⁷ to 2¹²⁷, or NaN: uint8.

    Raises:
        TypeError: scale is not float32.
        ValueError: a scale is no such number. On a GPU nothing is read back, and the device stops with an assertion.
    """
    check_tensor("scale", scale)
    if scale.dtype != torch.float32:
        raise TypeError(f"scale must be float32, not {scale.dtype}")
    kept = ((scale.frexp().mantissa == 0.5) & (scale >= SMALLEST)) | scale.isnan()
    refuse_unless(kept.all(), "scale must be powers of two from 2⁻¹²⁷ to 2¹²⁷ to be stored as UE8M0")
    return ((scale.view(torch.int32) >> 23) & 0xFF).to(torch.uint8)


def refuse_unless(holds: Tensor, message: str) -> None:
    """ValueError on a CPU; on a GPU, where the host does not know yet, an assertion that stops the device."""
    if holds.is_cuda:
        torch._assert_async(holds, message)
    elif not holds:
        raise ValueError(message)


def from_ue8m0(codes: Tensor) -> Tensor:
    """The scales of codes (uint8), float32. Code 0 is 2⁻¹²⁷, which FP32 holds as a subnormal number; 255 is NaN."""
    bits = codes.to(torch.int32) << 23
    special = torch.where(codes == 0, 0x00400000, 0x7FC00000)
    return torch.where((codes == 0) | (codes == 255), special, bits).to(torch.int32).view(torch.float32)


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Scales [..., MN, k] → int32 [..., MN, ⌈k/4⌉], MN-major and TMA-aligned. The last int32 is filled up with code 0.

    Raises:
        TypeError, ValueError: as `to_ue8m0`.
    """
    codes = F.pad(to_ue8m0(scale), (0, -scale.shape[-1] % PER_INT))
    return mn_major(_join(codes.unflatten(-1, (codes.shape[-1] // PER_INT, PER_INT))))


def unpack_ue8m0(packed: Tensor, k: int) -> Tensor:
    """int32 [..., MN, ⌈k/4⌉] in any strides → scales [..., MN, k], float32. The inverse of `pack_ue8m0`.

    Raises:
        TypeError, ValueError: as `unpack_exponents`.
    """
    return from_ue8m0(unpack_exponents(packed, k))


def unpack_exponents(packed: Tensor, k: int) -> Tensor:
    """int32 [..., MN, ⌈k/4⌉] in any strides → codes [..., MN, k], uint8.

    Raises:
        TypeError: packed is not int32.
        ValueError: it does not hold k scales a row.
    """
    check_tensor("packed", packed)
    if packed.dtype != torch.int32:
        raise TypeError(f"packed must be int32, not {packed.dtype}")
    if packed.shape[-1] != -(-k // PER_INT):
        raise ValueError(f"packed must have {-(-k // PER_INT)} columns for {k} scales, not {packed.shape[-1]}")
    return _split(packed).flatten(-2)[..., :k]


def _join(codes: Tensor) -> Tensor:
    """Four codes [..., 4] in one int32, the first in the lowest byte."""
    return (codes.to(torch.int32) << _shifts(codes)).sum(-1, dtype=torch.int32)


def _split(packed: Tensor) -> Tensor:
    return ((packed[..., None] >> _shifts(packed)) & 0xFF).to(torch.uint8)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 8 * PER_INT, 8, dtype=torch.int32, device=like.device)


def pack_grouped_ue8m0(scale: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Scales of all groups, one below the other, → int32 [rows, MN], contiguous, four of one group in each.

    Args:
        scale: float32 [≥ Σ counts, MN].
        counts: int32 [G], the scales along k that each group has; on the device.
        rows: of the result: Σ ⌈counts/4⌉, or more where the host does not know; `max_packed_rows` is always enough.

    Raises:
        TypeError, ValueError: as `to_ue8m0`.
    """
    for name, t in (("scale", scale), ("counts", counts)):
        check_tensor(name, t)
    counts = counts.long()
    packed_counts = (counts + PER_INT - 1) // PER_INT
    row = torch.arange(rows, device=scale.device)
    group, first = _place(row, packed_counts)
    source = PER_INT * first[:, None] + torch.arange(PER_INT, device=scale.device)
    there = (source < counts[group, None]) & (row < packed_counts.sum())[:, None]
    source = ((counts.cumsum(0) - counts)[group, None] + source).clamp(max=max(scale.shape[0] - 1, 0))
    codes = to_ue8m0(scale)[source.flatten()].unflatten(0, source.shape) * there[..., None]
    return _join(codes.mT)


def unpack_grouped_ue8m0(packed: Tensor, counts: Tensor, rows: int) -> Tensor:
    """The inverse of `pack_grouped_ue8m0`: int32 [≥ Σ ⌈counts/4⌉, MN] → float32 [rows, MN].

    rows is Σ counts, or more where the host does not know; rows past Σ counts hold any scale.
    """
    for name, t in (("packed", packed), ("counts", counts)):
        check_tensor(name, t)
    counts = counts.long()
    packed_counts = (counts + PER_INT - 1) // PER_INT
    group, within = _place(torch.arange(rows, device=packed.device), counts)
    source = (packed_counts.cumsum(0) - packed_counts)[group] + within // PER_INT
    codes = _split(packed)[source.clamp(max=packed.shape[0] - 1)]
    byte = (within % PER_INT)[:, None, None].expand(-1, codes.shape[1], 1)
    return from_ue8m0(codes.gather(-1, byte).squeeze(-1))


def max_packed_rows(rows: int, groups: int) -> int:
    """At least Σ ⌈counts/4⌉ for any counts of so many groups that sum to rows."""
    return (rows + (PER_INT - 1) * groups) // PER_INT


def _place(row: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The group that each row lies in (the last one for rows past all), and which of the group's rows it is."""
    ends = counts.cumsum(0)
    group = torch.searchsorted(ends, row, right=True).clamp(max=counts.numel() - 1)
    return group, row - (ends - counts)[group]


def tile_128x4(codes: Tensor) -> Tensor:
    """One byte a scale, [MN, k] → the flat tiles that cuBLASLt reads: row i and column j of a tile at byte
    16 · (i mod 32) + 4 · ⌊i/32⌋ + j, the tiles of 128 rows after one another. Filled up with code 0.
    """
    check_tensor("codes", codes)
    mn, k = codes.shape
    padded = F.pad(codes, (0, -k % 4, 0, -mn % 128)).contiguous()
    return padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def untile_128x4(tiles: Tensor, mn: int, k: int) -> Tensor:
    """The inverse of `tile_128x4`: [MN, k]."""
    check_tensor("tiles", tiles)
    shape = (-(-mn // 128), -(-k // 4), 32, 4, 4)
    return tiles.view(shape).permute(0, 3, 2, 1, 4).flatten(3, 4).flatten(0, 2)[:mn, :k]
