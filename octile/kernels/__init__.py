"""Kernels behind `octile.ops`.

backends.py        which kernels an operator takes on a GPU, and why
cuda/              Hopper's own kernels in CUDA C++, compiled when they are first used
triton/            portable kernels for every GPU from sm_80
attention.py       torch's attention kernels
cpu.py             conversions that torch does slowly on a CPU
memory_layout.py   the layouts in which scales and transposed data are written
disk_cache.py      compiled kernels on disk
"""
