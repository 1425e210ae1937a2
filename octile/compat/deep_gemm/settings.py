"""DeepGEMM's settings of the process: the number of SMs that GEMMs use, and the alignment of groups.

The setters of `pdl` (programmatic dependent launch) and `tc_util` (the share of tensor core time that a GEMM may take)
store a value for their getters. octile's kernels use neither.
"""

from typing import Any

import torch

from octile.compat.deep_gemm.operands import checked_integer
from octile.kernels.cuda.gemm import num_sms

_alignment = 128
_pdl = False
_tc_util = 100


def set_num_sms(new_num_sms: int) -> None:
    """Set how many SMs Hopper's FP8 GEMMs use; 0: all. On other GPUs they always use all.

    Raises:
        TypeError, ValueError: new_num_sms is not an integer from 0 to the number of SMs of the GPU.
        RuntimeError: there is no GPU.
    """
    available = _device().multi_processor_count
    new_num_sms = checked_integer("new_num_sms", new_num_sms)
    if not 0 <= new_num_sms <= available:
        raise ValueError(f"new_num_sms must be from 0 to the {available} SMs of the GPU, not {new_num_sms}")
    num_sms.set_num_sms(None if new_num_sms == 0 else new_num_sms)


def get_num_sms() -> int:
    """Return how many SMs GEMMs use; without a GPU 1, since callers divide work by it."""
    return num_sms.num_sms() if torch.cuda.is_available() else 1


def _device() -> Any:  # torch does not name the class of device properties
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU, so there are no SMs to set")
    return torch.cuda.get_device_properties()


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment: in layouts with gaps, every group begins at a multiple of it. octile's kernels need none.

    Raises:
        TypeError: new_value is not an integer.
        ValueError: new_value is less than 1.
    """
    global _alignment
    new_value = checked_integer("new_value", new_value)
    if new_value < 1:
        raise ValueError(f"new_value must be at least 1, not {new_value}")
    _alignment = new_value


def get_mk_alignment_for_contiguous_layout() -> int:
    """Return the alignment, 128 unless it was set."""
    return _alignment


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """Return 128, as DeepGEMM does on Hopper, where expected_m has no effect either."""
    return 128


def set_pdl(new_enable_pdl: bool) -> None:
    """Store what `get_pdl` returns. It has no effect: octile's kernels wait for those before them.

    Raises:
        TypeError: new_enable_pdl is not a bool.
    """
    global _pdl
    if not isinstance(new_enable_pdl, bool):
        raise TypeError(f"new_enable_pdl must be True or False, not {new_enable_pdl!r}")
    _pdl = new_enable_pdl


def get_pdl() -> bool:
    """Return what `set_pdl` stored, False unless it was called."""
    return _pdl


def set_tc_util(new_tc_util: int) -> None:
    """Store what `get_tc_util` returns, in percent; 0: 100. It has no effect: octile's GEMMs are not throttled.

    Raises:
        TypeError: new_tc_util is not an integer.
        ValueError: new_tc_util is not from 0 to 100.
    """
    global _tc_util
    new_tc_util = checked_integer("new_tc_util", new_tc_util)
    if not 0 <= new_tc_util <= 100:
        raise ValueError(f"new_tc_util must be from 0 to 100, not {new_tc_util}")
    _tc_util = new_tc_util or 100


def get_tc_util() -> int:
    """Return what `set_tc_util` stored, 100 unless it was called."""
    return _tc_util
