"""One training step: launched by the host, computed on a device, and collected later.

progress.py        how far a run is, and what its next step takes from the configuration
passes.py          forward and backward passes of this rank's model
skips.py           which steps are skipped, and when a run must stop
captured.py        a step as CUDA graphs
launched.py        the steps that are launched and not collected
results.py         what the device writes and the host collects later
clock.py           how long each step took on its device
diagnostics.py     histograms of scales, and the first non-finite tensor
kernel_records.py  what the profiler records of a GPU
"""
