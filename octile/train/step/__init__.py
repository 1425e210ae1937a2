"""One training step on its device.

captured.py        a step as CUDA graphs
results.py         what the device writes and the host reads later
clock.py           how long each step took on its device
profile.py         `octile train --profile`: where the time of a step goes
kernel_records.py  what the profiler records of a GPU
"""
