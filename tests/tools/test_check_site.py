"""Tests of the check that nothing runs off the pages of the site."""

import shutil

import pytest

from tools.check_site import faults

pytestmark = pytest.mark.skipif(not shutil.which("chromium"), reason="needs a Chromium in PATH")
LONG = 300 * "x"


FITS = f'<pre><code>x = 1</code></pre><div style="overflow-x: auto"><table><tr><td>{LONG}</table></div>'
FAULTY = {  # a page's folder: its body, and a fault of it
    "code": (f'<pre><code style="display: block; overflow: auto">{LONG}</code></pre>', "at 1280 pixels: code runs off"),
    "wrapped": (
        f'<pre><code style="display: block; overflow: auto; white-space: pre-wrap">{"x " * 300}</code></pre>',
        "at 1280 pixels: code runs off (600 characters)",
    ),
    "table": (f'<div style="overflow: hidden"><table><tr><td>{LONG}</table></div>', "at 400 pixels: a table runs off"),
    "wide": (f"<p>{LONG}", "at 400 pixels: the page scrolls sideways"),
    "picture": ('<img src="http://127.0.0.1:9/x.png">', "loads http://127.0.0.1:9/x.png"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[str]:
    """The faults of a site of all pages: a browser takes a second to start."""
    site = tmp_path_factory.mktemp("site")
    for name, body in {".": FITS, **{name: body for name, (body, _) in FAULTY.items()}}.items():
        (site / name).mkdir(exist_ok=True)
        head = '<!doctype html><meta name="viewport" content="width=device-width">'
        (site / name / "index.html").write_text(head + body)
    return faults(site)


def test_a_page_that_fits_has_no_faults(found):
    assert [line for line in found if line.startswith(". ")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTY)
def test_each_fault_is_found(found, name):
    assert any(line.startswith(f"{name} {FAULTY[name][1]}") for line in found)
