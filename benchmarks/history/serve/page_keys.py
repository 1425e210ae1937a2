"""Memory of the keys of cached pages until each page has been used three times: python page_keys.py 50000"""

import os
import sys
from pathlib import Path

from octile.serve.engine.pages import PageAllocator


def resident() -> float:
    """MiB of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


n_pages = int(sys.argv[1])
pages, begin = PageAllocator(n_pages), resident()
for used in range(3 * n_pages + 1):
    if used % (n_pages // 4) == 0:
        print(f"{used:7,} pages used, {pages.n_cached:6,} cached, {resident() - begin:5.1f} MiB")
    page = pages.allocate(1)
    pages.cache(page[0], os.urandom(16))
    pages.free(page)
