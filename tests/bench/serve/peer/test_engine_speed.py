"""How the steps of an engine are timed, and what the script prints that measures vLLM."""

import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octile.bench.serve.peer import engine_speed, octile_engine
from octile.bench.serve.peer import vllm as peer_vllm
from octile.bench.serve.peer.engine_speed import EngineCase, Step, Work, full_step_seconds, measure, request_line
from octile.bench.serve.peer.vllm import SETTINGS, Launch, Setting, speeds_of
from octile.serve.engine.config import CacheConfig
from octile.serve.weights.load import Folder

WORK = Work([EngineCase(1, 20, True), EngineCase(6, 20, True), EngineCase(3, 30, False)], 300, 8, 64)
TRITON, DEEP_GEMM = SETTINGS[:2]
NEVER_STARTS = Setting("triton", {"moe_backend": "never starts"})


class ClockedEngine:
    """An engine whose steps take 10 ms, and 2 ms more for each token of a prompt, on a clock of its own."""

    def __init__(self, monkeypatch):
        self.now, self.waiting, self.running = 0.0, [], {}
        monkeypatch.setattr(engine_speed.time, "perf_counter", lambda: self.now)

    def add(self, prompt, new_tokens):
        self.waiting.append((len(prompt), new_tokens))

    @property
    def has_work(self):
        return bool(self.waiting or self.running)

    def step(self):
        self.now += 0.01
        if self.waiting:  # a prompt is prefilled in each step
            length, new_tokens = self.waiting.pop(0)
            self.now += 0.002 * length
            self.running[object()] = new_tokens
        tokens = dict.fromkeys(self.running, 1)
        self.running = {request: left - 1 for request, left in self.running.items() if left > 1}
        return tokens


def test_speeds_are_those_of_full_steps_and_of_all_steps_of_prompts(monkeypatch):
    speeds = dict(measure(ClockedEngine(monkeypatch), WORK))
    assert speeds == {
        EngineCase(1, 20, True): pytest.approx(1 / 0.01),
        EngineCase(6, 20, True): pytest.approx(6 / 0.01),
        EngineCase(3, 30, False): pytest.approx(3 * 30 / (3 * 0.07)),
    }


def test_a_step_counts_if_it_and_the_one_before_are_full():
    steps = [
        Step(0.0, {"a": 1}),
        Step(1.0, {"a": 1, "b": 1}),
        Step(3.0, {"a": 1, "b": 1}),
        Step(6.0, {"a": 2, "b": 1}),
        Step(10.0, {"a": 1, "b": 1}),
        Step(15.0, {"a": 1, "b": 1}),
        Step(21.0, {"b": 1}),
    ]
    assert full_step_seconds(steps, 2) == [2.0, 5.0]


def test_requests_that_do_not_decode_together_are_no_measurement(monkeypatch):
    monkeypatch.setattr(Work, "new_tokens", lambda work, case: 8)
    with pytest.raises(RuntimeError, match="a batch of 6 decoded together in 2 of 13 steps only"):
        list(measure(ClockedEngine(monkeypatch), replace(WORK, cases=WORK.cases[1:])))


@pytest.mark.parametrize("requests", [1, 32, 256])
def test_requests_of_the_benchmark_decode_long_enough(requests):
    case = EngineCase(requests, 1024, True)
    work = Work([case], 300)
    steps_of_prompts = -(-requests * 1024 // (work.step_tokens - requests))
    assert work.new_tokens(case) > steps_of_prompts + engine_speed.STEPS


@pytest.mark.slow
def test_octile_is_measured_on_a_cpu(micro_folder):
    speeds = dict(octile_engine.engine_speeds(micro_folder, WORK, torch.device("cpu"), CacheConfig(gib=0.05)))
    assert list(speeds) == list(WORK.cases)
    assert all(speed > 0 for speed in speeds.values())


def test_octile_leaves_the_memory_to_the_peer(micro_folder, monkeypatch):
    load, runners = Folder.load, []

    def recorded(*arguments):
        engine, runner = load(*arguments)
        runners.append(weakref.ref(runner))
        return engine, runner

    monkeypatch.setattr(Folder, "load", recorded)
    work = replace(WORK, cases=[EngineCase(1, 8, False)])
    for _ in octile_engine.engine_speeds(micro_folder, work, torch.device("cpu"), CacheConfig(gib=0.05)):
        assert runners[0]() is not None
    assert runners[0]() is None


def test_vllm_is_measured_in_another_process(vllm, tmp_path):
    speeds = dict(vllm.engine_speeds(Path("model"), WORK, TRITON, tmp_path / "log"))
    assert list(speeds) == list(WORK.cases)
    assert all(speed > 0 for speed in speeds.values())


def test_its_start_is_announced_with_its_log_and_reported_with_its_seconds(vllm, tmp_path, capsys):
    list(vllm.engine_speeds(Path("model"), WORK, TRITON, tmp_path / "log"))
    engine = "the engine of vLLM 0.0, triton"
    begin, end = capsys.readouterr().err.splitlines()
    assert begin == f"starting {engine}, whose output goes to {tmp_path}/log"
    assert re.fullmatch(rf"{engine} has started after \d+ s", end)
    assert (tmp_path / "log").read_text().startswith("INFO starting")


def test_an_engine_that_does_not_start_is_reported_with_its_last_lines(vllm, tmp_path):
    with pytest.raises(RuntimeError, match=r"ended with exit code 1, after:(.|\n)*this GPU has no DeepGEMM"):
        list(vllm.engine_speeds(Path("model"), WORK, DEEP_GEMM, tmp_path / "log"))


def test_an_engine_that_does_not_start_in_time_is_ended(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(peer_vllm, "START_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=r"it has not started within 0\.1 s"):
        list(vllm.engine_speeds(Path("model"), WORK, NEVER_STARTS, tmp_path / "log"))


def test_results_before_a_failure_are_used(tmp_path):
    script = 'print("{}"); print(\'{"case": [1, 20, true], "speed": 2.5}\'); raise SystemExit("no kernel")'
    results = speeds_of(Launch("a script", [sys.executable, "-c", script], {}, tmp_path / "log"), 2)
    assert next(results) == (EngineCase(1, 20, True), 2.5)
    with pytest.raises(RuntimeError, match="exit code 1, after:\nno kernel"):
        next(results)


def test_the_script_ends_with_the_process_that_started_it(vllm):
    request = request_line("model", WORK, {"gpu_memory_utilization": 0.5, **NEVER_STARTS.arguments})
    command = [sys.executable, engine_speed.__file__, request]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stderr.readline()  # it has begun
        process.stdin.close()
        assert process.wait(30) == 1
