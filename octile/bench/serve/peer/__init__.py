"""`octile bench serve --peer vllm`: octile and vLLM with the same weights, prompts, sampling and measure.

engine_speed.py     decode and prefill by an engine's steps; as a script, of vLLM
octile_engine.py    the same of octile
streams.py          streams over HTTP, whose requests arrive as a Poisson process
vllm.py             where vLLM is imported, its settings, its processes
random_folder.py    a folder with random weights that both load

Both have the GPU alone, one after the other: octile's engine, vLLM's with each of its settings, octile's server, vLLM's
with each of its settings. Octile comes first: it starts in seconds, vLLM in minutes, so that each case of vLLM can be
compared at once, whatever interrupts the next; and arrivals are shares of octile's capacity. A row for each setting
compares it with octile; the setting with the lowest ratio is the one that the goals judge. Rows come as they are
measured.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from octile.bench import goals
from octile.bench.goals import DECODE, THROUGHPUT, weights_case
from octile.bench.rows import RATIO, Row, compare, table_with
from octile.bench.serve.endpoint import serving
from octile.bench.serve.peer.engine_speed import EngineCase, Work
from octile.bench.serve.peer.octile_engine import engine_speeds
from octile.bench.serve.peer.random_folder import V2_LITE, V2_LITE_WIDTH, write_random_folder
from octile.bench.serve.peer.streams import Traffic, measure_server
from octile.bench.serve.peer.vllm import Launch, Setting, Vllm, free_port, server, why_not_loaded
from octile.checkpoint.hugging_face import Weights, checkpoint_folder, has_fp8_weights, read_model_config
from octile.extras import require
from octile.serve.http.command import PACKAGES
from octile.serve.weights.load import Folder

LEGEND = (
    f"{RATIO} Higher is better for speeds, lower is better for times. "
    f"The dense layer of the {goals.V2_LITE} is {V2_LITE_WIDTH:,} wide here."
)
CASES = (
    *(EngineCase(batch, 1024, True) for batch in (1, 32, 256)),
    EngineCase(8, 1024, False),
    EngineCase(16, 4096, False),
)
Part = Literal["engine", "http"]


@dataclass(frozen=True)
class Peer:
    """What `octile bench serve --peer vllm` is to measure.

    Attributes:
        rows_file: file for the rows; the logs of vLLM are written to its folder.
        python: the interpreter that imports vLLM; None: this one.
        settings: names of vLLM's settings; (): all that it can run.
        part: the engines or the servers; None: both.
    """

    rows_file: Path
    python: Path | None = None
    settings: Sequence[str] = ()
    part: Part | None = None


@dataclass(frozen=True)
class Compared:
    """A folder, and how both sides serve it.

    Attributes:
        folder: Hugging Face folder.
        name: name of the model, with which cases begin.
        settings: settings of vLLM.
        device: device of octile.
        work: what the engines do.
        rows_file: as in `Peer`.
        traffic: what the clients of the servers send.
    """

    folder: Path
    name: str
    settings: Sequence[Setting]
    device: torch.device
    work: Work
    rows_file: Path
    traffic: Traffic = field(default_factory=Traffic)

    def log(self, setting: Setting, part: Part) -> Path:
        """The file for what vLLM prints."""
        return self.rows_file.with_name(f"{self.rows_file.stem}-{self.folder.name}-{setting.name}-{part}.log")


def rows(run: Path | None, peer: Peer) -> Iterator[Row]:
    """Yield octile's speed, and then its ratio to each setting of vLLM.

    Args:
        run: a run or a Hugging Face folder; None: folders with random weights of V2-Lite's shape, in FP8 and then in
            BF16, which are made in the folder of temporary files.
        peer: what is measured.

    Raises:
        ImportError: vLLM cannot be imported, or a package of the extra `serve` is missing.
        FileNotFoundError: there is no model or no tokenizer.
        ValueError: there is no GPU, vLLM would not load the model, or a setting is none of this vLLM.

    These are raised before anything is measured.
    """
    if not torch.cuda.is_available():
        raise ValueError("peer vllm is measured on a GPU, and torch finds none here")
    require(*PACKAGES, extra="serve")
    if run is not None:
        Folder.open(run)
        if why := why_not_loaded(run):
            raise ValueError(f"run must be a folder that vLLM loads, which {run} is not: {why}")
    vllm = Vllm.find(peer.python or Path(sys.executable))
    settings, device = vllm.choose_settings(peer.settings, peer.part), torch.device("cuda")
    _say(f"settings of vLLM {vllm.version}: {', '.join(setting.name for setting in settings)}")
    _say(f"each result is written to {peer.rows_file} when it is measured")
    if run is not None:
        compared = _compared(checkpoint_folder(run), settings, device, peer.rows_file)
        if missing := [name for name in peer.settings if name not in {setting.name for setting in compared.settings}]:
            raise ValueError(f"peer_setting {missing[0]} needs FP8 weights, which {run} has not")
        yield from compared_rows(compared, vllm, peer.part)
        return
    formats: tuple[Weights, ...] = ("fp8", "bf16")
    for weights in formats:
        if weights == "bf16" and all(setting.is_fp8_only for setting in settings):
            continue
        with tempfile.TemporaryDirectory(prefix="octile-bench-") as made:
            folder = Path(made, f"v2-lite-{weights}")
            _say(f"writing {folder}, random weights of V2-Lite's shape")
            write_random_folder(folder, V2_LITE, weights, device)
            yield from compared_rows(_compared(folder, settings, device, peer.rows_file), vllm, peer.part)


def show(rows: Sequence[Row]) -> str:
    """Format the table, and the verdicts on the goals."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return "\n\n".join(filter(None, (table_with(LEGEND, rows), goals.vllm_verdicts(rows, gpu))))


def compared_rows(compared: Compared, vllm: Vllm, part: Part | None) -> Iterator[Row]:
    """Yield the rows of one folder; a setting that fails is left out, which stderr says."""
    if part != "http":
        yield from _engine_rows(compared, vllm)
    if part != "engine":
        yield from _http_rows(compared, vllm)


def _compared(folder: Path, settings: Sequence[Setting], device: torch.device, rows_file: Path) -> Compared:
    """Name a folder, and leave out the settings that cannot run it."""
    config, is_fp8 = read_model_config(folder), has_fp8_weights(folder)
    usable = [setting for setting in settings if is_fp8 or not setting.is_fp8_only]
    is_v2_lite = replace(config, extra={}) == V2_LITE
    name = weights_case(goals.V2_LITE if is_v2_lite else folder.resolve().name, "FP8" if is_fp8 else "BF16")
    return Compared(folder, name, usable, device, Work(CASES, config.vocab_size), rows_file)


def _engine_rows(compared: Compared, vllm: Vllm) -> Iterator[Row]:
    _say(f"measuring {compared.name}, octile's engine")
    ours = dict[EngineCase, float]()
    for case, speed in engine_speeds(compared.folder, compared.work, compared.device):
        ours[case] = speed
        yield Row(*_names(compared.name, case), speed, "tokens/s")
    for setting in compared.settings:
        if setting.is_http_only:
            continue
        label = vllm.label(setting)
        log = compared.log(setting, "engine")
        try:
            for case, speed in vllm.engine_speeds(compared.folder, compared.work, setting, log):
                row = compare(*_names(compared.name, case), ours[case], "tokens/s", label, speed)
                _say(f"{row.case}: {speed:,.0f} tokens/s, octile {row.value:,.0f}")
                yield row
        except (RuntimeError, TimeoutError) as error:
            _say(f"left out: {label}: {error}")


def _names(name: str, case: EngineCase) -> tuple[str, str]:
    """Case and what of a row."""
    if case.decodes:
        return goals.decode_case(name, case.requests), DECODE
    return goals.prefill_case(name, case.requests, case.prompt), THROUGHPUT


def _http_rows(compared: Compared, vllm: Vllm) -> Iterator[Row]:
    capacity, work, traffic = dict[int, float](), compared.work, compared.traffic
    vocab_size, ours = work.vocab_size, dict[tuple[str, str], float]()
    options = (
        *("--engine.max-batch", str(work.max_batch), "--engine.max-step-tokens", str(work.step_tokens)),
        *("--limits.in-flight", str(2 * work.max_batch)),
    )
    _say(f"measuring {compared.name}, octile serve")
    with serving(compared.folder, *options) as url:
        for found in measure_server(url, compared.name, traffic, vocab_size, capacity):
            ours[found.case, found.what] = found.value
            yield found
    for setting in compared.settings:
        label, port = vllm.label(setting), free_port()
        command = vllm.serve_command(compared.folder, port, setting, work, traffic.prompt + traffic.new_tokens)
        log = compared.log(setting, "http")
        launch = Launch(f"the server of {label}", command, vllm.environment(setting), log)
        try:
            with server(launch, port) as url:
                for found in measure_server(url, compared.name, traffic, vocab_size, capacity):
                    if found.unit != "requests/s":  # the arrivals are the same
                        value = ours[found.case, found.what]
                        yield compare(found.case, found.what, value, found.unit, label, found.value)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            _say(f"left out: {label}: {error}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
