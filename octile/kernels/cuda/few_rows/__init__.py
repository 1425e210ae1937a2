"""Hopper's kernels for few rows, as a decode step of few requests has: they read weights at the memory's bandwidth."""
