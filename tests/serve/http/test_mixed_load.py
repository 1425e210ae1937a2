"""A running server under mixed load: each answer is the one that its request gets alone, and none is lost."""

import asyncio
import re
import threading
from collections import Counter
from dataclasses import replace
from signal import SIGTERM

import httpx
import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")
pytest.importorskip("llguidance", reason="octile[serve] is not installed")

from octile.serve.http import connection
from octile.serve.http.config import Limits, Parsers
from octile.serve.http.server import allow_files
from tests.chat.templates import V31, with_tokens
from tests.forked_command import ForkedCommand
from tests.serve.http.conftest import Served, wait_until
from tests.serve.http.mixed_load import FOLLOWING, PLAIN, answers_alone, answers_together, draw, follows
from tests.serve.http.test_formats import EngineOfRandomLogits
from tests.serve.models import save_untrained
from tests.train.conftest import MICRO

PARSERS = Parsers("deepseek_r1", "deepseek_v31")


@pytest.fixture(scope="module")
def of_v31(tokenizer):
    return with_tokens(tokenizer)


@pytest.fixture(scope="module")
def start(of_v31):
    """Start a server of an engine whose logits are a hash of the tokens that its pages hold."""
    started = []

    def served(limits=Limits(), **engine) -> Served:  # noqa: B008
        started.append(Served(EngineOfRandomLogits(of_v31, **engine), limits, (), V31, parsers=PARSERS))
        return started[-1]

    yield served
    for running in started:
        running.stop()


def counts(url: str) -> dict[str, float]:
    """The engine's counts by their names."""
    found = re.findall(r"^octile_(\w+?)(?:_total)?\{[^}]*\} (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def is_idle(url: str) -> bool:
    now = counts(url)
    return not any(now[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))


def together(url: str, asked, n_clients: int = 24, refused: threading.Event | None = None) -> list:
    return asyncio.run(answers_together(url, asked, n_clients, refused))


def assert_same(asked, alone, under_load) -> None:
    different = [
        (request, one, other)
        for request, one, other in zip(asked, alone, under_load, strict=True)
        if not request.leaves and one != other
    ]
    assert not different, f"{len(different)} of {len(asked)} differ, the first is {different[0]}"


@pytest.fixture(scope="module")
def load(of_v31, start):
    """Requests, and the answer that each gets alone."""
    asked = draw(42, 0, of_v31) + draw(24, 1, of_v31, PLAIN, longest=120)
    return asked, answers_alone(start().url, asked)


@pytest.mark.slow
@pytest.mark.parametrize("n_drafts", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_answers_under_mixed_load_are_those_alone(load, start, n_drafts):
    asked, alone = load
    served = start(n_pages=135, n_drafts=n_drafts, max_batch=16)
    assert_same(asked, alone, together(served.url, asked))
    wait_until(lambda: is_idle(served.url))
    now = counts(served.url)
    for name in ("num_preemptions", "prefix_cache_hits", "engine_steps_ahead"):
        assert now[name] > 0, name
    assert (now["spec_decode_num_accepted_tokens"] > 0) == (n_drafts > 0)
    assert served.engine.stats().canceled > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
def test_more_answers_under_mixed_load_are_those_alone(of_v31, start, seed):
    asked = draw(200, 10 + seed, of_v31)
    alone = answers_alone(start().url, asked)
    for n_drafts, n_pages, max_batch in ((0, 150, 8), (1, 140, 16), (3, 160, 32)):
        served = start(Limits(in_flight=500), n_pages=n_pages, n_drafts=n_drafts, max_batch=max_batch)
        assert_same(asked, alone, together(served.url, asked, 64))
        wait_until(lambda url=served.url: is_idle(url))


@pytest.fixture(scope="module")
def folder(of_v31, tmp_path_factory):
    """The folder of a model with a chat template."""
    config = replace(MICRO, vocab_size=of_v31.vocab_size, max_position_embeddings=1024, initializer_range=0.08)
    made = save_untrained(config, of_v31, tmp_path_factory.mktemp("mixed") / "micro")
    (made / "chat_template.jinja").write_text(V31, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def command(folder):
    """Run `octile serve` in processes of its own, with options; the URL."""
    started = list[ForkedCommand]()

    def run(*options: str) -> str:
        parsers = "--reasoning-parser", PARSERS.reasoning, "--tool-call-parser", PARSERS.tool_calls
        fixed = "--port", "0", "--device", "cpu", "--engine.batch-invariant", *parsers
        started.append(ForkedCommand(["serve", str(folder), *fixed, *options]))
        return next(filter(None, (re.search(r"^try it at (http://[^,]+),", line) for line in started[-1].stdout)))[1]

    yield run
    for server in started:
        server.send_signal(SIGTERM)
        server.communicate()


@pytest.fixture(scope="module")
def load_of_model(of_v31, command):
    asked = draw(18, 2, of_v31)
    return asked, answers_alone(command(), asked)


SMALL_CACHE = "--cache.gib", "0.0005", "--engine.max-batch", "16"


@pytest.mark.parametrize(
    "options",
    [
        ("--engine.n-drafts", "2"),
        (),
        ("--processes.prefill", "1", "--processes.decode", "1"),
    ],
    ids=["drafts", "no drafts", "prefill and decode processes"],
)
@pytest.mark.exhaustive  # the load of the engine with random logits finds the same, but for the model
def test_answers_of_a_model_under_mixed_load_are_those_alone(load_of_model, command, options):
    asked, alone = load_of_model
    url = command(*SMALL_CACHE, *options)
    assert_same(asked, alone, together(url, asked))
    wait_until(lambda: is_idle(url))


@pytest.mark.exhaustive
def test_more_answers_of_a_model_under_mixed_load_are_those_alone(of_v31, command):
    asked = draw(60, 3, of_v31, longest=250)
    alone = answers_alone(command(), asked)
    url = command(*SMALL_CACHE, "--engine.n-drafts", "2")
    assert_same(asked, alone, together(url, asked))
    assert counts(url)["num_preemptions"] > 0


@pytest.mark.exhaustive  # with 72 clients the test above finds the same
@pytest.mark.parametrize("in_flight", [256, 1000])
def test_a_thousand_clients_with_schemas_and_tools_lose_nothing(of_v31, start, monkeypatch, in_flight):
    if allow_files() < 2500:
        pytest.skip("the system allows this process too few open files for 1,000 clients and the server")
    monkeypatch.setattr(connection, "HEAD_SECONDS", 300.0)  # the clients and the server share a process
    asked = draw(1000, 4, of_v31, FOLLOWING, leaving=0)
    served = start(Limits(in_flight=in_flight), n_pages=20_000, max_batch=64)
    found, refused, step = Counter[str](), threading.Event(), served.engine.step

    def step_after_a_refusal() -> list:  # however slowly clients come: one finds no free slot
        assert refused.wait(120)
        return step()

    if in_flight < 1000:
        monkeypatch.setattr(served.engine, "step", step_after_a_refusal)
    for request, answer in zip(asked, together(served.url, asked, 1000, refused), strict=True):
        if answer == 503:
            found["refused"] += 1
            continue
        (choice,) = answer["choices"]
        reason = choice["finish_reason"]
        assert reason == "length" or follows(request.kind, choice), (request, choice)
        assert reason != "length" or answer["usage"][1] == request.body["max_tokens"]
        found[reason] += 1
    assert found.keys() == {"stop", "tool_calls", "length"} | ({"refused"} if in_flight < 1000 else set())
    wait_until(lambda: is_idle(served.url))
