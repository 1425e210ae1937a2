"""Two numbers that hold for the whole process: multiprocessors, and where groups begin."""

from typing import Any

import torch

from octile.kernels.cuda.gemm import num_sms

_alignment = 128


def set_num_sms(new_num_sms: int) -> None:
    """Hopper's FP8 products use that many multiprocessors from now on; 0: all of them. Others always use all.

    Raises:
        TypeError, ValueError: not an integer from 0 to the multiprocessors there are.
        RuntimeError: there is no GPU.
    """
    there = _device().multi_processor_count
    if isinstance(new_num_sms, int) and not 0 <= new_num_sms <= there:
        raise ValueError(f"new_num_sms must be from 0 to the {there} multiprocessors there are, not {new_num_sms}")
    num_sms.set_num_sms(None if new_num_sms == 0 else new_num_sms)


def get_num_sms() -> int:
    """The multiprocessors that products use.

    Raises:
        RuntimeError: there is no GPU.
    """
    _device()
    return num_sms.num_sms()


def _device() -> Any:  # torch does not name the class of device properties
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU, so products use no multiprocessors")
    return torch.cuda.get_device_properties()


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """The rows of which every group begins at a multiple, where a layout has gaps; octile's kernels need none.

    Raises:
        TypeError: not an integer.
        ValueError: less than 1.
    """
    global _alignment
    if not isinstance(new_value, int):
        raise TypeError(f"new_value must be an integer, not {new_value!r}")
    if new_value < 1:
        raise ValueError(f"new_value must be at least 1, not {new_value}")
    _alignment = new_value


def get_mk_alignment_for_contiguous_layout() -> int:
    """128, or what was set."""
    return _alignment


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """128, what DeepGEMM answers on Hopper; expected_m has no effect there either."""
    return 128
