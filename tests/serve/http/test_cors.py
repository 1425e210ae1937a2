"""Scripts of other origins: what the server allows, and what a browser then lets them read."""

import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from octile.serve.http.config import check_origin

ORIGIN = "https://chat.example.org"
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
COMPLETION = {"model": "micro", "prompt": "a", "max_tokens": 5}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def preflight(served, origin: str, path: str = "/v1/completions") -> httpx.Response:
    return httpx.options(f"{served.url}{path}", headers={"origin": origin, **ASKED})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_preflight_of_an_allowed_origin_needs_no_key_and_allows_to_send_one(serve, path):
    answer = preflight(serve(origins=(ORIGIN, "http://other.example"), api_keys=("secret",)), ORIGIN, path)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_a_preflight_of_another_origin_is_refused(serve):
    answer = preflight(serve(origins=(ORIGIN,)), "https://evil.example")
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_no_origin_is_allowed_unless_it_is_given(serve):
    served = serve()
    answers = preflight(served, ORIGIN), httpx.get(f"{served.url}/v1/models", headers={"origin": ORIGIN})
    assert not any(name.startswith("access-control") for answer in answers for name in answer.headers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answers_name_the_origin_that_may_read_them(serve, stream):
    body = {**COMPLETION, "stream": stream}
    url = f"{serve(origins=(ORIGIN,)).url}/v1/completions"
    answer = httpx.post(url, json=body, headers={"origin": ORIGIN})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in httpx.post(url, json=body, headers={"origin": "https://e.com"}).headers


def test_any_origin_may_be_allowed(serve):
    answer = httpx.get(f"{serve(origins=('*',)).url}/v1/models", headers={"origin": "https://any.example"})
    assert answer.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/models", 401), ("/none", 404), ("/update_weights_from_disk", 403), ("/v1/completions", 405)],
)
def test_errors_may_be_read(serve, path, status):
    served = serve(origins=(ORIGIN,), api_keys=("secret",))
    method = "POST" if path.startswith("/update") else "GET"
    answer = httpx.request(method, f"{served.url}{path}", headers={"origin": ORIGIN})
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_a_defect_may_be_read(serve, monkeypatch, caplog):
    served = serve(origins=(ORIGIN,))
    monkeypatch.setattr(served.service.metrics, "text", lambda: 1 / 0)
    answer = httpx.get(f"{served.url}/metrics", headers={"origin": ORIGIN})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == ORIGIN


def test_when_to_retry_may_be_read(serve):
    served = serve(origins=(ORIGIN,))
    served.service.is_draining = True
    answer = httpx.post(f"{served.url}/v1/completions", json=COMPLETION, headers={"origin": ORIGIN})
    assert answer.headers["retry-after"] == "1"
    assert "Retry-After" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "origin", ["*", "https://a.example", "http://localhost:3000", "tauri://localhost", "http://[::1]:8000"]
)
def test_an_origin_that_browsers_send_is_accepted(origin):
    check_origin("allowed_origins", origin)


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("", "must be * or an origin"),
        ("null", "must be * or an origin"),
        ("a.example", "must be * or an origin"),
        ("https://A.example", "must be * or an origin"),
        ("https://a.example/", "must be * or an origin"),
        ('["https://a.example"]', "must be * or an origin"),
        ("https://*.example", "must be * or an origin"),
        ("https://a.example:443", "must leave out the default port :443"),
        ("http://a.example:80", "must leave out the default port :80"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin, message):
    with pytest.raises(ValueError, match=r"^allowed_origins ") as refusal:
        check_origin("allowed_origins", origin)
    assert message in str(refusal.value)


class EmptyPage(BaseHTTPRequestHandler):
    """An HTML page without content."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    """The origin of a server with an empty page."""
    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


FETCH = """async ([url, body]) => {
    const headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"};
    try {
        const response = await fetch(url, {method: "POST", headers, body: JSON.stringify(body)});
        return await response.text();
    } catch (error) { return error.name; }
}"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium in PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def fetch(browser, site):
    """Have a script of the site post to a server, in a browser; return what it can read."""
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(site)
        yield lambda served, body: page.evaluate(FETCH, [f"{served.url}/v1/completions", body])


@pytest.mark.slow
def test_a_script_of_an_allowed_origin_reads_answers_streams_and_errors(serve, site, fetch):
    served = serve(origins=(site,), api_keys=("secret",))
    assert '"completion_tokens":5' in fetch(served, COMPLETION)
    assert fetch(served, {**COMPLETION, "stream": True}).endswith("data: [DONE]\n\n")
    assert "max_tokens must be at least 1" in fetch(served, {**COMPLETION, "max_tokens": 0})


@pytest.mark.slow
def test_a_script_of_another_origin_reads_nothing(serve, fetch):
    served = serve(origins=(ORIGIN,), api_keys=("secret",))
    assert fetch(served, COMPLETION) == "TypeError"
    assert served.engine.added == 0
