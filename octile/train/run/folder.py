"""The folder of a run or a comparison: its files and its lock.

    config.json      the whole configuration          model/         the best model in Hugging Face's layout
    data/            tokens and tokenizer             checkpoints/   what `--resume` continues from
    metrics.jsonl    the measurements                 loggers.json   the ids that loggers have given the run
    tensorboard/, wandb/   what the loggers of these names write
    telemetry.jsonl  measurements of octile.lab       captures/      operands that octile.lab saved
    summary.json     facts for the report             report.html, sample.txt
    trace.json.gz    what `--profile` recorded        profile.txt    its largest costs

One process at a time writes into a folder: `lock_folder` holds a file lock, which the operating system releases when
the process dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octile.atomic_files import write_json
from octile.extras import require
from octile.report.compare.file import COMPARE_FILE
from octile.train.config import TrainConfig
from octile.validation import CHECKSUM, read_json, take_checksum, with_checksum

LOCK = ".lock"
DATA = "data"
START = "start"  # the model that a run of octile rl began with
TELEMETRY = "telemetry.jsonl"
COMPARISON = "comparison.json"  # what a comparison was begun with


class RunFolder:
    """The paths in the folder of one run."""

    def __init__(self, path: Path):
        self.path = path
        self.config_file = path / "config.json"
        self.metrics_file = path / "metrics.jsonl"
        self.telemetry_file = path / TELEMETRY
        self.summary_file = path / "summary.json"
        self.sample_file = path / "sample.txt"
        self.data = path / DATA
        self.model = path / "model"
        self.model_ema = path / "model_ema"  # the moving average of the weights after the last step, if there is one
        self.checkpoints = path / "checkpoints"
        self.captures = path / "captures"
        self.tensorboard = path / "tensorboard"
        self.wandb = path / "wandb"
        self.loggers_file = path / "loggers.json"

    def checkpoints_of(self, config: TrainConfig) -> str:
        """The folder or URL of the run's checkpoints."""
        return config.checkpoints or str(self.checkpoints)

    @classmethod
    def create(cls, config: TrainConfig) -> RunFolder:
        """The folder of a new run.

        If the configuration names no folder, one under runs/ is made at once, so that two runs that start at the same
        time do not share it.

        Raises:
            FileExistsError: config.out holds a run or a comparison already, or is a file.
        """
        run = cls(config.out or new_folder(Path("runs"), f"{config.preset}-{Path(config.recipe).stem}"))
        if run.config_file.exists():
            raise FileExistsError(f"out {str(run.path)!r} holds a run already: add --resume, or choose another --out")
        check_unused(run.path)
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run.

        Raises:
            FileNotFoundError: the folder holds no run.
        """
        run = cls(path)
        if not run.config_file.is_file():
            raise FileNotFoundError(f"{str(path)!r} holds no run: there is no {run.config_file}{why_empty(path)}")
        return run

    def check_folders(self) -> None:
        """Refuse a file where the run is going to write a folder.

        Raises:
            NotADirectoryError: there is one.
        """
        for folder in (self.data, self.model, self.checkpoints, self.captures, self.tensorboard, self.wandb):
            if folder.exists() and not folder.is_dir():
                raise NotADirectoryError(
                    f"out {str(self.path)!r} has a file {folder.name!r}, where the run needs a folder: move it away, "
                    "or choose another --out"
                )

    def write_config(self, config: TrainConfig) -> None:
        """Write config.json, with its checksum. It marks the folder as a run."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config_file, with_checksum(config.to_values()))

    def read_config(self) -> TrainConfig:
        """Read config.json.

        Raises:
            ValueError: the file is damaged.
        """
        values = read_json(self.config_file)
        values.pop(CHECKSUM, None)
        if "command" in values:
            raise ValueError(f"{str(self.path)!r} holds a run of {values['command']}, which does not train on text")
        try:
            config = TrainConfig.from_values(values)
            if not config.recipe.endswith(".toml"):
                config.load_recipe()  # there must be one of that name
            return config
        except ValueError as error:
            raise ValueError(f"{self.config_file} is damaged: {error}") from None

    def is_config_edited(self) -> bool:
        """Whether config.json differs from what `write_config` wrote; False if an earlier version wrote it."""
        return take_checksum(read_json(self.config_file))


def check_unused(path: Path) -> None:
    """Refuse a folder that holds results: runs and comparisons have files of the same names.

    Raises:
        FileExistsError: it holds a run or a comparison, or is a file.
    """
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"out {str(path)!r} is a file: name a folder")
    if RunFolder(path).config_file.exists():
        raise FileExistsError(f"out {str(path)!r} holds a run already: choose another --out")
    if (path / COMPARISON).exists() or (path / COMPARE_FILE).exists():
        raise FileExistsError(
            f"out {str(path)!r} holds a comparison already: choose another --out, or continue it with octile compare "
            "--resume"
        )


def new_folder(parent: Path, name: str) -> Path:
    """Make the first of parent/name, parent/name-2, … that does not exist or was left before its first step.

    Returns its path.
    """
    path, number = parent / name, 1
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if _is_left(path) and not _is_locked(path):
                return path
            number += 1
            path = parent / f"{name}-{number}"


def why_empty(folder: Path) -> str:
    """How to go on where a run or a comparison was killed before its first step, to follow a message; else ""."""
    return "; it ended before its first step: start it again, without --resume" if _is_left(folder) else ""


def _is_left(folder: Path) -> bool:
    """Whether a folder holds what is there before a first step, and nothing else: the lock, prepared data, a model."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    return bool(names) and names <= {LOCK, DATA, START}  # an empty folder belongs to another process that just begins


def _is_locked(folder: Path) -> bool:
    """Whether a process works in a folder."""
    require("filelock", extra="train")
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / LOCK, timeout=0):
            return False
    except Timeout:
        return True


@contextmanager
def lock_folder(folder: Path, is_new: bool = False) -> Iterator[None]:
    """Hold the lock of a folder inside the context, or until the process dies. Makes the folder if necessary.

    If the context has written no file, the folders that it has made and its lock are removed at the end. The folder
    itself is removed if it was made here or by `new_folder`, or held nothing but what a killed process leaves.

    Args:
        folder: the folder of a run or a comparison.
        is_new: whether `new_folder` has made it.

    Raises:
        FileExistsError: another process holds the lock.
        NotADirectoryError, PermissionError, FileNotFoundError: the folder cannot be made.
    """
    require("filelock", extra="train")
    from filelock import FileLock, Timeout

    is_removable = is_new or not folder.exists() or ((folder / LOCK).exists() and _is_left(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (NotADirectoryError, PermissionError, FileNotFoundError) as error:
        raise type(error)(f"out {str(folder)!r} cannot be made: {error.strerror}") from None
    before = set() if is_removable else set(folder.rglob("*"))
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise FileExistsError(f"out {str(folder)!r} is in use by another octile process") from None
    try:
        yield
    finally:
        made = sorted(set(folder.rglob("*")) - before - {folder / LOCK}, reverse=True)  # inner folders first
        if all(path.is_dir() for path in made):
            for path in made:
                path.rmdir()
            if folder / LOCK not in before:  # before the release: who waits for it must not hold a file without a name
                (folder / LOCK).unlink(missing_ok=True)
        lock.release()
        if is_removable and not any(folder.iterdir()):
            folder.rmdir()
