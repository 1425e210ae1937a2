"""Portable Triton kernels for NVIDIA GPUs from sm_80 on.

Each operator has a `launch` function, which takes checked arguments. No tensor is read on the host: grids follow from
shapes, so every launch can be captured in a CUDA graph.

    fp8_bits          conversion of 8- and 12-bit encoded values in integer arithmetic
    e5m6_rows         loads and stores of packed E5M6: two values in three bytes
    device            properties of the GPU, and the tile that suits a GEMM
    launch_config     sizes and numbers of warps on which the speed of kernels depends
    layout            copies of operands for GEMMs: contiguous along K
    scaling           the scale of a block, and the division of its values by the scale
    blocks            stores of a 128×128 block, quantized along rows and, transposed, along columns
    quantize          block quantization and dequantization; quantize_kernels has the kernels
    transpose         quantization along rows and columns in one read; requantization; weights with their transposes
    swiglu            SwiGLU and its gradients, fused with quantization
    norm              RMSNorm and its gradients, fused with quantization
    rope              rotary position embedding of latent attention
    index_rows        queries and keys of the lightning indexer
    latent_cache      rows of the paged latent cache of latent attention
    paged_attention   absorbed attention over it, split along the positions, for decoding
    ragged_attention  causal attention of texts of any lengths, for prompts
    packed_attention  the same with gradients, for training on packed texts
    sample_tokens     the next tokens, by the Gumbel-max trick
    row_invariant     dense GEMMs in high precision whose rows do not depend on each other
    permute           rows of tokens to their experts and back
    tensor_table      addresses of many tensors, for kernels that work on all of them
    overlap           starts before the previous kernel has ended
    adamw             AdamW
    gradient_norms    norms of many gradients, for clipping
    k_loop            the loop over k-blocks of all GEMMs, with scales applied at every k-block
    matmul            dense GEMM, a · bᵀ
    grouped           grouped GEMMs of a mixture of experts: contiguous, masked, wgrad
    tensor_core       bit-exact model of a GPU's tensor core
    compile_all       compiles all kernels without a GPU: registers, shared memory, spills
    compile_cases     sizes and tensors of what the modules have it compile
"""
