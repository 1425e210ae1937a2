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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO
from urllib.error import URLError
from urllib.request import urlopen

from octile.bench.serve.peer import engine_speed
from octile.bench.serve.peer.engine_speed import MARK, EngineCase, Work, request_line
from octile.checkpoint.hugging_face import has_fp8_weights, read_model_config
from octile.formats import BLOCK

ENGINE_SECONDS = 900.0  # for all cases of a setting; the first start on a machine has taken 228 s
START_SECONDS = 1200.0  # until a server answers; the first start on a machine has taken 8 minutes
END_SECONDS = 30.0  # after SIGTERM; then it is killed
TAIL = 15  # lines of a process that an error shows
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
)


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
        """Return the settings of these names, or all that this vLLM can run if there is none.

        Args:
            names: names of settings.
            part: "engine", "http", or both.

        Raises:
            ValueError: there is no such setting, this vLLM lacks what it needs, or it differs in the other part only.
        """
        if unknown := set(names) - {setting.name for setting in SETTINGS}:
            known = ", ".join(setting.name for setting in SETTINGS)
            raise ValueError(f"peer_setting must be one of {known}, not {min(unknown)}")
        chosen = [setting for setting in SETTINGS if not names or setting.name in names]
        for setting in chosen:
            if names and setting.needs and setting.needs not in self.packages:
                raise ValueError(f"peer_setting {setting.name} needs {setting.needs}, which this vLLM lacks")
            if names and setting.is_http_only and part == "engine":
                raise ValueError(f"peer_setting {setting.name} is one of the server, not of the engine")
        return [setting for setting in chosen if setting.needs is None or setting.needs in self.packages]

    def engine_speeds(self, folder: Path, work: Work, setting: Setting) -> Iterator[tuple[EngineCase, float]]:
        """Yield the cases and their tokens per second, of an engine in a process of its own.

        Raises:
            RuntimeError: the process ended before all of them, or took too long.
        """
        arguments = {"gpu_memory_utilization": MEMORY_SHARE, **setting.arguments}
        command = [str(self.python), engine_speed.__file__, request_line(str(folder.resolve()), work, arguments)]
        yield from speeds_of(command, {**self.environment(setting), **IN_PROCESS}, len(work.cases))

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


def speeds_of(command: Sequence[str], environment: Mapping[str, str], n: int) -> Iterator[tuple[EngineCase, float]]:
    """Run `engine_speed` as a script and yield its n results.

    Raises:
        RuntimeError: the process ended before all of them, or took too long.
    """
    tail = deque[str](maxlen=TAIL)
    with _process(command, environment, subprocess.PIPE) as (process, output):
        timer = threading.Timer(ENGINE_SECONDS, process.kill)
        timer.start()
        try:
            for line in output:
                if line.startswith(MARK):
                    result = json.loads(line.removeprefix(MARK))
                    yield EngineCase(*result["case"]), result["speed"]
                    n -= 1
                    if not n:
                        return
                else:
                    tail.append(line.rstrip())
            process.wait()
        finally:
            timer.cancel()
    raise RuntimeError(f"its process ended with exit code {process.returncode}, after:\n{chr(10).join(tail)}")


@contextmanager
def server(command: Sequence[str], port: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Start a server in a process of its own, and yield its URL when its /health answers.

    Raises:
        RuntimeError: it ended before it served.
        TimeoutError: it does not answer.
    """
    url, tail = f"http://127.0.0.1:{port}", deque[str](maxlen=TAIL)
    with _process(command, environment, subprocess.DEVNULL) as (process, output):
        reader = threading.Thread(target=lambda: tail.extend(line.rstrip() for line in output), daemon=True)
        reader.start()
        deadline = time.monotonic() + START_SECONDS
        while not _is_healthy(url):
            if process.poll() is not None:
                reader.join()
                raise RuntimeError(f"it ended with exit code {process.returncode}, after:\n{chr(10).join(tail)}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not answered at {url}/health within {START_SECONDS:g} s")
            time.sleep(0.2)
        yield url


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str], stdin: int
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Start a process with the processes that it starts in a session of its own, and end them all."""
    process = subprocess.Popen(
        command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield process, process.stdout
    finally:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print("killing a process that has not ended after SIGTERM", file=sys.stderr, flush=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it has left behind, which would hold the GPU's memory
        process.wait()


def _is_healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (URLError, OSError):
        return False
