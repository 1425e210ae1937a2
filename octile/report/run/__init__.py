"""The page of one training run.

metrics.py              reads a run folder
spikes.py               detects loss spikes
curves.py               figures over the steps: loss, learning rate, gradient norm, throughput
experts_and_scales.py   figures of expert load and tile scales
page.py                 the page, and its figures as files
"""
