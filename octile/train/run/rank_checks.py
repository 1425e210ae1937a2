"""Checks of a run's ranks before it begins: as many as configured, and all with the same settings and code."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from octile.command_text import train_command
from octile.parallel.ranks import Ranks, will_restart
from octile.torchrun import count_ranks
from octile.train.config import FILE_TEXTS, TrainConfig, flatten
from octile.train.run.folder import RunFolder
from octile.train.source_digest import source_digest


def check_world(config: TrainConfig) -> None:
    """Refuse another number of processes than the configuration says, or restarts that would not find their run.

    Raises:
        ValueError: torchrun has started more or fewer; or it restarts them, and `out` is not given.
    """
    started, pp, dp = count_ranks(), config.parallel.pp, config.parallel.dp
    if started != pp * dp:
        begun = f"torchrun has started {started} (WORLD_SIZE)" if started > 1 else "this is one process"
        given = f"parallel.dp is {dp}" if pp == 1 else f"parallel.pp × parallel.dp is {pp} × {dp}"
        fitting = max(started // pp, dp)
        options = f"--parallel.dp {fitting}" if pp == 1 else f"--parallel.pp {pp} --parallel.dp {fitting}"
        sizes = {"pp": pp, "dp": dp, "ep": config.parallel.ep}
        fewer = ""
        if started == 1:
            ones = " ".join(f"--parallel.{name} 1" for name, size in sizes.items() if size > 1)
            fewer = f", or {ones} in this process"
        elif started < pp * dp and started % pp == 0 and _can_have(config, started // pp):
            fewer = f", or --parallel.dp {started // pp} for these {started}"
        raise ValueError(
            f"{given}, but {begun}: it must be the number of all processes; {train_command(pp * fitting)} {options} …"
            f"{fewer}"
        )
    if pp * dp > 1 and config.out is None and will_restart():
        raise ValueError("out is not given: --max-restarts needs --out RUN, so that restarted ranks find their run")


def _can_have(config: TrainConfig, dp: int) -> bool:
    """Whether the configuration allows another number of data-parallel ranks."""
    try:
        replace(config, parallel=replace(config.parallel, dp=dp))
    except ValueError:
        return False
    return True


def is_restarted(config: TrainConfig) -> bool:
    """Whether torchrun has restarted the ranks of a run that had begun."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return restarts > 0 and config.out is not None and RunFolder(config.out).config_file.is_file()


def check_agreement(ranks: Ranks, config: TrainConfig, resume: bool) -> None:
    """Refuse ranks that would train something else.

    Raises:
        ValueError: two ranks differ in code, version of torch or configuration; all ranks raise it.
    """
    if ranks.size == 1:  # whose start need not wait for the digest of all source files
        return
    ranks.agree("octile's code and torch's version", f"octile {source_digest()} and torch {torch.__version__}")
    ranks.agree("--resume", str(resume))
    settings = dict(flatten(config.to_values()))
    own = {name: str(value) for name, value in settings.items()}
    for name, values in differing(ranks.gather(own, dict[str, str])).items():
        rank = next(rank for rank, value in enumerate(values) if value != values[0])
        if name in FILE_TEXTS:
            raise ValueError(
                f"{FILE_TEXTS[name]} must name the same file on all ranks, but that of rank {rank} has other contents "
                "than that of rank 0"
            )
        raise ValueError(
            f"{name} must be the same on all ranks: rank 0 has {values[0]}, but rank {rank} has {values[rank]}"
        )


def differing(settings: list[dict[str, str]]) -> dict[str, list[str]]:
    """The settings of which two ranks have different values, with those of all ranks."""
    names = dict.fromkeys(name for own in settings for name in own)
    values = {name: [own.get(name, "none") for own in settings] for name in names}
    return {name: different for name, different in values.items() if len(set(different)) > 1}
