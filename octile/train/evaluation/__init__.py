"""Measurements of a model during a run, which change nothing.

token_losses.py      the loss of each token of held-out text
diagnostics.py       scale statistics, and the first non-finite tensor
draft_acceptance.py  how often drafts of multi-token prediction are accepted
"""
