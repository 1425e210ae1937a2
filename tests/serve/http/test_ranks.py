"""`octile serve` on two ranks, forked or under the real torchrun: answers, a killed rank, SIGTERM, wrong options."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import openai
import psutil
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile import cli, exit_codes
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder
from tests.serve.conftest import MICRO
from tests.serve.http import forked_rank
from tests.serve.http.conftest import wait_until
from tests.serve.models import save_untrained
from tests.worlds import begin_ranks

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
INVARIANT = ["--engine.batch-invariant", "--engine.max-batch=2"]
LOST = "RanksError: rank 0 lost the connection to another rank"
SPREAD = ["--parallel.ep=2", "--parallel.redundant-experts=2"]
GROUPS = ["--parallel.ep=4", "--parallel.tp=2", "--parallel.shared-experts=routed", "--parallel.redundant-experts=3"]

# a server whose rank 0 hangs in the tenth round, as a send of gloo can, when rank 1 ends
HANGING_SEND = """
import os
import time

from octile.cli import main
from octile.parallel import messages

broadcast, rounds = messages.broadcast_message, []

def failing(*arguments, **options):
    rounds.append(arguments)
    if len(rounds) == 10:
        if os.environ["RANK"] == "1":
            os._exit(1)
        time.sleep(3600)
    return broadcast(*arguments, **options)

messages.broadcast_message = failing
if __name__ == "__main__":  # the HTTP process imports this, too
    main()
"""


def command(folder: Path, *options: str, ranks: int = 2, program: Sequence[str] = ("-m", "octile")) -> list[str]:
    started = [*TORCHRUN, f"--nproc-per-node={ranks}", *program, "serve", str(folder)]
    return [*started, "--port=0", "--device=cpu", *options]


@contextmanager
def serving(
    folder: Path,
    *options: str,
    parallel: Sequence[str] = SPREAD,
    ranks: int = 2,
    program: Sequence[str] = ("-m", "octile"),
) -> Iterator[tuple[subprocess.Popen, openai.OpenAI]]:
    """Start a server on some ranks."""
    started = command(folder, *parallel, *options, ranks=ranks, program=program)
    with subprocess.Popen(
        started, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = next(found[1] for line in server.stdout if (found := re.search(r"base_url (\S+),", line)))
            with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
                yield server, client
        finally:
            server.terminate()
            server.communicate(timeout=60)


@contextmanager
def forked(
    folder: Path, output: Path, *options: str, run: Callable[..., None] = forked_rank.run
) -> Iterator[list[BaseProcess]]:
    """Two forked ranks of a server, whose output goes to files of a folder."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = [str(folder), "--port=0", "--device=cpu", *SPREAD, *options]
    ranks = begin_ranks(run, (store.port, str(output), arguments), 2)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


@contextmanager
def client_of_forked(output: Path) -> Iterator[openai.OpenAI]:
    """A client of forked ranks, which has waited until they serve."""

    def url() -> re.Match | None:
        printed = output / "0.out"
        return re.search(r"base_url (\S+),", printed.read_text()) if printed.exists() else None

    wait_until(url)
    with openai.OpenAI(base_url=url()[1], api_key="any", max_retries=0, timeout=60) as client:
        yield client


def ranks_of(server: subprocess.Popen) -> list[psutil.Process]:
    """The processes of the ranks, in their order."""
    ranks = [process for process in psutil.Process(server.pid).children() if "RANK" in process.environ()]
    return sorted(ranks, key=lambda process: int(process.environ()["RANK"]))


def own_lines(server: subprocess.Popen) -> list[str]:
    """What octile printed on standard error, without torchrun's report."""
    return [line for line in server.communicate(timeout=60)[1].splitlines() if line.startswith("octile: ")]


def ask(client: openai.OpenAI, seed: int) -> str:
    answer = client.completions.create(model="micro", prompt=f"def f{seed}", max_tokens=20, temperature=1, seed=seed)
    return answer.choices[0].text


def begin_stream(client: openai.OpenAI) -> openai.Stream:
    """Ask for 120 tokens, and wait for the first."""
    stream = client.completions.create(
        model="micro", prompt="a", max_tokens=120, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    return stream


def text_of_one_process(folder: Path, tokenizer, seed: int) -> str:
    config = EngineConfig(max_batch=2, batch_invariant=True)
    engine, _ = Folder.open(folder).load(torch.device("cpu"), config, CacheConfig())
    prompt = [tokenizer.begin, *tokenizer.encode(f"def f{seed}")]
    engine.add(prompt, Sampling(max_new_tokens=20, temperature=1.0, seed=seed))
    text = ""
    while engine.has_work:
        text += "".join(output.text for output in engine.step())
    return text


class Answered(NamedTuple):
    """What two ranks have answered until SIGTERM, how the stream ended that then ran, and how they ended."""

    texts: list[str]
    metrics: str
    finish_reason: str | None
    last_line: str
    statuses: list[int | None]


@pytest.fixture(scope="module")
def answered(folder, tmp_path_factory) -> Answered:
    output = tmp_path_factory.mktemp("answered")
    with forked(folder, output, *INVARIANT) as ranks:
        with client_of_forked(output) as client, ThreadPoolExecutor(6) as threads:
            texts = list(threads.map(lambda seed: ask(client, seed), range(6)))
            with urlopen(str(client.base_url.join("/metrics"))) as metrics:
                counted = metrics.read().decode()
            stream = begin_stream(client)
            for rank in ranks:
                rank.terminate()  # as torchrun does when it is sent SIGTERM
            finish_reason = [chunk.choices[0].finish_reason for chunk in stream][-1]
        for rank in ranks:
            rank.join(60)
        lines = (output / "0.err").read_text().splitlines()
        last_line = [line for line in lines if line.startswith("octile: ")][-1]
        return Answered(texts, counted, finish_reason, last_line, [rank.exitcode for rank in ranks])


@pytest.mark.slow
def test_clients_get_the_texts_of_one_process(answered, folder, tokenizer):
    assert answered.texts == [text_of_one_process(folder, tokenizer, seed) for seed in range(6)]


@pytest.mark.slow
def test_the_tokens_of_redundant_experts_are_counted(answered):
    assert "octile_expert_tokens{" in answered.metrics


def test_sigterm_lets_a_stream_end(answered):
    assert (answered.finish_reason, answered.last_line) == ("length", "octile: terminated")
    assert answered.statuses == [exit_codes.TERMINATED, 0]  # rank 1 ends as rank 0 says


@pytest.mark.exhaustive  # two forked ranks answer above, and groups without a server in tests/serve/ranks
def test_groups_that_share_requests_and_route_shared_experts_answer_as_one_process_does(tokenizer, tmp_path):
    heads = {"num_attention_heads": 4, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
    folder = save_untrained(replace(MICRO, **heads), tokenizer, tmp_path / "micro")
    with (
        serving(folder, *INVARIANT, parallel=GROUPS, ranks=4) as (server, client),
        ThreadPoolExecutor(4) as threads,
    ):
        texts = list(threads.map(lambda seed: ask(client, seed), range(4)))
        assert texts == [text_of_one_process(folder, tokenizer, seed) for seed in range(4)]
        server.send_signal(signal.SIGTERM)
        assert own_lines(server)[-1] == "octile: terminated"


def assert_names_the_lost_rank(server: subprocess.Popen) -> None:
    """Check the line with which a server ends that has lost rank 1."""
    check_line_of_lost_rank(own_lines(server))
    assert server.returncode == 1


def check_line_of_lost_rank(lines: Sequence[str]) -> None:
    """Check the only line of a server that has lost rank 1."""
    (line,) = [line for line in lines if not line.startswith("octile: answering ")]  # torchrun sends SIGTERM meanwhile
    assert re.match(r"octile: rank 0 lost the connection to another rank, which has ended, at round \d+; ", line)
    assert re.search(
        r"last seen: rank 1 at round \d+ \([^()]*(Connection (closed|reset) by peer|Broken pipe)[^()]*\)$", line
    )


@pytest.mark.slow
def test_a_killed_rank_ends_the_server_with_one_line_that_says_so(folder, tmp_path):
    with forked(folder, tmp_path) as ranks:
        with client_of_forked(tmp_path) as client:
            stream = begin_stream(client)
            ranks[1].kill()
            ranks[1].join()
            ranks[0].terminate()  # as torchrun does
            with pytest.raises(openai.APIError, match=LOST):
                list(stream)
        ranks[0].join(60)
        lines = (tmp_path / "0.err").read_text().splitlines()
        check_line_of_lost_rank([line for line in lines if line.startswith("octile: ")])
        assert ranks[0].exitcode == 1


@pytest.mark.exhaustive  # the same without torchrun above
@pytest.mark.parametrize("is_busy", [False, True])
def test_a_killed_rank_of_torchrun_ends_the_server_with_one_line_that_says_so(folder, is_busy):
    with serving(folder) as (server, client):
        if is_busy:
            stream = begin_stream(client)
        else:
            client.completions.create(model="micro", prompt="a", max_tokens=1)  # after which both ranks are in rounds
        ranks_of(server)[1].kill()
        if is_busy:
            with pytest.raises(openai.APIError, match=LOST):
                list(stream)
        assert_names_the_lost_rank(server)


@pytest.mark.exhaustive  # test_lost_ranks has the farewells, and the killed rank above the line
def test_a_rank_that_ends_while_rank_0_hangs_in_a_send_ends_the_server(folder, tmp_path):
    (script := tmp_path / "serve.py").write_text(HANGING_SEND)
    with serving(folder, program=(str(script),)) as (server, client):
        with pytest.raises(openai.APIError, match=LOST):
            list(begin_stream(client))
        assert_names_the_lost_rank(server)


@pytest.mark.exhaustive  # test_command has the option, and the warm-up that fails below the one line of ranks
def test_a_wrong_option_is_refused_in_one_line(folder):
    wrong = command(folder, "--parallel.ep=2", "--host=nowhere.invalid")
    ended = subprocess.run(wrong, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("octile: ")]
    assert "host 'nowhere.invalid' is not an address of this machine" in line


@pytest.mark.slow
def test_a_rank_that_cannot_warm_up_ends_the_server_with_one_line(folder, tmp_path):
    with forked(folder, tmp_path, run=forked_rank.run_and_fail) as ranks:
        for process in ranks:
            process.join(60)
    printed = "".join((tmp_path / f"{rank}.err").read_text() for rank in range(2))
    (line,) = [line for line in printed.splitlines() if line.startswith("octile: ")]
    assert line == "octile: rank 1: no memory for logits"
    assert [process.exitcode for process in ranks] == [1, 1]
    assert "base_url" not in (tmp_path / "0.out").read_text()


@pytest.mark.parametrize(
    ("started", "ep", "message"),
    [
        ("1", 2, "--parallel.ep 2 needs as many processes: torchrun --nproc-per-node 2 -m octile serve"),
        ("2", 1, "torchrun has started 2 processes (WORLD_SIZE), so --parallel.ep must be 2, not 1"),
    ],
)
def test_another_number_of_processes_is_refused(monkeypatch, folder, started, ep, message):
    monkeypatch.setenv("WORLD_SIZE", started)
    monkeypatch.setattr(exit_codes, "_fail", lambda line, code: pytest.fail(f"{code}: {line}", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match=re.escape(f"2: {message}")):
        cli.main(["serve", str(folder), f"--parallel.ep={ep}"])
