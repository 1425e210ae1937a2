"""The compiler of CUDA kernels at run time: NVRTC, the cache on disk, the driver, and tensor maps."""
