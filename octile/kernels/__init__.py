"""Kernels, the layer below `octile.ops`.

backends.py        which kernels each operator uses on a GPU, and why
cuda/              Hopper's kernels in CUDA C++, compiled at their first use
triton/            portable kernels for every GPU from sm_80
attention.py       torch's attention kernels, and their choice
flash_attn_4.py    attention of training and of prompts by the optional library flash-attn-4
cpu.py             quantization and conversions that torch does slowly on a CPU
native.py          C++ for the CPU, compiled at its first use
memory_layout.py   the memory layout of scales and of transposed data
disk_cache.py      compiled kernels on disk
"""
