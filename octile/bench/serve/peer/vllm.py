"""vLLM as a peer: where it is imported, its settings, and its engine and its server in processes of their own.

Written for vLLM 0.26. It is asked for nothing that octile does not do, too: no cache of prefixes, which random prompts
never hit, and the same limits of a batch and of a step.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

from octile.bench.serve.peer import engine_speed
from octile.bench.serve.peer.engine_speed import EngineCase, Work, request_line
from octile.checkpoint.hugging_face import has_fp8_weights, read_model_config
from octile.formats import BLOCK
from octile.signals import termination_ignored
from octile.text import format_count

START_SECONDS = 1200.0  # of an engine or a server; the first start on a machine has taken 11 minutes
ENGINE_SECONDS = 900.0  # for all cases of a setting, after the start
END_SECONDS = 30.0  # after SIGTERM; then it is killed
EARLY_END_SECONDS = 3.0  # after SIGTERM where it is not needed to its end, because this process is ended, too
TAIL = 15  # lines of a log that an error shows
MARK = "octile-bench "  # before what the probe has found
MEMORY_SHARE = 0.85  # of the GPU, some of which octile's own process holds

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "TOKENIZERS_PARALLELISM": "false",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # so that a step of the engine is a call
PROBE = """
import importlib.util, json, os
import vllm, torch
rust = os.path.join(os.path.dirname(vllm.__file__), "vllm-rs")
flashinfer = importlib.util.find_spec("flashinfer") is not None
found = {"version": vllm.__version__, "has_gpu": torch.cuda.is_available(),
         "packages": ["flashinfer"] * flashinfer + ["the Rust front end"] * os.access(rust, os.X_OK)}
print("octile-bench " + json.dumps(found))
"""


@dataclass(frozen=True)
class Setting:
    """A way to run vLLM.

    Attributes:
        name: its name on the command line.
        arguments: arguments of `vllm.LLM`, and by the same names of `vllm serve`.
        environment: environment variables.
        needs: what not every vLLM has, as the probe names it.
        is_fp8_only: whether it needs FP8 weights.
        is_http_only: whether it differs from another one only as a server.
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str | None = None
    is_fp8_only: bool = False
    is_http_only: bool = False


_RUST = {"VLLM_USE_RUST_FRONTEND": "1"}
SETTINGS = (
    Setting("triton", {"moe_backend": "triton"}),
    Setting("deep_gemm", {"moe_backend": "deep_gemm"}, is_fp8_only=True),
    Setting("flashinfer", {"moe_backend": "flashinfer_cutlass"}, needs="flashinfer"),
    Setting("triton+rust", {"moe_backend": "triton"}, _RUST, "the Rust front end", is_http_only=True),
    Setting("deep_gemm+rust", {"moe_backend": "deep_gemm"}, _RUST, "the Rust front end", True, True),
    Setting("triton+cutlass", {"moe_backend": "triton"}, {"VLLM_USE_DEEP_GEMM": "0"}, is_fp8_only=True),
)


@dataclass(frozen=True)
class Launch:
    """A process to start.

    Attributes:
        name: what it is, in messages.
        command: its command.
        environment: environment variables, besides those of this process.
        log: file for what it prints.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Vllm:
    """vLLM in an environment that has it.

    Attributes:
        python: the interpreter that imports it.
        version: its version.
        packages: what it has of what settings need.
    """

    python: Path
    version: str
    packages: Sequence[str] = ()

    @classmethod
    def find(cls, python: Path) -> Vllm:
        """Import vLLM in another process.

        Raises:
            ValueError: python is no interpreter, or vLLM finds no GPU.
            ImportError: it cannot import vLLM.
        """
        try:
            probe = subprocess.run(
                [python, "-c", PROBE], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ValueError(f"peer_python must be a Python interpreter, which {python} is not: {error}") from error
        found = next((line for line in probe.stdout.splitlines() if line.startswith(MARK)), None)
        if probe.returncode or found is None:
            why = (probe.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise ImportError(
                f"peer vllm cannot be imported by {python} ({why}): peer_python names an interpreter that can, such as "
                "/path/to/environment/bin/python"
            )
        values = json.loads(found.removeprefix(MARK))
        if not values["has_gpu"]:
            raise ValueError(f"peer_python must be that of an environment with a GPU; the torch of {python} finds none")
        return cls(python, values["version"], tuple(values["packages"]))

    def label(self, setting: Setting) -> str:
        """The peer of a row."""
        return f"vLLM {self.version}, {setting.name}"

    def choose_settings(self, names: Sequence[str], part: str | None = None) -> list[Setting]:
        """Return the settings of these names, in their order, or all that this vLLM can run if there is none.

        Args:
            names: names of settings.
            part: "engine", "http", or both.

        Raises:
            ValueError: there is no such setting, this vLLM lacks what it needs, or it differs in the other part only.
        """
        by_name = {setting.name: setting for setting in SETTINGS}
        if unknown := set(names) - set(by_name):
            raise ValueError(f"peer_setting must be one of {', '.join(by_name)}, not {min(unknown)}")
        chosen = [by_name[name] for name in dict.fromkeys(names or by_name)]
        for setting in chosen:
            if names and setting.needs and setting.needs not in self.packages:
                raise ValueError(f"peer_setting {setting.name} needs {setting.needs}, which this vLLM lacks")
            if names and setting.is_http_only and part == "engine":
                raise ValueError(f"peer_setting {setting.name} is one of the server, not of the engine")
        return [setting for setting in chosen if setting.needs is None or setting.needs in self.packages]

    def engine_speeds(
        self, folder: Path, work: Work, setting: Setting, log: Path
    ) -> Iterator[tuple[EngineCase, float]]:
        """Yield the cases and their tokens per second, of an engine in a process of its own, which prints to the log.

        Raises:
            RuntimeError: the process ended before all of them.
            TimeoutError: it took too long.
        """
        arguments = {"gpu_memory_utilization": MEMORY_SHARE, **setting.arguments}
        command = [str(self.python), engine_speed.__file__, request_line(str(folder.resolve()), work, arguments)]
        environment = {**self.environment(setting), **IN_PROCESS}
        launch = Launch(f"the engine of {self.label(setting)}", command, environment, log)
        yield from speeds_of(launch, len(work.cases))

    def environment(self, setting: Setting) -> dict[str, str]:
        """Return the environment variables of a setting, besides those of this process."""
        sampler = {} if "flashinfer" in self.packages else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would import it
        return {**ENVIRONMENT, **sampler, **setting.environment}

    def serve_command(self, folder: Path, port: int, setting: Setting, work: Work, max_length: int) -> list[str]:
        """Return the command of a server with the limits of some work, for requests of at most so many tokens."""
        options = [word for name, value in setting.arguments.items() for word in (f"--{name.replace('_', '-')}", value)]
        return [
            *(str(self.python), "-m", "vllm.entrypoints.cli.main", "serve", str(folder.resolve())),
            *("--host", "127.0.0.1", "--port", str(port), "--gpu-memory-utilization", str(MEMORY_SHARE)),
            *("--max-num-seqs", str(work.max_batch), "--max-num-batched-tokens", str(work.step_tokens)),
            *("--max-model-len", str(max_length)),
            *("--no-enable-prefix-caching", "--disable-uvicorn-access-log", "--generation-config", "vllm"),
            *options,
        ]


def why_not_loaded(folder: Path) -> str | None:
    """Return why vLLM would not load a folder that octile serves, None if nothing is known of it."""
    config = read_model_config(folder)
    shared = config.n_shared_experts * config.moe_intermediate_size
    widths = {"intermediate_size": config.intermediate_size, "moe_intermediate_size": config.moe_intermediate_size}
    if has_fp8_weights(folder):
        for name, width in (*widths.items(), ("n_shared_experts × moe_intermediate_size", shared)):
            if width % BLOCK[0]:
                return f"its {name} is {width}, and vLLM takes FP8 weights of SwiGLU in whole blocks of {BLOCK[0]} rows"
    return None


def speeds_of(launch: Launch, n: int) -> Iterator[tuple[EngineCase, float]]:
    """Run `engine_speed` as a script and yield its n results, each as it comes.

    Raises:
        RuntimeError: the process ended before all of them.
        TimeoutError: it did not start, or not measure them, in time.
    """
    begin = time.monotonic()
    with launch.log.open("wb") as log, _process(launch, stdin=PIPE, stdout=PIPE, stderr=log) as process:
        assert process.stdout is not None
        with _time_limit(process, START_SECONDS, "started"):
            if not process.stdout.readline():
                raise _early_end(process, launch)
        _say_started(launch, begin)
        with _time_limit(process, ENGINE_SECONDS, f"measured {format_count(n, 'case')}"):
            for _ in range(n):
                if not (line := process.stdout.readline()):
                    raise _early_end(process, launch)
                result = json.loads(line)
                yield EngineCase(*result["case"]), result["speed"]


@contextmanager
def server(launch: Launch, port: int) -> Iterator[str]:
    """Start a server in a process of its own, and yield its URL when its /health answers.

    Raises:
        RuntimeError: it ended before it served.
        TimeoutError: it does not answer.
    """
    url, begin = f"http://127.0.0.1:{port}", time.monotonic()
    with launch.log.open("wb") as log, _process(launch, stdin=DEVNULL, stdout=log, stderr=STDOUT) as process:
        while not _is_healthy(url):
            if process.poll() is not None:
                raise _early_end(process, launch)
            if time.monotonic() > begin + START_SECONDS:
                raise TimeoutError(f"it has not answered at {url}/health within {START_SECONDS:g} s")
            time.sleep(0.2)
        _say_started(launch, begin)
        yield url


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _process(
    launch: Launch, stdin: int, stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with the processes that it starts in a session of its own, and end them all."""
    print(f"starting {launch.name}, whose output goes to {launch.log}", file=sys.stderr, flush=True)
    environment, seconds = {**os.environ, **launch.environment}, EARLY_END_SECONDS
    with subprocess.Popen(
        launch.command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=True
    ) as process:
        try:
            yield process
            seconds = END_SECONDS
        finally:
            with termination_ignored():  # a second SIGTERM would leave it running
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                with suppress(ProcessLookupError):  # what it has left behind would hold the GPU's memory
                    os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def _time_limit(process: subprocess.Popen[bytes], seconds: float, what: str) -> Iterator[None]:
    """Kill a process that is not done in time.

    Raises:
        TimeoutError: it was killed, before it has done what the message says.
    """
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        process.kill()

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if is_over.is_set():
            raise TimeoutError(f"it has not {what} within {seconds:g} s") from error
        raise
    finally:
        timer.cancel()


def _early_end(process: subprocess.Popen[bytes], launch: Launch) -> RuntimeError:
    """Return the error of a process that has ended early, with the last lines of its log."""
    process.wait()
    tail = launch.log.read_text("utf-8", errors="replace").splitlines()[-TAIL:]
    return RuntimeError(f"it ended with exit code {process.returncode}, after:\n{chr(10).join(tail)}")


def _say_started(launch: Launch, begin: float) -> None:
    print(f"{launch.name} has started after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
