"""What a benchmark finds: rows of one form, for a person's screen and for a file."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from octile import __version__


@dataclass(frozen=True)
class Against:
    """The peer measured in the same run, and how many times its value ours is."""

    peer: str
    value: float
    ratio: float


@dataclass(frozen=True)
class Row:
    """One figure: of `case`, `what` has this `value` in `unit`."""

    case: str
    what: str
    value: float
    unit: str
    against: Against | None = None


def beside(case: str, what: str, value: float, unit: str, peer: str, peer_value: float) -> Row:
    """A row with its peer."""
    return Row(case, what, value, unit, Against(peer, peer_value, value / peer_value))


def show(title: str, rows: list[Row]) -> None:
    """Prints rows as a table."""
    table = Table(title=title, title_justify="left")
    for name in ("case", "what", "value", "unit", "peer", "its value", "ratio"):
        table.add_column(name, justify="right" if name in ("value", "its value", "ratio") else "left")
    for row in rows:
        peer = (row.against.peer, f"{row.against.value:,.4g}", f"{row.against.ratio:.3f}") if row.against else ("",) * 3
        table.add_row(row.case, row.what, f"{row.value:,.4g}", row.unit, *peer)
    Console().print(table)


def write(path: Path, rows: list[Row]) -> None:
    """Writes rows and what they were measured on."""
    content = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What a figure was measured on: hardware, versions, commit, date."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "octile": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree, with "+" where files differ from it; None in an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
