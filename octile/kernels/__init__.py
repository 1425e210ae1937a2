"""How fast: the kernels behind `octile.ops`.

dispatch.py   which kernels make a product on a GPU
casting.py    which kernels cast on a GPU
cuda/         Hopper's own, compiled when they are first used
triton/       what moves memory, and products on every GPU from sm_80
cpu.py        where torch is slow on a CPU
storage.py    the layouts in which scales and transposed data are written
cache.py      what was compiled, kept on disk
recent.py     what was made lately, kept in memory
"""
