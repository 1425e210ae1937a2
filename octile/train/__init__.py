"""Training: from text to a run folder with a model, checkpoints, metrics and a report.

config.py        `TrainConfig` and the presets, without torch
corpus.py        documents from a folder, files, the standard library or a hub dataset
text_filter.py   what of the installed packages is text to train on
shared_spans.py  spans of held-out text that are cut out of the training text
corpus_index.py  a first pass over a corpus: duplicates, and which documents are held out
data.py          from text to tokens on disk
token_store.py   a folder of tokens, memory-mapped
token_cache.py   token stores that runs share
batches.py       the order of training, a function of seed and step; batches that a thread prepares

loop.py          `octile train`
trainer.py       the state of a run, and one step
trainer_state.py what a checkpoint's state.json holds of it
state_layout.py  which rows of its tensors each rank has
spread_experts.py    the experts of a run on several ranks
captured_step.py a step as CUDA graphs
step_results.py  what the device writes and the host reads later
step_clock.py    how long each step took on its device
best_model.py    weights and amax histories at the lowest held-out loss
run_folder.py    the files of a run, and its lock
resume.py        what a resumed run takes from its folder
signals.py       Ctrl-C and SIGTERM
fine_tune.py     a run that starts from a checkpoint's weights
duration.py      how long a run takes at least on a CPU
memory.py        memory checks, and advice when memory runs out
device_memory.py what a device has, and what of it a process can have
deterministic.py runs that give the same bits again
diagnostics.py   scale statistics, and the first non-finite tensor
profile.py       `octile train --profile`; kernel_records.py is what the profiler records of a GPU
console.py       the terminal output of a run

compare.py       `octile compare`; compared_run.py, gradient_check.py and token_losses.py are its parts
draft_acceptance.py   how often drafts of multi-token prediction are accepted
"""
