"""The operators of `octile::`: each file has their schemas, CPU references, fakes and calls of GPU kernels.

An operator's CPU reference is its specification.
"""
