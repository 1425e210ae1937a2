"""`octile lab …`: what the command line reads, and who does the work. Each imports what it needs when it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import tyro

from octile.train.config import MAX_SEED

Parse = Callable[..., Any]  # (form, arguments, command) → the form, filled; `octile.cli` gives it


@dataclass(frozen=True)
class Formats:
    """The values, gaps and ranges of every number format, as a table and as pictures.

    Attributes:
        run: a finished run, whose activations and gradients the pictures take; without one an untrained tiny model's.
        out: the page to write.
        json: print JSON and write no page.
    """

    run: tyro.conf.Positional[Path | None] = None
    out: Path = Path("lab/formats.html")
    json: bool = False


def formats(asked: Formats) -> None:
    """Values, gaps and ranges of every number format, and what they do to training, in pictures."""
    from octile.lab.formats import ALL, facts

    if asked.json:
        print(json.dumps([asdict(facts(fmt)) for fmt in ALL], indent=2))
        return
    from rich.console import Console

    from octile.lab.pages.formats import formats_table, screen_table, write_formats_page
    from octile.lab.real_tensors import real_tensors

    console = Console()
    tensors = real_tensors(asked.run)  # refuses a bad run before anything is shown
    console.print(screen_table(formats_table()))
    console.print(f"pictures: {write_formats_page(asked.out, tensors)}", highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Accumulate:
    """How wrong a long FP8 sum gets in a tensor core: by its length, its data and the promotion interval.

    Attributes:
        k: lengths of the sums, separated by commas.
        data: normal (both signs), positive (one sign), or both, separated by a comma.
        promote: promotion intervals, separated by commas; never is one of them.
        arch: the tensor core: sm_80, sm_89, sm_90, sm_90_mma or sm_100.
        fmt: e4m3 or e5m2.
        out: the page to write.
        json: print JSON and write no page.
    """

    k: str = "256,512,1024,2048,4096,8192,16384"
    data: str = "normal,positive"
    promote: str = "32,64,128,256,never"
    arch: str = "sm_90"
    fmt: Literal["e4m3", "e5m2"] = "e4m3"
    out: Path = Path("lab/accumulate.html")
    json: bool = False


def accumulate(asked: Accumulate) -> None:
    """How wrong a long FP8 sum gets in a tensor core, by its length, its data and the promotion interval."""
    from octile.lab.pages.accumulate import show_accumulate

    intervals = _intervals(asked.promote)
    ks = tuple(_number("k", word) for word in _words(asked.k))
    show_accumulate(ks, tuple(_words(asked.data)), intervals, asked.arch, asked.fmt, asked.out, asked.json)


def _intervals(text: str) -> tuple[int | None, ...]:
    return tuple(None if word == "never" else _number("promote", word) for word in _words(text))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _number(name: str, word: str) -> int:
    """A whole number of at least 1.

    Raises:
        ValueError: word is none.
    """
    if not word.isdecimal() or int(word) < 1:
        raise ValueError(f"{name} must be whole numbers of at least 1, separated by commas, not {word!r}")
    return int(word)


@dataclass(frozen=True)
class Capture:
    """Keep the operands of a step's products in a file, by doing the step again from the run's checkpoint.

    Attributes:
        run: the run's folder.
        step: counted from 1; the one after the newest checkpoint if not given.
        layers: patterns of layers' names, separated by commas.
        products: some of fprop, dgrad and wgrad, separated by commas.
        out: the file; captures/step_N.safetensors in the run's folder if not given.
    """

    run: tyro.conf.Positional[Path]
    step: int | None = None
    layers: str = "*"
    products: str = "fprop,dgrad,wgrad"
    out: Path | None = None


def capture(asked: Capture) -> None:
    """The operands of a step's products in a file, for what-if."""
    from octile.lab.capture import parse_gemm_names
    from octile.lab.run import capture_run

    path = capture_run(asked.run, asked.step, asked.layers, parse_gemm_names(asked.products), asked.out)
    print(f"captured: {path}")


@dataclass(frozen=True)
class WhatIf:
    """The products of a captured step in every combination of format, block, scale rule, promotion and tensor core.

    Attributes:
        captures: files that octile lab capture wrote; of several, the first is looked at in all combinations and the
            others show how its layers fare step by step.
        layers: patterns of layers' names, separated by commas; of experts the busiest stands for its layer.
        products: some of fprop, dgrad and wgrad, separated by commas; all that were captured if not given.
        formats: some of e4m3, e5m2, e5m6, int8, mx (with 1×32 blocks) and nvfp4 (with blocks and scales of its own).
        blocks: some of tensor, row, 1x128, 128x128 (weights; everything else 1x128) and 1x32.
        scales: some of float32, up, nearest, down (powers of two) and ocp (MX's own rule).
        promote: intervals at which the tensor core's sum moves to FP32, separated by commas; never is one of them.
        arch: some of sm_80, sm_89, sm_90, sm_90_mma, sm_100, fp32 and exact.
        sample: rows of each operand that are multiplied.
        seed: of their drawing.
        top: combinations to list of each format.
        tokenizer: file or folder; the run's own if the capture lies in its folder.
        out: the page to write.
        json: print JSON and write no page.
    """

    captures: tyro.conf.Positional[tuple[Path, ...]]
    layers: str = "*"
    products: str | None = None
    formats: str = "e4m3,e5m2,e5m6,int8,mx,nvfp4"
    blocks: str = "tensor,row,1x128,128x128,1x32"
    scales: str = "float32,up,nearest,down,ocp"
    promote: str = "32,128,never"
    arch: str = "sm_90,exact"
    sample: int = 32
    seed: int = 0
    top: int = 4
    tokenizer: Path | None = None
    out: Path = Path("lab/what_if.html")
    json: bool = False


def what_if(asked: WhatIf) -> None:
    """A captured step's products in every format, block, scale rule, promotion and tensor core, ranked."""
    from octile.lab.capture import parse_gemm_names
    from octile.lab.pages.what_if import Asked, show_what_if
    from octile.lab.variants import Choice

    if not asked.captures:
        raise ValueError("name a capture: octile lab capture writes them")
    choice = Choice(
        _words(asked.formats), _words(asked.blocks), _words(asked.scales), _intervals(asked.promote), _words(asked.arch)
    )
    products = parse_gemm_names(asked.products) if asked.products else None
    options = asked.sample, asked.seed, asked.top, asked.tokenizer, asked.out, asked.json
    show_what_if(asked.captures, Asked(asked.layers, products, choice, *options))


@dataclass(frozen=True)
class Hardware:
    """What DeepSeek-V3's suggestions to hardware makers would bring to a captured step: in error and in bytes moved.

    Attributes:
        capture: a file that octile lab capture wrote.
        layers: patterns of layers' names, separated by commas.
        products: some of fprop, dgrad and wgrad, separated by commas; all that were captured if not given.
        sample: rows of each operand that are multiplied.
        seed: of their drawing.
        out: the page to write.
        json: print JSON and write no page.
    """

    capture: tyro.conf.Positional[Path]
    layers: str = "*"
    products: str | None = None
    sample: int = 32
    seed: int = 0
    out: Path = Path("lab/hardware.html")
    json: bool = False


def hardware(asked: Hardware) -> None:
    """What other hardware would bring to a captured step, in error and in bytes moved."""
    from octile.lab.capture import parse_gemm_names
    from octile.lab.pages.hardware import show_hardware

    products = parse_gemm_names(asked.products) if asked.products else None
    show_hardware(asked.capture, asked.layers, products, asked.sample, asked.seed, asked.out, asked.json)


@dataclass(frozen=True)
class Preflight:
    """Which layers of a model would suffer in 8 bits; writes a recipe that leaves these in BF16.

    Attributes:
        model: a run folder, or a Hugging Face folder of a DeepSeek model.
        recipe: the number formats that are planned.
        text: what the model reads: a text file, a folder, hf:NAME, or stdlib.
        batches, batch_size, sequence_length: how much of it.
        least_snr: a product with a worse signal-to-noise ratio, in dB, is advised to stay in BF16.
        sample: rows of each operand that are multiplied.
        seed: of their drawing.
        write: the recipe to write, for octile train --recipe.
        out: the page to write.
        json: print JSON and write no page.
    """

    model: tyro.conf.Positional[Path]
    recipe: str = "deepseek_v3"
    text: str = "stdlib"
    batches: int = 2
    batch_size: int = 4
    sequence_length: int = 128
    least_snr: float = 20.0
    sample: int = 32
    seed: int = 0
    write: Path = Path("lab/recipe.toml")
    out: Path = Path("lab/preflight.html")
    json: bool = False


def preflight(asked: Preflight) -> None:
    """Which layers of a model would suffer in 8 bits, and a recipe that spares them."""
    from octile.lab.pages.preflight import Asked, show_preflight

    options = {f.name: getattr(asked, f.name) for f in fields(Asked)}
    show_preflight(asked.model, Asked(**options))


COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "formats": (Formats, formats),
    "accumulate": (Accumulate, accumulate),
    "capture": (Capture, capture),
    "what-if": (WhatIf, what_if),
    "hardware": (Hardware, hardware),
    "preflight": (Preflight, preflight),
}


def run(arguments: list[str], parse: Parse) -> None:
    """Runs one of the lab's commands; without one, lists them.

    Raises:
        ValueError: there is no such command, or its arguments are not right.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {name:12}{work.__doc__}" for name, (_, work) in COMMANDS.items()]
        print("usage: octile lab COMMAND [--help] …\n\n" + "\n".join(lines))
        return
    if name not in COMMANDS:
        raise ValueError(f"unknown lab command {name!r}; there are {', '.join(COMMANDS)}")
    form, work = COMMANDS[name]
    asked = parse(form, rest, f"lab {name}")
    _check(asked)
    work(asked)


def _check(asked: Any) -> None:
    """What commands have in common, before any work.

    Raises:
        ValueError: seed cannot be one.
        IsADirectoryError, NotADirectoryError, PermissionError: a file cannot be written where it is to lie.
    """
    seed = getattr(asked, "seed", 0)
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be from 0 to 2**63 - 1, not {seed}")
    for name in ("write",) if getattr(asked, "json", False) else ("out", "write"):
        path = getattr(asked, name, None)
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(f"{name} {str(path)!r} is a folder: name a file")
        folder = next(folder for folder in path.parents if folder.exists())
        if not folder.is_dir():
            raise NotADirectoryError(f"{name} {str(path)!r} cannot be written: {str(folder)!r} is no folder")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{name} {str(path)!r} cannot be written: {str(folder)!r} is not yours to write to")
