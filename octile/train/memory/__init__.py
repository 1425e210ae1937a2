"""Memory of a training run.

device.py             what a device has, and what of it a process can have
cpu.py                what the ranks of a run need on a CPU
check.py              whether a model can fit, and advice when memory runs out
saved_activations.py  which activations a GPU saves for the backward pass instead of recomputing them
"""
