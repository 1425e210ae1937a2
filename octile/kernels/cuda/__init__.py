"""Hopper's own kernels in CUDA C++, compiled when they are first used.

    jit/            CUDA C++ → machine code → launch
      specialize      template and constants → source text → kernel
      compiler        source text → machine code, by NVRTC or NVCC
      driver          machine code → a kernel that can be launched
      tensor_map      TMA descriptors
      wgmma, ptx.cuh  wrappers of instructions
    gemm/           gemm.cu with its headers; a request on its way to the launch:
      request         GemmRequest and Operand, and whether the kernels support them
      launch_cache    launches found by the key of a request
      launch_plan     configuration, grid, tensor maps and arguments of a launch
      candidates      the possible configurations of a problem; cost_model ranks them, tuned has those measured
      config          the constants that specialize the kernel
      num_sms         how many SMs GEMMs may use
      catalog         the shapes whose kernels are compiled without a GPU
    quantize/       quantization kernels, their launcher and their catalog
    compile_all.py  compiles both catalogs

Nothing here is imported on a machine without a GPU unless it is needed, and nothing is compiled when octile is
installed.
"""
