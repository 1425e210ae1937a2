"""Is imported last by the server that forks processes: their garbage collections leave out what was imported before.

They would look at all of it, and copy its pages.
"""

import gc

gc.freeze()
