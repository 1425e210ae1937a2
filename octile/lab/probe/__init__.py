"""Compare a Hopper GPU with the tensor core model, bit for bit.

    probe_wgmma.cu, probe_mma.cu    kernels that run one chain of instructions
    kernels.py                      the two kernels as functions
    tiles.py                        operands that expose a wrong model
    compare.py                      mismatches of the model and of alternative hypotheses
    golden.py                       hardware results in a file, which the tests replay
    products.py                     octile's GEMM kernels compared with the model

On an H100 or H200, `python -m octile.lab.probe --golden FILE` compares instructions, and
`python -m octile.lab.probe.products` compares GEMMs.
"""
