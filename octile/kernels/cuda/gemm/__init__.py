"""The Hopper GEMMs: from a request to a configuration, a launch plan and a launch; and their CUDA C++ sources."""
