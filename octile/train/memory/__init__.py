"""Memory of a training run.

device.py             what a device has, what of it a process can have, and errors that say it ran out
cpu.py                what the ranks of a run need on a CPU
check.py              whether a run can fit, before it begins
advice.py             what to change in a run that needs more
saved_activations.py  which activations a GPU saves for the backward pass instead of recomputing them
"""
