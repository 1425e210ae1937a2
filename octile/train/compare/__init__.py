"""`octile compare`: BF16 and recipes trained from the same weights on the same batches.

command.py         the command line
comparison.py      its seeds, and the settings with which it was begun
compare.py         its runs, one after the other
run.py             one of them, and what is measured of it
visible_tokens.py  single tokens as a reader sees them
gradient_check.py  a recipe's gradients compared with BF16's
"""
