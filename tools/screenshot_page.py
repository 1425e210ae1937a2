"""Take the picture of the server's page for the documents: docs/images/serve.png.

    python -m tools.screenshot_page runs/tiny-deepseek_v3
    python -m tools.screenshot_page runs/tiny-deepseek_v3 /tmp/pictures

The second command takes pictures to look at, in the folder: a chat on a wide and on a narrow screen, light and dark,
while a long answer streams and with thoughts and code in an answer. It needs playwright and a Chromium in PATH. Clients
of a load test make the page show speed and cache while the picture for the documents is taken.
"""

import asyncio
import shutil
import sys
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, expect, sync_playwright

from octile.bench.serve.endpoint import serving
from octile.serve.http.stress import Stress, stress_test

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "serve.png"
STRESS = Stress(clients=8, requests=1000, new_tokens=128, prompt_words=16, seconds=45)
SIZES = (1280, 800), (390, 844)
ANSWER = """<think>The list must be sorted first.
Then its middle is the median.</think>Sort the numbers and take the middle:

```python
def median(numbers):
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
```
For an even count this is the upper of the two."""


def take_picture_of_documents(browser: Browser, url: str) -> None:
    threading.Thread(target=lambda: asyncio.run(stress_test(url, STRESS)), daemon=True).start()
    page = browser.new_page(viewport={"width": 900, "height": 700})
    page.goto(url)
    page.wait_for_timeout(20_000)
    page.get_by_label("mode").select_option("text")
    page.get_by_label("new tokens").fill("96")
    page.get_by_label("prompt", exact=True).fill("class Reader:\n    def __init__(self, file):\n")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".facts")).to_contain_text("limit of tokens", timeout=60_000)
    page.screenshot(path=PICTURE)
    Image.open(PICTURE).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


def take_pictures(browser: Browser, url: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for width, height in SIZES:
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(url)
            page.get_by_text("system prompt").click()
            page.get_by_label("system prompt").fill("You write Python.")
            page.get_by_label("new tokens").fill("400")
            page.get_by_label("prompt", exact=True).fill("class Reader:")
            page.get_by_role("button", name="Send").click()
            page.locator(".facts").wait_for()
            page.wait_for_timeout(1_000)
            page.screenshot(path=folder / f"{width}_{scheme}_streams.png")
            page.get_by_role("button", name="Send").wait_for(timeout=60_000)
            page.get_by_text("system prompt").click()
            page.evaluate("answer => render([...document.querySelectorAll('.message')].at(-1), answer)", ANSWER)
            page.screenshot(path=folder / f"{width}_{scheme}_folded.png")
            page.get_by_text("thoughts").click()
            page.screenshot(path=folder / f"{width}_{scheme}_unfolded.png")
            page.close()


def main(run: Path, folder: Path | None = None) -> None:
    with serving(run, "--engine.n-drafts", "1") as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        if folder is None:
            take_picture_of_documents(browser, url)
        else:
            take_pictures(browser, url, folder)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
