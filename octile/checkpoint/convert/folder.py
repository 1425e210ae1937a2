"""The conversion of a Hugging Face folder to FP8, or back to BF16 or FP32, file by file.

    to="fp8"     X.weight BF16 → X.weight E4M3 + X.weight_scale_inv, where `octile.layer_roles` says so;
                 of a checkpoint that is FP32 as a whole the other tensors become BF16, and its `dtype` in config.json
    to="bf16"    X.weight E4M3 · X.weight_scale_inv → X.weight BF16; the scale is dropped;
                 FP16 tensors become BF16, too, and FP16 as the `dtype` in config.json
    to="float32" X.weight E4M3 · X.weight_scale_inv → X.weight FP32, exactly, for training; the scale is dropped

Every other tensor is copied byte by byte, whatever its name. So is every other file but further weights, such as
pytorch_model.bin, which the conversion does not read. A file of the result holds the tensors of the
source's file of the same name. Tensors are converted in chunks of rows, so a checkpoint of any size takes some 100 MB
of memory. Each finished file is read back, compared with its source and entered with its checksum in octile.json, from
which an interrupted conversion resumes. config.json is written last: before that no engine recognizes the folder.

Round trips: FP8 → BF16 → FP8 restores the encoded values of every block whose largest encoded value is ±448, as with
scale = amax / 448, since BF16 has 8 significant bits and E4M3 4. Scales are restored within 2⁻⁸. Blocks of values
below 1e-36 are the exception, where BF16 has fewer bits. FP8 → FP32 → FP8 restores the scales, too.
"""

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from octile.atomic_files import atomic_write, remove_partial, write_json
from octile.checkpoint.convert.plan import ConversionPlan
from octile.checkpoint.convert.share import Share, share_of
from octile.checkpoint.convert.tensor import Target, convert_tensor, max_error_of
from octile.checkpoint.files import CONFIG, RECORD, check_space, checksum, read_record, verify
from octile.checkpoint.shards import INDEX, Shards, check_no_adapter, write_index
from octile.checkpoint.tensor_file import TensorFile, writing
from octile.command_text import how_to_download
from octile.extras import require
from octile.layer_roles import RULE
from octile.validation import read_json

Progress = Callable[[int, int, str], None]
UNFINISHED = "unfinished"
LOCK = ".octile.lock"
SYSTEM_FOLDERS = ("/proc", "/sys")
WEIGHTS = re.compile(r"\.(safetensors|bin|pt|pth|gguf)(\.index\.json)?$")


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        to: "fp8", "bf16" or "float32".
        rule: which weights are FP8 and which are not, as a sentence.
        converted, cast, unchanged: tensor names, with `*` for numbers in them → how many there are: weights that were
            quantized or dequantized, tensors in FP32 or FP16 that became BF16, copies.
        share: the share of the converted weights in the model's parameters and FLOPs.
        bytes_before, bytes_after: bytes of all tensors, including scales.
        converted_bytes: bytes of the converted weights in the result, including scales.
        max_error: the largest error of a value, relative to the largest magnitude that a value of its 128×128 block can
            have: at most 16/448 = 3.6% for FP8, 2⁻⁸ = 0.4% for BF16, 0 for FP32.
        files, resumed_files: number of weight files of the result, and of those that an earlier attempt had finished.
        copied_files: the other files of the folder: tokenizer, generation configuration, code, …
        not_copied: further weight files of the folder, which were not read, such as pytorch_model.bin → their bytes.
        warnings: what vLLM, SGLang and transformers refuse of the result, or load wrongly.
    """

    to: Target
    rule: str
    converted: Mapping[str, int]
    cast: Mapping[str, int]
    unchanged: Mapping[str, int]
    share: Share
    bytes_before: int
    bytes_after: int
    converted_bytes: int
    max_error: float
    files: int
    resumed_files: int
    copied_files: tuple[str, ...]
    not_copied: Mapping[str, int]
    warnings: tuple[str, ...]


def convert_checkpoint(
    src: str | Path, dst: str | Path, to: Target, progress: Progress | None = None, keep: Sequence[str] = ()
) -> ConversionReport:
    """Convert the Hugging Face folder src into the new folder dst.

    Called again with the same src and dst after an interruption, it resumes: finished files whose checksums are right
    are not converted again.

    Args:
        src: a folder with config.json, weights as safetensors (one file, or shards with an index), and other files.
        dst: absent, empty, or left by an interrupted conversion of src, or of another one that had finished no file.
        to: "fp8" (from BF16, FP16 or FP32), or "bf16" or "float32" (from FP8 in 128×128 blocks, also those that
            llm-compressor writes in the format of compressed-tensors).
        progress: called after each tensor with the bytes done, the bytes in total, and the file's name. Both count
            bytes of src, once for conversion and once for comparison.
        keep: patterns of the layers that stay in high precision besides those of the table in `octile.layer_roles`,
            such as "*.down_proj" or "model.layers.0"; a pattern matches a layer or a module that contains it.

    Raises:
        FileNotFoundError: src, its config.json or a weight file is missing.
        FileExistsError: dst holds other files, or another conversion writes to it.
        ImportError: filelock is not installed.
        TypeError: keep is not a list of patterns.
        ValueError: a file of src is damaged, a key of its config.json has another type or is out of range, or a weight
            holds NaN or Inf. src has the target format already, or is quantized in another way. dst is src or inside
            it, is in /proc or /sys, or holds the start of another conversion. No weight would become FP8. keep has a
            pattern that matches none, or is given for another target.
        OSError: the disk is full. Finished files stay, and the conversion can be resumed.
        RuntimeError: the result, read back, differs from its source by more than rounding.
    """
    src, dst = Path(src), Path(dst)
    _check_arguments(src, dst, to)
    plan = ConversionPlan.make(Shards(src), read_json(src / CONFIG), to, keep)
    with _only_writer(dst):
        return _convert(dst, plan, progress)


@contextmanager
def _only_writer(dst: Path) -> Iterator[None]:
    """Context manager in which no other conversion writes to dst. It makes the folder, and removes a new one if empty.

    Raises:
        FileExistsError: another conversion writes to it.
        ImportError: filelock is not installed.
    """
    require("filelock", extra="train")
    from filelock import FileLock, Timeout

    is_new = not dst.exists()
    dst.mkdir(parents=True, exist_ok=True)
    lock = FileLock(dst / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileExistsError(f"dst must be free, but another conversion writes to {dst}") from None
    try:
        yield
    finally:
        (dst / LOCK).unlink(missing_ok=True)
        lock.release()
        if is_new and not any(dst.iterdir()):
            dst.rmdir()


def _convert(dst: Path, plan: ConversionPlan, progress: Progress | None) -> ConversionReport:
    """Convert a checkpoint into the folder dst, which exists."""
    record = _resume_or_begin(dst, plan)
    resumed = len(record["files"])
    copied, not_copied = _other_files(plan)
    for name in (*plan.files, *map(str, copied), CONFIG, INDEX, RECORD):
        remove_partial(dst / name)
    _check_space(dst, plan, record["files"], copied)

    tick = _ticker(progress, 2 * plan.source.nbytes)
    for name, file in plan.source.files.items():
        if name in record["files"]:
            tick(2 * sum(spec.nbytes for spec in file.specs.values()), name)
        else:
            try:
                record["files"][name] = _convert_file(file, dst / name, plan, tick)
            except ValueError:  # of a weight that no later call would convert either
                if not record["files"] and not (dst / name).exists():
                    (dst / RECORD).unlink()
                raise
            write_json(dst / RECORD, record)

    _copy(plan.source.folder, dst, copied)
    write_index(dst, plan.files, sum(spec.nbytes for spec in plan.specs.values()))
    write_json(dst / CONFIG, plan.result_config)
    _check_result(dst, plan)
    max_error = max((entry.pop("max_error") for entry in record["files"].values()), default=0.0)
    write_json(dst / RECORD, {"files": record["files"]})
    return _report(plan, max_error, resumed, copied, not_copied)


def _check_arguments(src: Path, dst: Path, to: str) -> None:
    if to not in get_args(Target):
        raise ValueError(f"to must be 'fp8', 'bf16' or 'float32', not {to!r}")
    if not src.is_dir():
        what = "is a file" if src.exists() else f"does not exist{how_to_download(src)}"
        raise FileNotFoundError(f"src must be a folder with {CONFIG} and safetensors files: {src} {what}")
    check_no_adapter(src)
    if not (src / CONFIG).is_file():
        raise FileNotFoundError(f"src must be a folder with {CONFIG} and safetensors files: {src} has no {CONFIG}")
    if dst.resolve().is_relative_to(src.resolve()):
        raise ValueError(f"dst must lie outside of {src}, which is converted, not at {dst}")
    if any(dst.resolve().is_relative_to(folder) for folder in SYSTEM_FOLDERS):
        raise ValueError(f"dst must be on a disk, not {dst}, where the system shows its state")
    if dst.exists() and not dst.is_dir():
        raise FileExistsError(f"dst must be a folder, not the file {dst}")


def _resume_or_begin(dst: Path, plan: ConversionPlan) -> dict[str, Any]:
    """Write and return octile.json of an unfinished conversion: its source and target, and the files that are done."""
    files = {name: file.path.stat() for name, file in plan.source.files.items()}
    source = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in files.items()}
    job = {"to": plan.to, "keep": list(plan.keep), "source": source}
    finished: dict[str, Any] = {}
    present = {path.name for path in dst.iterdir()} - {LOCK}
    if present:
        started = read_json(dst / RECORD).get(UNFINISHED) if (dst / RECORD).exists() else None
        if started is None and (dst / CONFIG).exists() and read_record(dst).keys() >= plan.files.keys():
            raise FileExistsError(
                f"dst must be empty or an interrupted conversion, but {dst} holds a finished one of weight files "
                "of these names: use it, or name another folder"
            )
        if started is None:
            raise FileExistsError(f"dst must be empty or an interrupted conversion, but {dst} holds other files")
        if started != job and present != {RECORD}:
            raise ValueError(
                f"dst {dst} holds the start of another conversion (of other weight files, or with another target "
                "or other layers in high precision): remove it, or name another folder"
            )
        finished = {name: entry for name, entry in read_record(dst).items() if _is_whole(dst / name, entry)}
    record = {UNFINISHED: job, "files": finished}
    write_json(dst / RECORD, record)
    return record


def _is_whole(path: Path, entry: Mapping[str, Any]) -> bool:
    try:
        verify(path, entry)
    except (ValueError, FileNotFoundError):
        return False  # then it is converted again
    return True


def _check_space(dst: Path, plan: ConversionPlan, finished: Mapping[str, Any], copied: Sequence[Path]) -> None:
    needed = sum(s.nbytes for file, specs in plan.files.items() if file not in finished for s in specs.values())
    src = plan.source.folder
    needed += sum((src / path).stat().st_size for path in copied if not (dst / path).exists())
    check_space(dst, needed, "name a folder on another disk")


def _ticker(progress: Progress | None, total: int) -> Callable[[int, str], None]:
    done = 0

    def tick(nbytes: int, file: str) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total, file)

    return tick


def _convert_file(
    file: TensorFile, path: Path, plan: ConversionPlan, tick: Callable[[int, str], None]
) -> dict[str, Any]:
    """Write one file of the result and compare it with its source. Return its entry in octile.json."""
    with writing(path, plan.files[path.name]) as out:
        for name, spec in file.specs.items():
            convert_tensor(name, plan.actions[name], plan.source, out)
            tick(spec.nbytes, path.name)
    result, max_error = TensorFile(path), 0.0
    for name, spec in file.specs.items():
        max_error = max(max_error, max_error_of(name, plan.actions[name], plan.source, result))
        tick(spec.nbytes, path.name)
    return {**checksum(path), "max_error": max_error}


def _other_files(plan: ConversionPlan) -> tuple[list[Path], list[Path]]:
    """List the files besides the conversion's own, relative to the source's folder: those to be copied, and weights.

    Hidden files are in neither list.
    """
    own, src = {CONFIG, INDEX, RECORD, *plan.files}, plan.source.folder
    found = [path.relative_to(src) for path in sorted(src.rglob("*")) if path.is_file()]
    others = [path for path in found if str(path) not in own and not any(part.startswith(".") for part in path.parts)]
    copied = [path for path in others if not WEIGHTS.search(path.name)]
    return copied, [path for path in others if WEIGHTS.search(path.name)]


def _copy(src: Path, dst: Path, paths: Sequence[Path]) -> None:
    for path in paths:
        (dst / path).parent.mkdir(parents=True, exist_ok=True)
        with open(src / path, "rb") as original, atomic_write(dst / path) as copy:
            shutil.copyfileobj(original, copy)


def _check_result(dst: Path, plan: ConversionPlan) -> None:
    found = Shards(dst).specs
    if found != plan.specs:
        wrong = sorted(name for name in found.keys() | plan.specs.keys() if found.get(name) != plan.specs.get(name))
        raise RuntimeError(f"{dst} should hold {len(plan.specs)} tensors, but {len(wrong)} differ: {wrong[0]}, …")


def _report(
    plan: ConversionPlan, max_error: float, resumed: int, copied: Sequence[Path], not_copied: Sequence[Path]
) -> ConversionReport:
    return ConversionReport(
        to=plan.to,
        rule=RULE,
        converted=_patterns(plan.converted),
        cast=_patterns(plan.cast),
        unchanged=_patterns(plan.unchanged),
        share=share_of(plan.converted, plan.source.specs, plan.config),
        bytes_before=plan.source.nbytes,
        bytes_after=sum(spec.nbytes for spec in plan.specs.values()),
        converted_bytes=plan.converted_bytes,
        max_error=max_error,
        files=len(plan.files),
        resumed_files=resumed,
        copied_files=tuple(map(str, copied)),
        not_copied={str(path): (plan.source.folder / path).stat().st_size for path in not_copied},
        warnings=plan.warnings,
    )


def _patterns(names: list[str]) -> dict[str, int]:
    return dict(Counter(re.sub(r"\d+", "*", name) for name in names))
