"""`octile doctor`: this machine, and the kernels that it uses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Report this machine, octile's caches on its disk, and which kernel runs each operator.

    Attributes:
        kernels: compile the kernels and list their registers, stack and shared memory; needs no GPU.
        compile: the architecture to compile for: sm_80, sm_86, sm_89, sm_90 or sm_100; the GPU here, or sm_90, if not
            given.
        json: print JSON.
    """

    kernels: bool = False
    compile: str | None = None
    json: bool = False


def run(options: Options) -> None:
    """Print what is found; compile the kernels if asked.

    Raises:
        ValueError: the architecture is unknown.
    """
    from octile.bench.doctor import check_architecture, compile_kernels, examine, show

    if options.compile is not None:
        check_architecture("compile", options.compile)
    found = examine()
    if options.kernels or options.compile:
        found["kernels"] = compile_kernels(options.compile, is_quiet=options.json)
    show(found, as_json=options.json)
