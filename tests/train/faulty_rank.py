"""`octile train` whose rank 1 fails at a step, for test_torchrun.py: python faulty_rank.py FAULT STEP ARGUMENTS…

FAULT is kill (SIGKILL, but not after a restart) or hang.
"""

import os
import signal
import sys
import time

from octile.cli import main
from tests.train.bad_rank import die, fail_at

fault, step, *arguments = sys.argv[1:]


def fail() -> None:
    if fault == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        die()
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends it at once
        time.sleep(600)


if os.environ["RANK"] == "1":
    fail_at(int(step), fail)
main(["train", *arguments])
