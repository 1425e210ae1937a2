"""The Hopper kernels that quantize, with their launcher and the catalog of their shapes."""
