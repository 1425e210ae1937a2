"""Portable kernels, for every NVIDIA GPU from sm_80 on.

Each file has one `launch` function an operator, called by `octile.ops` with arguments that are checked already. Nothing
here reads a tensor on the host: grids follow from shapes alone, so every launch can be captured in a CUDA graph.

    codes       8-bit codes to and from numbers, in integer arithmetic
    machine     what the GPU can do, and the tile that suits a product
    quantize    amax, scale and cast in one pass where a block fits into a program, in two where it does not; and back
    product     the sum over K that all products share: the scales applied every 128
    matmul      x · wᵀ
    grouped     the same for a mixture of experts: sorted rows, masked rows, tokens summed over
    compiled    compiles all of them without a GPU: registers, shared memory, spills
"""
