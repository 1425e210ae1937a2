"""Measurements of a model during a run, which change nothing, and of the models in folders.

evaluator.py  held-out losses, losses of single tokens, scales of tiles, the search for a non-finite value
command.py    `octile eval`: its options
evaluate.py   its checks, its order of work, and what it prints
folders.py    a folder whose model is evaluated
text.py       the text on which it is evaluated
"""
