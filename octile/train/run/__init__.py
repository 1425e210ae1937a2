"""A run around its steps: its folder, what is checked before it begins, and what is stored, printed and resumed.

folder.py         the files of a run, and its lock
metrics.py        measurements of steps, written so that a crash loses none
console.py        the terminal output of a run
recipe_check.py   whether ranks and model can be trained with the recipe
duration.py       how long a run takes at least on a CPU
deterministic.py  runs that give the same bits again
fine_tune.py      a run that starts from a checkpoint's weights
state.py          the state of a trainer: what a checkpoint holds, and how it is restored
checkpoints.py    how checkpoints are written and found
best_model.py     weights and amax histories at the lowest held-out loss
resume.py         what a resumed run takes from its folder
source_digest.py  by which ranks and resumed runs find out that they run different code
"""
