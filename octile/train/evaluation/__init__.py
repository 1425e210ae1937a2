"""Measurements of a model during a run, which change nothing.

evaluator.py         held-out losses, losses of single tokens, scales of tiles, the search for a non-finite value
diagnostics.py       histograms of scales, and the first non-finite tensor
draft_acceptance.py  how often drafts of multi-token prediction are accepted
visible_tokens.py    single tokens as a reader sees them
"""
