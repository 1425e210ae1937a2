"""The operators of `octile::`: each file has their schemas, CPU references, fakes and calls of GPU kernels.

The CPU reference of an operator is its specification.
"""
