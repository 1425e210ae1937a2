"""Training: from text to a run folder with a model, checkpoints, metrics and a report.

config.py         `TrainConfig` and the presets, without torch
source_digest.py  the version of the code, by which stores are reused and ranks compared
data/             from text to batches of tokens
command.py        `octile train`: its options; shared_options.py: those that `octile compare` has, too
loop.py           the loop over steps, validations and checkpoints, and `train`, which sets a run up for it
compute.py        what a step computes on the device with its strategy: gradients and the update
state.py          the state of a trainer: what a checkpoint holds, and how it is restored
trainer.py        model, optimizer and data of a run: launches and collects its steps
step/             a step on its device: launched, captured in CUDA graphs, and timed
strategy/         how the ranks of a run share model, batch and state
evaluation/       what is measured of a model during a run, and `octile eval`
memory/           what a run needs of its device, and what it saves for the backward pass
run/              the folder of a run: checks, metrics, checkpoints, resuming
compare/          `octile compare`
"""
