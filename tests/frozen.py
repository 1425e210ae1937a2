"""Is imported last by the server that forks processes: their garbage collections leave out what was imported before.

They would look at all of it, and copy its pages. As in pytest's own process, garbage is looked for seldom, and nothing
waits for the disk.
"""

import gc
import os

gc.freeze()
gc.set_threshold(10_000)
os.fsync = os.fstat
