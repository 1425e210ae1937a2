"""`octile train` whose rank 1 is killed at a step, but not after a restart: python faulty_rank.py STEP ARGUMENTS…

For test_torchrun.py.
"""

import os
import sys

from octile.cli import main
from tests.train.strategy.bad_rank import die, fail_at

step, *arguments = sys.argv[1:]
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    fail_at(int(step), die)
main(["train", *arguments])
