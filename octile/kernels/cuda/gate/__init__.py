"""The Hopper kernels of the expert gate, of many rows and of few, with their launchers and the catalog of shapes."""
