"""Limits of Hopper (sm_90) by which kernels are planned.

Source: CUDA C++ programming guide, technical specifications per compute capability.
"""

SHARED_BYTES = 227 * 1024  # shared memory that a thread block may have
