"""DeepGEMM's two settings of the process: the number of SMs that GEMMs use, and the alignment of groups."""

from typing import Any

import torch

from octile.kernels.cuda.gemm import num_sms

_alignment = 128


def set_num_sms(new_num_sms: int) -> None:
    """Set how many SMs Hopper's FP8 GEMMs use; 0: all. On other GPUs they always use all.

    Raises:
        TypeError, ValueError: new_num_sms is not an integer from 0 to the number of SMs of the GPU.
        RuntimeError: there is no GPU.
    """
    available = _device().multi_processor_count
    if isinstance(new_num_sms, int) and not 0 <= new_num_sms <= available:
        raise ValueError(f"new_num_sms must be from 0 to the {available} SMs of the GPU, not {new_num_sms}")
    num_sms.set_num_sms(None if new_num_sms == 0 else new_num_sms)


def get_num_sms() -> int:
    """Return how many SMs GEMMs use.

    Raises:
        RuntimeError: there is no GPU.
    """
    _device()
    return num_sms.num_sms()


def _device() -> Any:  # torch does not name the class of device properties
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU, so GEMMs use no SMs")
    return torch.cuda.get_device_properties()


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment: in layouts with gaps, every group begins at a multiple of it. octile's kernels need none.

    Raises:
        TypeError: new_value is not an integer.
        ValueError: new_value is less than 1.
    """
    global _alignment
    if not isinstance(new_value, int):
        raise TypeError(f"new_value must be an integer, not {new_value!r}")
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
