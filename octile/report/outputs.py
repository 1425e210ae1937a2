"""The files that commands of the lab and of plans write: pages, recipes, pictures."""

from pathlib import Path
from typing import Any

from octile.checkpoint.files import check_output_file
from octile.validation import Seed, check

ENDINGS = (".html", ".toml")  # of pages and recipes, which have no other; `octile.plan` checks its pictures itself


def check_outputs(options: Any) -> None:
    """Check the options that commands share, before any work: the seed, and the files to write.

    Raises:
        ValueError: the seed is out of range, or an output file is a device, has another ending, or is another
            option's file, too.
        IsADirectoryError, NotADirectoryError, PermissionError: an output file cannot be written.
    """
    check("seed", getattr(options, "seed", 0), Seed)
    prints_json = getattr(options, "json", False)  # instead of a page
    for name in ("write",) if prints_json else ("out", "write", "trace"):
        path = getattr(options, name, None)
        if path is None:
            continue
        default = type(options).__dataclass_fields__[name].default
        is_fixed = isinstance(default, Path) and default.suffix in ENDINGS
        check_output_file(name, path, *([default.suffix] if is_fixed else ()))
        for other, value in vars(options).items():
            files = value if isinstance(value, tuple) else (value,)
            if other != name and any(isinstance(f, str | Path) and Path(f).resolve() == path.resolve() for f in files):
                raise ValueError(f"{name} {str(path)!r} and {other} are the same file: name another one")
