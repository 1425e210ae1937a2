"""A run around its steps: its folder, what is checked before it begins, and what is stored, printed and resumed.

folder.py         the files of a run, and its lock
tokens.py         its tokens: prepared in its folder, or those that it began with
metrics.py        measurements of steps, written so that a crash loses none
console.py        the terminal output of a run
rank_checks.py    whether the ranks are as many as configured, and have the same settings and code
recipe_check.py   whether ranks and model can be trained with the recipe
out_of_memory.py  what to change in a run whose memory runs out, from what a sequence takes
disk_space.py     whether the disk has room for a run's checkpoints and model
duration.py       how long a run takes at least on a CPU
kernels_ahead.py  kernels of its first step, compiled while its data is prepared
deterministic.py  runs that give the same bits again
fine_tune.py      a run that starts from a checkpoint's weights
best_model.py     weights and amax histories at the lowest held-out loss
checkpoints.py    how checkpoints are written and found
machine.py        what decides the bits of a run besides its configuration
resume.py         what a resumed run takes from its folder and its checkpoint
recorder.py       what `octile train` does between its steps
profile.py        `octile train --profile`: where the time of a step goes
spikes.py         spikes of the loss, with the sequence that has the largest loss
results.py        what a run leaves behind: model, sample, summary and report
"""
