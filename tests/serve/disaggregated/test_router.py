"""Real prefill and decode processes behind a router."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch

from octile.serve.disaggregated import router as router_module
from octile.serve.disaggregated.router import ProcessEndedError, Router, Waker
from octile.serve.engine.config import CacheConfig, EngineConfig, ProcessesConfig
from octile.serve.engine.request import Sampling
from octile.serve.engine.stats import Stats
from octile.serve.weights.load import Folder
from tests.serve.disaggregated.processes import answers, never_answers
from tests.serve.models import adding, save_untrained
from tests.train.conftest import MICRO

ENGINE = EngineConfig(batch_invariant=True)
CPU = torch.device("cpu")
MODEL = replace(MICRO, max_position_embeddings=512, num_nextn_predict_layers=0)
SPAWN = multiprocessing.get_context("spawn")
pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory) -> Path:
    return save_untrained(MODEL, tokenizer, tmp_path_factory.mktemp("apart") / "micro")


def start(
    folder: Path,
    processes: ProcessesConfig,
    engine: EngineConfig = ENGINE,
    gib: float | None = None,
    timeout: float = 600.0,
) -> Router:
    return Router(folder, processes, CPU, engine, CacheConfig(gib=gib), timeout)


@pytest.fixture(scope="module")
def router(folder):
    running = start(folder, ProcessesConfig(prefill=1, decode=2))
    yield running
    running.close()


def finish(engine, n_requests: int) -> dict[int, str]:
    texts: dict[int, str] = {}
    ended = 0
    while ended < n_requests:
        for output in engine.step():
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            ended += output.finish_reason is not None
    return texts


@pytest.mark.slow
def test_texts_are_those_of_one_process(router, folder, tokenizer):
    texts = ["def f(", "class Reader:", "import os\n" * 30, "#"]
    asked = [
        ([tokenizer.begin, *tokenizer.encode(text)], Sampling(n, temperature=t, seed=5, ignore_eos=True))
        for text, n, t in zip(texts, (30, 1, 20, 70), (0.0, 1.0, 0.8, 0.0), strict=True)
    ]
    single, _ = Folder.open(folder).load(CPU, ENGINE, CacheConfig())
    add = adding(router)
    for prompt, sampling in asked:
        single.add(prompt, sampling)
        add(prompt, sampling)
    assert finish(router, len(asked)) == finish(single, len(asked))
    stats = router.stats()
    assert (stats.requests, stats.finished, stats.canceled, stats.failed) == (4, 4, 0, 0)
    assert stats.prompt_tokens == sum(len(prompt) for prompt, _ in asked)
    assert stats.generated_tokens == sum(sampling.max_new_tokens for _, sampling in asked)


def test_log_probabilities_of_prompts_are_those_of_one_process(router, folder, tokenizer):
    def scored(engine) -> list:
        found, ended = [], 0
        while ended < 2:
            for output in engine.step():
                found += [output.prompt_logprobs] if output.prompt_logprobs else []
                ended += output.finish_reason is not None
        return sorted(found, key=len)

    single, _ = Folder.open(folder).load(CPU, ENGINE, CacheConfig())
    for add in (single.add, adding(router)):
        for prompt, n in (("def f(x): return x", 5), ("import os\n" * 30, 1)):
            tokens = [tokenizer.begin, *tokenizer.encode(prompt)]
            add(tokens, Sampling(n, ignore_eos=True, prompt_logprobs=2))
    found = scored(router)
    assert found == scored(single)
    assert len(found[0]) == len(tokenizer.encode("def f(x): return x"))


def test_a_request_with_the_id_of_one_that_runs_is_refused_and_changes_nothing(router, tokenizer):
    before = router.stats().requests
    adding(router)([tokenizer.begin, 5], Sampling(20, ignore_eos=True))
    with pytest.raises(ValueError, match=r"^request\.id must differ from .*, not 0, "):
        adding(router)([tokenizer.begin, 6], Sampling(20, ignore_eos=True))
    finish(router, 1)
    assert router.stats().requests == before + 1


def test_canceled_requests_leave_nothing(router, tokenizer):
    before = router.stats().canceled
    add = adding(router)
    requests = [add([tokenizer.begin, 5, i], Sampling(100, ignore_eos=True)) for i in range(3, 9)]
    router.step()
    assert all(router.cancel(request.id) for request in requests)
    assert not router.cancel(requests[0].id)
    add([tokenizer.begin], Sampling(2, ignore_eos=True))
    finish(router, 1)
    while router.stats().used_pages:
        add([tokenizer.begin], Sampling(2, ignore_eos=True))  # the processes send their counts with each step
        finish(router, 1)
    assert router.stats().canceled == before + 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["_prefill", "_decode"])
def test_a_process_that_is_stopped_makes_the_server_unhealthy_until_it_goes_on(router, tokenizer, monkeypatch, kind):
    httpx, _ = pytest.importorskip("httpx"), pytest.importorskip("fastapi", reason="octile[serve] is not installed")
    from tests.serve.http.conftest import Limits, Served, wait_until

    monkeypatch.setattr(router_module, "PING_SECONDS", 0.1)
    for process in router._all:
        monkeypatch.setattr(process, "_ping_seconds", 0.1)
    monkeypatch.setattr("octile.serve.http.service.HUNG_SECONDS", 0.3)
    adding(router)([tokenizer.begin], Sampling(2, ignore_eos=True))
    finish(router, 1)  # so that no process is in its first step
    router.tokenizer = tokenizer
    served, pid = Served(router, Limits(), (), None), getattr(router, kind)[0].process.pid

    def health() -> tuple[int, str]:
        response = httpx.get(f"{served.url}/health", timeout=30)
        return response.status_code, response.json()["status"]

    try:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: health()[0] == 503)
        assert "a prefill or decode process has not answered for" in health()[1]
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: health() == (200, "ok"))
    finally:
        os.kill(pid, signal.SIGCONT)
        served.stop()


@pytest.mark.slow
def test_more_commands_and_messages_than_pipes_hold(router, tokenizer):
    n = 3000
    ended, add = 0, adding(router)
    for _ in range(n):
        add([tokenizer.begin, 5, 6], Sampling(1, logprobs=20, ignore_eos=True))
    while ended < n:
        ended += sum(output.finish_reason is not None for output in router.step())


def test_a_waiting_step_wakes(router):
    router.wake()
    assert router.step() == []


@pytest.mark.slow
def test_a_pool_that_is_full_holds_prompts_back_and_loses_none(folder, tokenizer):
    page = 4 * MODEL.num_hidden_layers * 64 * (MODEL.kv_lora_rank + MODEL.qk_rope_head_dim)
    router = start(folder, ProcessesConfig(prefill=1, decode=1), EngineConfig(max_batch=2), gib=4 * page / 2**30)
    try:
        add = adding(router)
        for i in range(10):
            add([tokenizer.begin, *[3 + i] * 100], Sampling(20, seed=0, ignore_eos=True))
        assert len(finish(router, 10)) == 10
    finally:
        router.close()


@pytest.mark.parametrize(("kind", "name"), [("_prefill", "prefill process 0"), ("_decode", "decode process 0")])
def test_a_process_that_dies_is_named(folder, tokenizer, kind, name):
    router = start(folder, ProcessesConfig(prefill=1, decode=1))
    try:
        adding(router)([tokenizer.begin], Sampling(500 if kind == "_decode" else 1, ignore_eos=True))
        os.kill(getattr(router, kind)[0].process.pid, signal.SIGKILL)
        with pytest.raises(ProcessEndedError, match=f"the {name} has ended with exit status -9"):
            finish(router, 2)
    finally:
        router.close()


class Clock:
    """The router's clock, which a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(router_module, "time", clock)
    return clock


def test_answers_that_were_not_received_are_answers(clock, folder, tokenizer):
    router = start(folder, ProcessesConfig(prefill=1, decode=1))
    try:
        for _ in range(2):
            clock.now += 10
            for process in router._all:
                process.ping()
            assert all(process.connection.poll(60) for process in router._all)
            clock.now += 1000
            assert router.step() == []
        adding(router)([tokenizer.begin], Sampling(2, ignore_eos=True))
        assert len(finish(router, 1)) == 1
    finally:
        router.close()


def test_ctrl_c_does_not_end_a_process_that_starts(monkeypatch):
    monkeypatch.setattr("multiprocessing.get_context", lambda method: SPAWN)  # it imports
    process = router_module._Process("decode process 0", answers, (), 600)
    os.kill(process.process.pid, signal.SIGINT)  # while it imports
    try:
        assert process.receive() == "started"
    finally:
        process.close()
        process.end()


def test_a_process_that_hangs_is_killed_and_named(clock):
    process = router_module._Process("decode process 0", never_answers, (), 5)
    try:
        assert process.ping() == 1
        clock.now += 1
        assert process.ping() == 5
        clock.now += 5
        with pytest.raises(ProcessEndedError, match="the decode process 0 has not answered for 5 s, and was killed"):
            process.ping()
    finally:
        process.close()
        process.end()
    assert process.process.exitcode == -signal.SIGKILL


def test_a_process_that_does_not_answer_is_silent_unless_it_computes_its_first_step(clock):
    process = router_module._Process("decode process 0", never_answers, (), 600)
    try:
        clock.now += 0.5
        process.ping()
        assert process.silent_seconds == 0  # it was not asked yet
        clock.now += 0.5
        process.ping()
        clock.now += 1
        assert process.silent_seconds == 2
        process.load = 5
        assert process.silent_seconds == 0
        process.stats = Stats(steps=1)
        assert process.silent_seconds == 2
    finally:
        process.process.kill()
        process.close()
        process.end()


def test_a_process_is_asked_again_if_the_router_was_stopped(clock):
    process = router_module._Process("decode process 0", never_answers, (), 5)
    try:
        for _ in range(2):
            clock.now += 1000
            assert process.ping() == 5
        clock.now += 5
        with pytest.raises(ProcessEndedError, match="the decode process 0 has not answered for 5 s"):
            process.ping()
    finally:
        process.close()
        process.end()


@pytest.mark.slow
def test_a_router_that_nobody_closes_does_not_hold_the_exit(folder):
    script = f"""
import multiprocessing
import torch
from multiprocessing.connection import Connection
from pathlib import Path
from octile.serve.engine.config import CacheConfig, EngineConfig, ProcessesConfig
from octile.serve.disaggregated import router as router_module
from octile.serve.disaggregated.router import Router
if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["octile.serve.disaggregated.router"])  # so that both import it once
    multiprocessing.get_context = lambda method, get=multiprocessing.get_context: get("forkserver")
    cpu, path = torch.device("cpu"), Path({str(folder)!r})
    Router(path, ProcessesConfig(1, 1), cpu, EngineConfig(), CacheConfig())
    raise SystemExit(7)
"""
    file = folder.parent / "nobody_closes.py"
    file.write_text(script)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, str(file)], env=environment, timeout=120).returncode == 7


def test_what_a_process_cannot_load_is_refused_here(folder):
    with pytest.raises(ValueError, match="no multi-token prediction layer"):
        start(folder, ProcessesConfig(prefill=1, decode=1), EngineConfig(n_drafts=1))


def test_processes_that_share_a_gpu_need_a_share_of_its_memory(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"cache\.gib must be given for 2 processes on 1 GPU:"):
        Router(folder, ProcessesConfig(1, 1), torch.device("cuda"), ENGINE, CacheConfig())


@pytest.mark.parametrize("counts", [(1, 0), (0, 1)])
def test_both_kinds_of_processes_are_needed(counts):
    with pytest.raises(ValueError, match="must both be 0 or both be at least 1, not"):
        ProcessesConfig(*counts)


@pytest.fixture
def waker():
    made = Waker()
    yield made
    made.close()


def test_it_is_not_ready_at_first(waker):
    assert wait([waker.fileno()], 0) == []


def test_any_thread_wakes_one_that_waits(waker):
    threading.Timer(0.05, waker.wake).start()
    assert wait([waker.fileno()], 30) == [waker.fileno()]


def test_it_stays_ready_until_it_is_cleared(waker):
    waker.wake()
    waker.wake()
    assert wait([waker.fileno()], 0) == [waker.fileno()]
    waker.clear()
    assert wait([waker.fileno()], 0) == []


def test_waking_never_waits(waker):
    for _ in range(10_000):  # more bytes than the system buffers
        waker.wake()
    assert wait([waker.fileno()], 0) == [waker.fileno()]
