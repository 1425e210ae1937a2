"""Take the picture of the server's page for the documents: docs/images/serve.png.

    python -m tools.screenshot_page runs/tiny-deepseek_v3

It needs playwright and a Chromium in PATH. Clients of a load test make the page show speed and cache while it is taken.
"""

import asyncio
import shutil
import sys
import threading
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from octile.bench.serve.endpoint import serving
from octile.serve.http.stress import Stress, stress_test

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "serve.png"
STRESS = Stress(clients=8, requests=1000, new_tokens=128, prompt_words=16, seconds=45)


def main(run: Path) -> None:
    with serving(run, "--engine.n-drafts", "1") as url, sync_playwright() as playwright:
        threading.Thread(target=lambda: asyncio.run(stress_test(url, STRESS)), daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 700})
        page.goto(url)
        page.wait_for_timeout(20_000)
        page.get_by_label("mode").select_option("text")
        page.get_by_label("new tokens").fill("96")
        page.get_by_label("prompt").fill("class Reader:\n    def __init__(self, file):\n")
        page.get_by_role("button", name="Send").click()
        page.locator(".facts").wait_for(timeout=60_000)
        page.screenshot(path=PICTURE)
        browser.close()
    Image.open(PICTURE).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
