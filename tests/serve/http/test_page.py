"""The page at / in a real browser."""

import re
import shutil

import pytest

from octile.serve.http.config import Limits, Parsers
from tests.serve.http.conftest import wait_until

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium in PATH to show the page in")


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Open the page of a server; it must load nothing from elsewhere and have no error in its console."""
    contexts, problems = [], []

    def opened(served, **options):
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("request", lambda r: problems.append(r.url) if not r.url.startswith((served.url, "data:")) else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if "Policy" in message.text else None)
        page.goto(served.url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


@pytest.fixture(scope="module")
def shared_page(browser, served):
    page = browser.new_page()
    page.goto(served.url)
    yield page
    page.close()


def send(page, text: str) -> None:
    page.get_by_label("prompt", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


@pytest.mark.slow
def test_a_thought_of_its_own_field_is_folded_before_the_answer(serve, open_page):
    page = open_page(serve(template="a", answer=list("<think>why</think>because"), parsers=Parsers("deepseek_r1")))
    send(page, "Why?")
    sync_api.expect(page.locator(".facts")).to_contain_text("finished")
    message = page.locator(".message").nth(1)
    assert message.inner_text() == "thoughts\nbecause"
    assert message.locator("details div").text_content() == "why"


def test_a_chat_in_the_browser(serve, open_page):
    page = open_page(serve())
    sync_api.expect(page.locator("#about")).to_have_text(
        "micro · context 4096 tokens · a base model without a chat template: a plain one is used"
    )
    page.get_by_label("new tokens").fill("40")
    send(page, "Hello <b>there</b>")
    sync_api.expect(page.locator(".facts")).to_contain_text("40 tokens")
    messages = page.locator(".message")
    assert messages.nth(0).inner_text() == "Hello <b>there</b>"
    assert messages.nth(1).inner_text().startswith("<|begin|>User: Hello <b>there</b>\n\nAssistant:")
    page.get_by_label("new tokens").fill("200")
    send(page, "more")
    sync_api.expect(messages).to_have_count(4)
    sync_api.expect(messages.nth(3)).to_contain_text("User: more")


def test_a_text_is_continued_in_the_browser(serve, open_page):
    page = open_page(serve())
    page.get_by_label("mode").select_option("text")
    page.get_by_label("new tokens").fill("3")
    send(page, "def f")
    sync_api.expect(page.locator(".facts")).to_contain_text("3 tokens")
    assert page.locator(".message").inner_text().startswith("def f<|begin|>")


def test_the_browser_shows_speed_cache_and_acceptance_and_stops(serve, open_page):
    served = serve(step_seconds=0.01, n_pages=100)
    page = open_page(served)
    page.get_by_label("new tokens").fill("4000")
    send(page, "a")
    sync_api.expect(page.locator("#requests")).to_have_text("1, 0")
    sync_api.expect(page.locator("#speed")).not_to_have_text("0.0")
    curve = page.get_by_role("img", name="tokens/s in the last minute highest")
    sync_api.expect(curve).to_be_visible()
    assert float(page.locator("#highest").inner_text().removeprefix("highest ")) > 0
    sync_api.expect(page.locator("#acceptance")).to_have_text("50%")
    assert page.locator("#cache").inner_text() != "0.0%"
    page.get_by_role("button", name="Stop").click()
    wait_until(served.is_idle)
    sync_api.expect(page.locator(".facts")).to_contain_text("stopped")
    tokens, speed = re.match(
        r"(\d+) tokens · ([\d.]+) tokens/s · first after", page.locator(".facts").inner_text()
    ).groups()
    assert int(tokens) > 0
    assert float(speed) > 0
    sync_api.expect(page.locator("#requests")).to_have_text("0, 0")


@pytest.mark.slow
@pytest.mark.parametrize(
    "viewport",
    [pytest.param((390, 844), id="390"), pytest.param((1280, 800), id="1280", marks=pytest.mark.exhaustive)],
)
def test_meters_stay_in_view_while_a_long_answer_streams(serve, open_page, viewport):
    served = serve(step_seconds=0.005)
    page = open_page(served, viewport={"width": viewport[0], "height": viewport[1]})
    page.get_by_label("new tokens").fill("3900")
    send(page, "a\n" * 20)
    answer = page.locator(".message").nth(1)
    wait_until(lambda: answer.bounding_box()["height"] > 1500)
    sync_api.expect(page.locator(".facts")).to_contain_text("being written")
    for meter in ("#speed", "#cache", "#acceptance", "#requests"):
        box = page.locator(meter).bounding_box()
        assert 0 <= box["y"] <= 120
        middle = [box["x"] + 5, box["y"] + box["height"] / 2]
        on_top = "([x, y]) => document.elementFromPoint(x, y).id"  # nothing lies over it
        assert page.evaluate(on_top, middle) == meter.removeprefix("#")
    page.get_by_role("button", name="Stop").click()
    wait_until(served.is_idle)


@pytest.mark.slow
def test_code_between_fences_is_monospaced_and_is_no_markup(serve, open_page):
    page = open_page(serve(template="{{ messages[0].content }}"))
    page.get_by_label("new tokens").fill("60")
    send(page, "Before\n\n```python\nif a < b:\n    <b>c</b>\n```\nafter")
    sync_api.expect(page.locator(".facts")).to_contain_text("limit of tokens")
    code = page.locator(".message pre").first
    assert code.inner_text() == "if a < b:\n    <b>c</b>\n"
    assert "monospace" in code.evaluate("element => getComputedStyle(element).fontFamily")
    assert page.locator(".message").nth(1).locator("b").count() == 0
    assert page.locator(".message [data-kind=text]").first.inner_text() == "Before"
    assert page.locator(".message [data-kind=text]").nth(1).inner_text().startswith("after")


def test_thoughts_are_folded_and_can_be_unfolded(serve, open_page):
    page = open_page(serve(template="{{ messages[0].content }}"))
    page.get_by_label("new tokens").fill("60")
    send(page, "<think>a secret</think>the answer")
    sync_api.expect(page.locator(".facts")).to_contain_text("limit of tokens")
    thought = page.locator(".message details").first
    sync_api.expect(thought.locator("div")).to_be_hidden()
    assert page.locator(".message [data-kind=text]").first.inner_text().startswith("the answer")
    thought.get_by_text("thoughts").click()
    assert thought.locator("div").inner_text() == "a secret"


@pytest.mark.slow
def test_thoughts_that_are_unfolded_stay_so_while_the_answer_is_written(serve, open_page):
    served = serve(step_seconds=0.005, template="{{ messages[0].content }}")
    page = open_page(served)
    page.get_by_label("new tokens").fill("2000")
    send(page, "<think>a secret</think>the answer")
    thought = page.locator(".message details").first
    thought.get_by_text("thoughts").click()
    tokens = page.locator(".facts").inner_text()
    sync_api.expect(page.locator(".facts")).not_to_have_text(tokens)
    assert thought.locator("div").is_visible()
    page.get_by_role("button", name="Stop").click()
    wait_until(served.is_idle)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("a", [["text", "a"]]),
        ("<think>a", [["thought", "a"]]),
        ("a</think>\n\nb", [["thought", "a"], ["text", "b"]]),
        ("<think>a</think>b<think>c</think>", [["thought", "a"], ["text", "b"], ["thought", "c"]]),
        ("```\na", [["code", "a"]]),
        ("```\n<think>\n```\n", [["code", "<think>\n"]]),
        ("a ``` b", [["text", "a ``` b"]]),
        ("a\n```py", [["text", "a\n```py"]]),
        ("```\na\n```\nb\n```\nc\n```", [["code", "a\n"], ["text", "b"], ["code", "c\n"]]),
    ],
)
def test_the_parts_of_an_answer(shared_page, answer, parts):
    assert shared_page.evaluate("answer => [...parts(answer)]", answer) == parts


def test_a_system_prompt_goes_before_each_chat(serve, open_page):
    page = open_page(serve(template="{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"))
    page.get_by_label("new tokens").fill("30")
    page.get_by_text("system prompt").click()
    page.get_by_label("system prompt").fill("Be brief.")
    sync_api.expect(page.locator("summary")).to_have_text("system prompt · in use")
    messages = page.locator(".message")
    for n, text in enumerate(("one", "two"), start=1):
        send(page, text)
        sync_api.expect(page.get_by_text("limit of tokens")).to_have_count(n)
        assert messages.nth(2 * n - 1).inner_text().startswith("[system] Be brief.\n[user] one\n")


@pytest.mark.slow
def test_a_text_that_is_continued_has_no_system_prompt(serve, open_page):
    page = open_page(serve())
    page.get_by_label("mode").select_option("text")
    sync_api.expect(page.get_by_text("system prompt")).to_be_hidden()
    page.get_by_label("mode").select_option("chat")
    sync_api.expect(page.get_by_text("system prompt")).to_be_visible()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chat", pytest.param("text", marks=pytest.mark.exhaustive)])
def test_what_is_cleared_while_it_is_written_leaves_nothing(serve, open_page, mode):
    served = serve(step_seconds=0.01)
    page = open_page(served)
    page.get_by_label("mode").select_option(mode)
    page.get_by_label("new tokens").fill("4000")
    send(page, "alpha")
    sync_api.expect(page.locator(".message").last).to_contain_text("alpha")
    wait_until(lambda: served.engine.requests)
    page.get_by_role("button", name="Clear").click()
    wait_until(served.is_idle)
    page.get_by_label("new tokens").fill("30")
    send(page, "omega")
    sync_api.expect(page.locator(".facts")).to_contain_text("30 tokens")
    assert "alpha" not in page.locator("#messages").inner_text()
    assert page.locator(".facts").count() == 1


def test_an_error_is_shown_in_the_browser(serve, open_page):
    page = open_page(serve(Limits(new_tokens=10)))
    send(page, "a")
    sync_api.expect(page.locator(".facts")).to_contain_text("max_tokens must be at most 10")
    assert page.get_by_label("prompt", exact=True).input_value() == "a"


@pytest.mark.slow
def test_the_end_of_an_answer_is_above_the_footer(serve, open_page):
    page = open_page(serve(), viewport={"width": 390, "height": 844})
    page.get_by_label("new tokens").fill("600")
    send(page, "a\n" * 40)
    sync_api.expect(page.locator(".facts")).to_contain_text("600 tokens")
    end, footer = page.locator(".facts").bounding_box(), page.locator("footer").bounding_box()
    assert end["y"] + end["height"] <= footer["y"] + 1


@pytest.mark.slow
def test_an_empty_number_of_new_tokens_is_the_rest_of_the_context(serve, open_page):
    page = open_page(serve(max_position=100))
    page.get_by_label("new tokens").fill("")
    page.get_by_label("temperature").fill("")
    send(page, "a")
    sync_api.expect(page.locator(".facts")).to_contain_text("limit of tokens")


@pytest.mark.one_case
@pytest.mark.parametrize("width", [320, pytest.param(390, marks=pytest.mark.exhaustive), 1280])
def test_controls_of_a_row_are_in_line_and_show_their_text(serve, open_page, width):
    page = open_page(serve(), viewport={"width": width, "height": 844})
    page.get_by_label("mode").select_option("text")
    boxes = [label.bounding_box() for label in page.locator("label").all()]
    heights = {box["height"] for box in boxes}
    assert len(heights) == 1, "controls that end in line begin in line, too"
    clipped = """[...document.querySelectorAll("label, select, button, dt, dd")]
        .filter(element => element.scrollWidth > element.clientWidth).map(element => element.textContent)"""
    assert page.evaluate(clipped) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_key_is_asked_for_in_the_browser(serve, open_page):
    page = open_page(serve(api_keys=("secret",)))
    sync_api.expect(page.locator("#about")).to_contain_text("the API key is missing")
    send(page, "a")
    sync_api.expect(page.locator(".facts.error")).to_contain_text("fill in the field “API key” below")
    page.get_by_label("API key").fill("secret")
    page.get_by_label("API key").blur()
    sync_api.expect(page.locator("#about")).to_contain_text("micro")


def test_a_missing_key_is_asked_for_without_words_of_http(serve, open_page):
    page = open_page(serve(api_keys=("secret",)))
    sync_api.expect(page.locator("#about")).to_have_text("the API key is missing · fill in the field “API key” below")


@pytest.mark.slow
def test_a_key_that_no_request_can_carry_is_refused_by_its_name(serve, open_page):
    page = open_page(serve(api_keys=("secret",)))
    page.get_by_label("API key").fill("ключ")
    page.get_by_label("API key").blur()
    sync_api.expect(page.locator("#about")).to_have_text("the API key must have only characters of ASCII")


@pytest.mark.one_case
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_telephone_and_has_contrast(serve, open_page, scheme):
    page = open_page(serve(), viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.get_by_text("system prompt").click()
    send(page, "<think>a</think>" + "a" * 500)
    sync_api.expect(page.locator(".facts")).to_contain_text("tokens/s")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for element in ("body", "#about", "#send", ".message.user", ".facts", "label", "summary", ".message summary"):
        assert contrast(page, element) >= 4.5, element  # WCAG 2.1, level AA


def contrast(page, element: str) -> float:
    """The contrast of an element's text with what is behind it, as WCAG 2.1 defines it."""
    colors = page.locator(element).first.evaluate(
        """element => {
            let behind = element;
            while (getComputedStyle(behind).backgroundColor.endsWith(", 0)")) behind = behind.parentElement;
            return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
        }"""
    )
    luminances = [luminance(color) for color in colors]
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


def luminance(color: str) -> float:
    parts = [int(part) / 255 for part in color.removeprefix("rgb(").rstrip(")").split(", ")]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
