"""`octile bench`: measure this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octile.bench import run as run_benchmark
from octile.bench import search, search_casts
from octile.options import Positional
from octile.serve.newest_run import newest_run
from octile.torchrun import count_ranks

What = Literal[
    "gemm", "casts", "step", "train", "transformers", "attention", "serve", "indexer", "sparse", "dispatch", "lab",
    "tune", "tune-casts", "comm",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Measure this machine.

    Attributes:
        what: gemm, casts (quantization), step (a model's training step: speed, memory, checkpoint size), train
            (`octile train` on a GPU, vs. torchtitan), or transformers (converted models of that library: speed,
            memory). attention (of decoding, over the latent cache), indexer (logits of sparse attention's lightning
            indexer, and its top-k keys), sparse (attention over the top-k keys), or lab (the tensor core model). serve
            (`octile serve`: throughput, time to the first token and between tokens, what is refused), or dispatch (of
            tokens to experts on other GPUs; by torchrun; also called comm). tune searches the fastest GEMM
            configurations on a Hopper GPU and stores them. tune-casts shows the fastest settings of quantization
            kernels there.
        json: also write the rows to this file, and the logs of a peer to its folder. With --peer, if not given, a file
            in a new temporary folder.
        run: a run folder or a Hugging Face folder to serve; if not given, the newest under runs/, or with --peer
            random weights of V2-Lite's shape, in FP8 and in BF16.
        peer: vllm: serve compares octile with vLLM instead, engines and servers, with the same weights and prompts.
        peer_python: the Python that imports the peer, this one if not given. vLLM pins a version of torch, so it
            commonly has an environment of its own.
        peer_setting: a setting of vLLM; can be given several times, and is measured in that order. triton, deep_gemm
            and flashinfer are its backends of experts; triton+rust and deep_gemm+rust add its HTTP front end in Rust;
            triton+cutlass has CUTLASS's kernels for its dense layers. All that it can run if not given.
        part: engine or http, which a peer is compared in; both if not given.
        shapes: the shapes of gemm on a GPU: list (DeepSeek-V3's, and those of DeepGEMM's tests), or drawn (from the
            layers of 45 public models, with drawn numbers of tokens); both if not given.
        seed: draw the shapes of gemm by this number; the date if not given.
        shape: M,N,K of one GEMM to tune; every shape of gemm if not given.
        minutes: after so many minutes, tune starts no further shape.
    """

    what: Positional[What] = "step"
    json: Path | None = None
    run: Path | None = None
    peer: Literal["vllm"] | None = None
    peer_python: Path | None = None
    peer_setting: tuple[str, ...] = ()
    part: Literal["engine", "http"] | None = None
    shapes: Literal["list", "drawn"] | None = None
    seed: int | None = None
    shape: str | None = None
    minutes: float | None = None


def run(options: Options) -> None:
    """Measure, or search the fastest kernels.

    Raises:
        ValueError: an option has no effect; or as for `octile.bench.run` and `octile.bench.search`, which raise the
            other exceptions, too.
    """
    _refuse_elsewhere(options, "tune", ("shape", "minutes"))
    if options.what.startswith("tune") and options.json is not None:
        raise ValueError(
            "json is an option of gemm, casts, step, train, transformers, attention, serve, indexer, sparse, dispatch "
            f"and lab, not of {options.what}, which writes no rows"
        )
    _refuse_elsewhere(options, "gemm", ("shapes", "seed"))
    if options.shapes == "list" and options.seed is not None:
        raise ValueError("seed has no effect on shapes list: it draws shapes")
    _refuse_elsewhere(options, "serve", ("run", "peer"))
    for name in ("peer_python", "peer_setting", "part"):
        if getattr(options, name) and options.peer is None:
            raise ValueError(f"{name} is an option of serve with a peer: add --peer vllm")
    for name in ("run", "peer"):
        if count_ranks() > 1 and getattr(options, name) is not None:
            raise ValueError(f"{name} is an option of one process: serve on several ranks measures a model of its own")
    if options.peer is not None:
        from octile.bench.serve.peer import Peer

        with _rows_file(options.json) as json:
            peer = Peer(json, options.peer_python, options.peer_setting, options.part)
            run_benchmark("serve.peer", json, options.run, peer=peer)
    elif options.what == "tune-casts":
        search_casts()
    elif options.what == "tune":
        search(options.shape, options.minutes)
    else:
        is_run = options.what == "serve" and count_ranks() == 1
        what = "dispatch" if options.what == "comm" else options.what
        folder = (options.run or newest_run()) if is_run else None
        run_benchmark(what, options.json, folder, options.shapes, options.seed)


@contextmanager
def _rows_file(json: Path | None) -> Iterator[Path]:
    """Yield the file for the rows of a peer; if not given, one in a new folder, which stays if anything is in it."""
    if json is not None:
        yield json
        return
    folder = Path(tempfile.mkdtemp(prefix="octile-bench-"))
    try:
        yield folder / "vllm.json"
    finally:
        with suppress(OSError):
            folder.rmdir()


def _refuse_elsewhere(options: Options, what: str, names: Sequence[str]) -> None:
    """Refuse options that only one benchmark has, if another one is run."""
    for name in names:
        if options.what != what and getattr(options, name) is not None:
            raise ValueError(f"{name} is an option of {what}, not of {options.what}")
