"""How fast: the kernels behind `octile.ops`. `triton/` runs on every GPU from sm_80, `cpu.py` where torch is slow."""
