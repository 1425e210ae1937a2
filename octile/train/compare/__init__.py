"""`octile compare`: BF16 and recipes trained from the same weights on the same batches.

command.py         the command line
compare.py         the runs of a comparison
run.py             one of them, and what is measured of it
gradient_check.py  a recipe's gradients compared with BF16's
"""
