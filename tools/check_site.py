"""Check in a browser that nothing runs off the pages of the site: `mkdocs build && python -m tools.check_site site`.

At 1280 pixels every line of code fits its box without being wrapped. At 400 pixels no page scrolls sideways, and a
table that is wider than the text scrolls in a box of its own. Nothing is loaded from another host. It needs playwright
and a Chromium in PATH.
"""

import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import sync_playwright

DESKTOP, PHONE = 1280, 400
FAULTS = """(desktop) => {
    const found = [];
    const root = document.documentElement;
    if (root.scrollWidth > root.clientWidth) found.push("the page scrolls sideways");
    for (const code of document.querySelectorAll("pre > code")) {
        code.style.whiteSpace = "pre";
        if (desktop && code.scrollWidth > code.clientWidth) {
            const [longest] = code.innerText.split("\\n").sort((a, b) => b.length - a.length);
            found.push(`code runs off (${longest.length} characters): ${longest.slice(0, 60)}`);
        }
        code.style.whiteSpace = "";
    }
    const fits = (box) => box.getBoundingClientRect().right <= window.innerWidth;
    const scrolls = (box) => ["auto", "scroll"].includes(getComputedStyle(box).overflowX);
    for (const table of document.querySelectorAll("table")) {
        let box = table.parentElement;
        while (box !== document.body && !(scrolls(box) && fits(box))) box = box.parentElement;
        if (box === document.body && !fits(table)) found.push("a table runs off: " + table.innerText.slice(0, 60));
    }
    return found;
}"""


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(site: Path) -> Iterator[str]:
    """Serve a folder on this machine; return its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def faults(site: Path) -> list[str]:
    """Return a line for each fault of each page."""
    found = []
    with serving(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for width in (DESKTOP, PHONE):
            page = browser.new_page(viewport={"width": width, "height": 900})
            requests: list[str] = []
            page.on("request", lambda request, into=requests: into.append(request.url))
            for file in sorted(site.rglob("index.html")):
                name = file.parent.relative_to(site).as_posix()
                page.goto(f"{address}{name}/", wait_until="load")
                found += [f"{name} at {width} pixels: {fault}" for fault in page.evaluate(FAULTS, width == DESKTOP)]
                local = (address, "data:", "blob:")
                found += [f"{name} loads {url}" for url in requests if not url.startswith(local)]
                requests.clear()
        browser.close()
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines))
    sys.exit(bool(lines))
