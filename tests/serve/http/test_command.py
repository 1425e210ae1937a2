"""`octile serve` in a process of its own, with a real model."""

import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import torch

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

import octile
from octile import cli, exit_codes
from octile.serve import send_weights
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from octile.tokenizer import Tokenizer
from tests.forked_command import ForkedCommand
from tests.serve.http.certificates import make_certificate


def arguments(folder: Path, *options: str) -> list[str]:
    return ["serve", str(folder), "--port", "0", "--device", "cpu", *options]


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "octile", *arguments(folder, *options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def configured(folder, tmp_path_factory):
    """The folder of a model with a generation_config.json."""
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("command") / "micro")
    values = {"eos_token_id": [1, 70], "do_sample": True, "temperature": 0.5, "top_k": 200, "typical_p": 0.9}
    (copy / "generation_config.json").write_text(json.dumps(values))
    return copy


@pytest.fixture(scope="module")
def process(configured):
    options = "--limits.drain", "20", "--weights-key", "trainer", "--reasoning-parser", "deepseek_r1"
    server = ForkedCommand(arguments(configured, *options))
    yield server
    server.kill()
    server.communicate()


@pytest.fixture(scope="module")
def printed(process) -> list[str]:
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("try it at"):
            break
    return lines


@pytest.fixture
def client(printed):
    url = re.search(r"base_url (\S+),", printed[-1])[1]
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def test_it_says_what_it_serves(printed):
    assert re.fullmatch(
        r"serving micro on cpu: context \d+ tokens, cache [\d,]+ pages of 64 tokens, \S+ [GMK]iB\n", printed[0]
    )
    assert "no chat template" in printed[1]
    defaults = "temperature 0.5, top_k 200 (not with --sampling-defaults openai)"
    assert printed[2] == f"requests that give none get its generation_config.json's {defaults}\n"
    assert re.search(r"^try it at http://127\.0\.0\.1:\d+, ", printed[3])


def test_it_says_on_standard_error_that_it_loads_before_it_serves(process, printed):
    assert process.stderr.readline() == "loading micro on cpu\n"
    assert re.fullmatch(
        r"octile: generation_config.json of \S+ has fields that are not used: typical_p 0.9\n",
        process.stderr.readline(),
    )


def test_another_sites_name_is_refused(client):
    assert httpx.get(str(client.base_url.join("/health")), headers={"host": "evil.example"}).status_code == 403


def test_the_text_is_that_of_the_engine(client, configured, tokenizer):
    answer = client.completions.create(model="micro", prompt="def f", max_tokens=20, seed=3)
    opened = Folder.open(configured)
    engine, _ = opened.load(torch.device("cpu"), EngineConfig(), CacheConfig())
    engine.add(
        [tokenizer.begin, *tokenizer.encode("def f")],
        opened.sampling(max_new_tokens=20, seed=3, skip_special_tokens=True),
    )
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    assert answer.choices[0].text == text


def test_chats_are_parsed(client):
    answer = client.chat.completions.create(model="micro", messages=[{"role": "user", "content": "a"}], max_tokens=4)
    assert answer.choices[0].message.model_extra == {"reasoning_content": None}


def test_the_same_seed_gives_the_same_text_and_another_choice_another_one(client):
    def texts(**options):
        answer = client.completions.create(model="micro", prompt="def", max_tokens=12, temperature=1, **options)
        return [choice.text for choice in answer.choices]

    first = texts(seed=7, n=2)
    assert texts(seed=7, n=2) == first
    assert first[0] != first[1]
    assert texts(seed=7, extra_body={"top_k": 1}) == texts(seed=8, extra_body={"top_k": 1})


def test_logprobs_are_those_of_the_most_likely_tokens(client):
    choice = client.completions.create(model="micro", prompt="a", max_tokens=3, temperature=0, logprobs=2).choices[0]
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert max(top.values()) == top[token] == logprob < 0


def greedy(folder: Path, prompt: str, tokenizer: Tokenizer) -> str:
    """The text of an engine of a folder."""
    engine, _ = Folder.open(folder).load(torch.device("cpu"), EngineConfig(), CacheConfig())
    engine.add([tokenizer.begin, *tokenizer.encode(prompt)], Sampling(max_new_tokens=20))
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    return text


@pytest.mark.slow
def test_a_trainer_in_another_process_sends_its_weights_and_a_folder_brings_the_old_ones_back(
    client, configured, tokenizer, tmp_path
):
    def answer() -> tuple[str, int]:
        (choice,) = client.completions.create(model="micro", prompt="def f", max_tokens=20, temperature=0).choices
        return choice.text, choice.model_extra["weights_version"]

    url = str(client.base_url).removesuffix("/v1/")
    model = octile.load(configured)
    with torch.no_grad():
        model.lm_head.weight *= -1
    octile.save(model, tmp_path)
    tokenizer.save(tmp_path)
    old, new = greedy(configured, "def f", tokenizer), greedy(tmp_path, "def f", tokenizer)
    assert answer() == (old, 0) != (new, 0)
    assert send_weights(url, "trainer", model).version == 1
    assert answer() == (new, 1)
    body, headers = {"model_path": str(configured)}, {"authorization": "Bearer trainer"}
    assert httpx.post(f"{url}/update_weights_from_disk", json=body, headers=headers).json()["weights_version"] == 2
    assert answer() == (old, 2)


def test_sigterm_lets_a_stream_end_and_then_the_process(client, process):
    stream = client.completions.create(
        model="micro", prompt="a", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    _, error = process.communicate(timeout=60)
    assert process.returncode == 143
    assert error.splitlines()[-1] == "octile: terminated"


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key", ""], "--api-key must not be empty"),
        (["--weights-key", "a", "--api-key", "a"], "--weights-key must not be a key that clients have"),
        (
            ["--weights-key", "a", "--processes.prefill", "1", "--processes.decode", "1"],
            "--weights-key must not be given with --processes.prefill: only the weights of one process can be updated",
        ),
        (["--ssl-certfile", "a.crt"], "--ssl-keyfile is needed, too, with --ssl-certfile"),
        (["--ssl-keyfile", "a.key"], "--ssl-certfile is needed, too, with --ssl-keyfile"),
        (
            ["--ssl-certfile", "none.crt", "--ssl-keyfile", "none.key"],
            "--ssl-certfile 'none.crt' cannot be read: No such file or directory",
        ),
        (
            ["--allowed-origins", "https://a.example/"],
            "--allowed-origins must be * or an origin as browsers send it, SCHEME://HOST or SCHEME://HOST:PORT",
        ),
        (["--engine.n-drafts", "8"], "--engine.n-drafts must be at most 7, not 8"),
        (["--limits.in-flight", "0"], "--limits.in-flight must be at least 1, not 0"),
        (
            ["--processes.prefill", "2"],
            "--processes.prefill and --processes.decode must both be 0 or both be at least 1",
        ),
        (
            ["--processes.prefill", "1", "--processes.decode", "1", "--parallel.ep", "2"],
            "--processes.prefill must be 0, not 1, if --parallel.ep is 2",
        ),
        (
            ["--parallel.ep", "2", "--parallel.redundant-experts", "2", "--engine.expert-window", "0"],
            "--engine.expert-window must be at least 8, not 0, with --parallel.redundant-experts",
        ),
    ],
    ids=[
        "key",
        "key of clients",
        "key and processes",
        "no key of TLS",
        "no certificate",
        "no file",
        "origin",
        "drafts",
        "in flight",
        "one kind of process",
        "ranks",
        "window",
    ],
)
def test_wrong_options_are_refused_in_one_line(folder, options, message):
    server = start(folder, *options)
    _, error = server.communicate(timeout=60)
    assert server.returncode == 2
    (line,) = error.splitlines()
    assert message in line


def test_it_serves_https_at_the_address_that_it_prints(folder, tmp_path):
    files = make_certificate(tmp_path, "server")
    server = ForkedCommand(
        arguments(folder, "--ssl-certfile", str(files.certfile), "--ssl-keyfile", str(files.keyfile))
    )
    try:
        lines = "".join(server.stdout.readline() for _ in range(3))
        url = re.search(r"try it at (https://\S+), .* base_url (\S+)/v1,", lines)
        assert url[1] == url[2]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(files.certfile)
        with openai.OpenAI(base_url=f"{url[1]}/v1", api_key="any", http_client=httpx.Client(verify=context)) as client:
            chunks = list(client.completions.create(model="micro", prompt="def f", max_tokens=5, stream=True))
        assert chunks[-1].choices[0].finish_reason
    finally:
        server.kill()
        server.communicate()


def test_an_address_that_this_machine_has_not_is_refused_in_one_line(folder, monkeypatch):
    monkeypatch.setattr(exit_codes, "_fail", lambda line, code: pytest.fail(f"{code}: {line}", pytrace=False))
    refusal = "2: --host 'nowhere.invalid' is not an address of this machine"
    with pytest.raises(pytest.fail.Exception, match=refusal):
        cli.main(["serve", str(folder), "--device", "cpu", "--host", "nowhere.invalid"])


@pytest.mark.slow
def test_it_ends_quietly_when_the_reader_of_its_output_ends(folder):
    server = start(folder)
    server.stdout.readline()
    server.stdout.close()
    assert server.stderr.read() == "loading micro on cpu\n"
    assert server.wait(60) == 0


@pytest.fixture
def apart(folder, request):
    """A server with a prefill and a decode process, and OpenAI's client of it; parameters are further options."""
    options = "--engine.batch-invariant", *getattr(request, "param", ())
    server = ForkedCommand(arguments(folder, "--processes.prefill", "1", "--processes.decode", "1", *options))
    assert server.stderr.readline() == "loading micro on cpu by processes, 1 for prefill and 1 for decoding\n"
    lines = [server.stdout.readline() for _ in range(3)]
    assert lines[0].startswith(
        "serving micro on cpu by processes, 1 for prefill and 1 for decoding, each with this cache"
    )
    with openai.OpenAI(base_url=re.search(r"base_url (\S+),", lines[-1])[1], api_key="any", max_retries=0) as client:
        yield server, client
    server.kill()
    server.communicate()


@pytest.mark.slow
def test_prefill_and_decode_processes_write_the_text_of_one_engine(apart, folder, tokenizer):
    server, client = apart
    stream = client.completions.create(model="micro", prompt="class A:", max_tokens=40, temperature=0, stream=True)
    engine, _ = Folder.open(folder).load(torch.device("cpu"), EngineConfig(batch_invariant=True), CacheConfig())
    engine.add([tokenizer.begin, *tokenizer.encode("class A:")], Sampling(max_new_tokens=40))
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    assert "".join(chunk.choices[0].text for chunk in stream) == text
    server.send_signal(signal.SIGTERM)
    _, error = server.communicate(timeout=60)
    assert (server.returncode, error.splitlines()[-1]) == (143, "octile: terminated")


def test_a_process_that_dies_ends_the_server_in_one_line(apart):
    server, client = apart
    client.completions.create(model="micro", prompt="a", max_tokens=3)
    process = psutil.Process(server.children[-1])
    process.kill()
    process.wait(30)  # until it can answer no more
    with pytest.raises(openai.APIError):
        client.completions.create(model="micro", prompt="a", max_tokens=3)
    _, error = server.communicate(timeout=60)
    assert server.returncode == 1
    (line,) = error.splitlines()
    assert re.fullmatch(r"octile: the (prefill|decode) process 0 has ended with exit status -9", line)


@pytest.mark.exhaustive  # the router notices it in test_router, and the server a process that dies above
@pytest.mark.parametrize("apart", [("--parallel.timeout", "2")], ids=["2 s"], indirect=True)
def test_a_process_that_hangs_ends_the_server_in_one_line(apart):
    server, _ = apart
    os.kill(server.children[-1], signal.SIGSTOP)
    _, error = server.communicate(timeout=60)
    assert server.returncode == 1
    (line,) = error.splitlines()
    assert re.fullmatch(r"octile: the (prefill|decode) process 0 has not answered for 2 s, and was killed", line)


@pytest.mark.exhaustive  # the process of HTTP alone, in test_process
def test_nothing_is_left_of_a_server_that_is_killed(apart):
    server, _ = apart
    others = [psutil.Process(pid) for pid in server.children]
    server.kill()
    _, left = psutil.wait_procs(others, timeout=30)
    assert len(others) >= 3
    assert left == []
