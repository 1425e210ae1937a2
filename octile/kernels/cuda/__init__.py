"""Hopper kernels in CUDA C++, compiled when they are first used. Read it in this order:

    product.cu, include/    the kernel; include/ptx.cuh has the instructions that C++ has no words for
    wgmma.py                the text of the tensor cores' instruction, which differs with the tile
    config.py               the constants that specialise the kernel
    problem.py, choose.py   which of them for which product, by arithmetic; tuned.py: what was measured to be faster
    compiler.py             text → machine code (NVRTC or NVCC), which ../cache.py keeps on disk
    driver.py               machine code → a kernel that can be launched
    tensor_map.py           what the copy engine knows of a tensor
    jit.py                  template and constants → kernel
    plan.py, launch.py      tensors → a launch; limits.py: how many multiprocessors it may use
    again.py                a product that looks like an earlier one: launched at once
    products.py             the products, as octile.kernels.backends calls them
    catalogue.py            every kernel that DeepSeek-V3's shapes need, compiled without a GPU
    casts.py                the casts, as octile.kernels.backends calls them, with their kernels: tiles.cu, squares.cu,
                            swiglu_backward.cu, rms_norm.cu, dequantize.cu; include/scale.cuh has what they share
    cast_catalogue.py       what each of them launches

Nothing here is imported on a machine without a GPU unless asked for, and nothing is compiled when octile is installed.
"""
