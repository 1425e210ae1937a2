"""Training: from text to a run folder with a model, checkpoints, metrics and a report.

Each file and folder imports only what stands above it.

config.py           `TrainConfig` and the presets, without torch
source_digest.py    the version of the code, by which stores are reused and ranks compared
data/               from text to batches of tokens
model.py            the model that a configuration asks for: its recipe, and its shapes on the meta device
optimizer.py        the optimizer that it asks for
pipeline_layout.py  the pipeline that it asks for: its schedule, and the layers of its stages
memory/             what a run needs of its device, and what it saves for the backward pass
step/               a step on its device: launched, captured in CUDA graphs, and timed
strategy/           how the ranks of a run share model, batch and state
compute.py          what a step computes on the device with its strategy: gradients and the update
state.py            the state of a trainer: what a checkpoint holds, and how it is restored
evaluation/         what is measured of a model during a run, and `octile eval`
trainer.py          model, optimizer and data of a run: launches and collects its steps
run/                the folder of a run: checks, metrics, checkpoints, resuming
loop.py             the loop over steps, validations and checkpoints, and `train`, which sets a run up for it
shared_options.py   the options that `octile train` and `octile compare` share
compare/            `octile compare`
command.py          `octile train`: its options
"""
