"""Benchmarks of this machine: `octile bench`, `octile doctor`. The figures in the README are measured with them.

gemm.py            `octile bench gemm`: octile's GEMMs vs. other libraries'
casts.py           `octile bench casts`: quantization and other memory-bound operators vs. a copy
step/              `octile bench step`: a training step's speed and memory
train/             `octile bench train`: the speed of `octile train` vs. torchtitan's trainer
transformers.py    `octile bench transformers`: converted models of transformers
attention.py       `octile bench attention`: attention of decoding over the latent cache vs. a copy
serve/             `octile bench serve`: throughput and latency of `octile serve`
indexer.py         `octile bench indexer`: the lightning indexer's logits vs. DeepGEMM's, and the choice of keys
sparse.py          `octile bench sparse`: attention over top-k positions vs. torch's gather and products
dispatch.py        `octile bench dispatch`: dispatch and combine between GPUs vs. a copy and vs. all_to_all_single
lab.py             `octile bench lab`: the tensor core model and telemetry
tune.py            `octile bench tune`: a search for the fastest GEMM kernels
tune_casts.py      `octile bench tune-casts`: a search for the fastest quantization kernels
doctor.py          `octile doctor`: this machine and which kernels it uses
command.py         the options of `octile bench`; doctor_command.py has those of `octile doctor`

goals.py           floors and aims for the benchmarks' results
rows.py            a result and how it is printed and written
shapes.py          the GEMMs that are measured
drawn.py           others, drawn by a seed
model_shapes.py    the models whose layers they are
gemm_case.py       their operands, calls and checks
gemm_peers.py      the same GEMMs by other libraries
flash_mla.py       attention by FlashMLA
gemm_table.py      their results as a table
kernel_time.py     times of GPU kernels
timing.py          times of calls
subprocess_call.py a call in a process of its own
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octile.bench.serve.peer import Peer

TITLES = {
    "gemm": "GEMMs",
    "casts": "quantization",
    "step": "a training step",
    "train": "octile train",
    "transformers": "models of transformers",
    "attention": "attention of decoding",
    "serve": "octile serve",
    "serve.peer": "octile vs. vLLM",
    "indexer": "the lightning indexer",
    "sparse": "sparse attention",
    "dispatch": "dispatch and combine",
    "lab": "the tensor core model",
}


def run(
    what: str,
    json: Path | None = None,
    folder: Path | None = None,
    shapes: str | None = None,
    seed: int | None = None,
    peer: Peer | None = None,
) -> None:
    """Run a benchmark, print its table, and write its rows to a file. After Ctrl-C, the rows so far are used.

    Args:
        what: "gemm", "casts", "step", "train", "transformers", "attention", "serve", "serve.peer", "indexer",
            "sparse", "dispatch" or "lab".
        json: file for the rows, with machine, versions and commit; None: no file.
        folder: the run to serve, for "serve" and "serve.peer"; None on the ranks that torchrun has started, and for
            random weights with a peer.
        shapes, seed: which GEMMs "gemm" measures, see `octile.bench.gemm.rows`.
        peer: what "serve.peer" measures, see `octile.bench.serve.peer.rows`.

    Raises:
        FileNotFoundError: the folder for the file does not exist, or the one to serve has no model.
        ImportError: "serve" needs a package of the extra `serve` that is not installed, or the peer cannot be imported.
        IsADirectoryError, PermissionError: the file cannot be written.
        ValueError: the file is a device; what is "train", or "gemm" of drawn shapes, and there is no GPU; "dispatch"
            and torchrun has not started ranks on several, or "serve" and it has started more ranks than there are GPUs.
            "serve.peer" raises those of `octile.bench.serve.peer.rows`.

    These are raised before anything is measured.
    """
    from octile.bench.rows import Row, write
    from octile.checkpoint.files import check_output_file
    from octile.report.console import Console
    from octile.report.machine import describe_machine, machine
    from octile.signals import termination_ignored

    if json:
        if not json.parent.is_dir():
            raise FileNotFoundError(f"json must be in a folder that exists: {json.parent} does not")
        check_output_file("json", json)
    bench, rows, measured_on = import_module(f"octile.bench.{what}"), list[Row](), machine()
    try:
        arguments = {"serve": (folder,), "gemm": (shapes, seed), "serve.peer": (folder, peer)}.get(what, ())
        for row in bench.rows(*arguments):
            rows.append(row)
            if json:
                write(json, rows, measured_on)  # whatever ends this process, what it has measured is there
    finally:
        if rows:
            with termination_ignored():  # `timeout` may send a second SIGTERM
                line = Console().print_line
                line(f"{TITLES[what]} on {describe_machine(measured_on)}\n\n{bench.show(rows)}")
                if json:
                    line(f"\nwritten to {json}")
                if json and what == "gemm" and measured_on["gpu"]:
                    line(bench.draw(json))


def search(shape: str | None, minutes: float | None) -> None:
    """Search for the fastest GEMM kernels; see `octile.bench.tune`.

    Args:
        shape: "M,N,K", or None for every shape of `octile bench gemm`.
        minutes: the time after which no further shape is begun; None: 10.

    Raises:
        ValueError: shape is not three integers, or as in `octile.bench.tune.run`.
    """
    from octile.bench.tune import run as tune

    sides = shape.split(",") if shape else []
    if shape and (len(sides) != 3 or not all(side.strip().isdecimal() for side in sides)):
        raise ValueError(f"shape must be M,N,K, such as 4096,2112,7168, not {shape!r}")
    m_n_k = (int(sides[0]), int(sides[1]), int(sides[2])) if shape else None
    tune(m_n_k, 10.0 if minutes is None else minutes)


def search_casts() -> None:
    """Search for the fastest settings of quantization kernels; see `octile.bench.tune_casts`."""
    from octile.bench.tune_casts import run as tune

    tune()
