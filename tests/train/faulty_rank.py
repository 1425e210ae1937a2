"""`octile train` whose rank 1 fails at a step, for test_torchrun.py: python faulty_rank.py FAULT STEP ARGUMENTS…

FAULT is kill (SIGKILL, but not after a restart) or hang.
"""

import os
import signal
import sys
import time

from octile.cli import main
from octile.train.trainer import Trainer

fault, step, *arguments = sys.argv[1:]
compute = Trainer._compute


def faulty_compute(self, tokens_BS):
    if os.environ["RANK"] == "1" and self.steps_done + 1 == int(step):
        if fault == "kill" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # torchrun ends it at once
            time.sleep(600)
    return compute(self, tokens_BS)


Trainer._compute = faulty_compute
main(["train", *arguments])
