"""The page of a comparison of recipes with BF16.

result.py               the measurements, and the numbers that follow from them: gap, noise band, verdict
intervals.py            confidence intervals of a mean
power.py                how many pairs of runs show something
gradients.py            gradients compared with BF16's
token_differences.py    per-token losses compared with BF16's
file.py                 compare.json
summary.py, tables.py   the result as sentences and as tables
curves_figure.py, outcome_figure.py, gradient_figures.py, token_figures.py
page.py                 the page
"""
