"""Tests of the check that nothing runs off the pages of the site."""

import shutil

import pytest

from tools.check_site import faults

pytestmark = pytest.mark.skipif(not shutil.which("chromium"), reason="needs a Chromium in PATH")
LONG = 300 * "x"


def site(folder, body):
    (folder / "index.html").write_text(f'<!doctype html><meta name="viewport" content="width=device-width">{body}')
    return folder


def test_a_page_that_fits_has_no_faults(tmp_path):
    body = f'<pre><code>x = 1</code></pre><div style="overflow-x: auto"><table><tr><td>{LONG}</table></div>'
    assert faults(site(tmp_path, body)) == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f'<pre><code style="display: block; overflow: auto">{LONG}</code></pre>', ". at 1280 pixels: code runs off"),
        (
            f'<pre><code style="display: block; overflow: auto; white-space: pre-wrap">{"x " * 300}</code></pre>',
            ". at 1280 pixels: code runs off (600 characters)",
        ),
        (f'<div style="overflow: hidden"><table><tr><td>{LONG}</table></div>', ". at 400 pixels: a table runs off"),
        (f"<p>{LONG}", ". at 400 pixels: the page scrolls sideways"),
        ('<img src="http://127.0.0.1:9/x.png">', ". loads http://127.0.0.1:9/x.png"),
    ],
)
def test_each_fault_is_found(tmp_path, body, expected):
    assert any(line.startswith(expected) for line in faults(site(tmp_path, body)))
