"""Asks a Hopper GPU what its tensor cores do, and compares the answers with the model, bit for bit.

    probe_wgmma.cu, probe_mma.cu    one chain of raw instructions
    kernels                         the two as functions
    tiles                           operands that find a wrong model
    compare                         mismatches by hypothesis
    golden                          results that the tests replay

`python -m octile.lab.probe --golden FILE` on an H100 or H200. Nothing here has run on one yet: the kernels compile for
sm_90a, and in the tests' emulator `probe_wgmma` gives what the model gives.
"""
