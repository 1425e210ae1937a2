"""Portable kernels, for every NVIDIA GPU from sm_80 on.

Each file has one `launch` function an operator, called with arguments that are checked already. Nothing
here reads a tensor on the host: grids follow from shapes alone, so every launch can be captured in a CUDA graph.

    codes       8-bit codes to and from numbers, in integer arithmetic
    machine     what the GPU can do, and the tile that suits a product
    quantize    amax, scale and cast in one pass where a block fits into a program, in two where it does not; and back
    scaling     what every cast shares: a block's scale, and its values divided by it
    squares     what the casts that turn a matrix share: 128×128 numbers, cast along the rows and the columns
    transpose   casts along the rows and the columns in one read; requantising for the other side; weights both ways
    swiglu      SwiGLU and its gradients, cast as they are made
    norm        RMSNorm, cast as it is made
    packed12    E5M6: two codes in three bytes
    tuning      the sizes that the casts' speed depends on
    product     the sum over K that all products share: the scales applied every 128
    matmul      x · wᵀ
    grouped     the same for a mixture of experts: sorted rows, masked rows, tokens summed over
    tensor_core the sum of one GPU's tensor core, modelled on any other
    compiled    compiles all of them without a GPU: registers, shared memory, spills
"""
