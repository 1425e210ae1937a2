"""Asks a Hopper GPU what it computes, and compares the answers with the model of its tensor cores, bit for bit.

    probe_wgmma.cu, probe_mma.cu    one chain of raw instructions
    kernels                         the two as functions
    tiles                           operands that find a wrong model
    compare                         mismatches by hypothesis
    golden                          results that the tests replay
    products                        whole products of octile's own kernels

`python -m octile.lab.probe --golden FILE` on an H100 or H200; `python -m octile.lab.probe.products` for the last.
"""
