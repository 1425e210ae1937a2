"""Hopper's kernels in CUDA C++, compiled at their first use.

    jit/            CUDA C++ → machine code → launch
      specialize      template and constants → source text → kernel
      compiler        source text → machine code, by NVRTC or NVCC
      driver          machine code → a loaded kernel and its launches
      launch          launches of specialized kernels, which may overlap the kernel before them
      prepared        kernels with a launch shape, and the cache of their launches
      tensor_map      TMA descriptors
      mapped          prepared kernels whose first arguments are TMA descriptors
      wgmma           generates the header with the wgmma instruction
      ptx.cuh         wrappers of other PTX instructions
    gemm/           gemm.cu with its headers; from a request to its launch:
      request         GemmRequest and Operand, and whether the kernels support a request
      launch_cache    launches, found by the key of a request
      launch_plan     configuration, grid, tensor maps and arguments of a launch
      candidates      the possible configurations for a problem, and the choice among them
      cost_model      the problem and the chip, and the estimate that ranks configurations
      tuned           configurations that the user has measured
      config          the constants that specialize the kernel
      num_sms         how many SMs GEMMs may use
      bf16            GEMMs of BF16 by the same kernel
      catalog         the GEMMs whose kernels are compiled without a GPU
    few_rows/       a decode step's layers of a few rows: GEMMs, mixture of experts, attention
    quantize/       the quantization kernels, their launcher and their catalog
    gate/           the expert gate
    routing/        counts, rows and balance of experts
    attention/      latent attention (MLA), and the lightning indexer that chooses its keys:
      mla_decode      decoding over the paged cache
      sparse_mla      attention to the top-k keys; sparse_mla_backward, its gradients; sparse_weights, its weights
      mqa_logits      the logits of the indexer
      top_keys        the keys with the largest logits
    compile_all.py  compiles the kernels of the catalogs without a GPU

Nothing is compiled when octile is installed, and the driver is loaded at the first launch.
"""
