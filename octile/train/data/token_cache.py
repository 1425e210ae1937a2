"""Cache of token stores, shared between runs: a folder per text and settings, named by their hash.

A run copies the store into its own folder, so it needs nothing of the cache later, and the cache can be emptied at any
time. A store is copied into the cache under another name and renamed. It is compared with its checksums before it is
used, and one that does not match them is prepared again.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octile.kernels import disk_cache
from octile.train.data.token_store import LEFT_OUT, MANIFEST, Manifest, check_files
from octile.validation import json_checksum

log = logging.getLogger("octile")


def folder() -> Path:
    """Return the folder, which lies in that of compiled kernels."""
    return disk_cache.folder() / "tokens"


def check_outside(source: str | Path, name: str) -> None:
    """Refuse to read text from a folder that holds the cache, whose files would be read as text. Hidden ones are not.

    Args:
        source: the folder, or another source.
        name: the argument that names it, for messages.

    Raises:
        ValueError: the folder holds the cache.
    """
    try:
        inside = folder().resolve().relative_to(Path(source).resolve())
    except (ValueError, RuntimeError):  # it lies elsewhere; there is none without a home
        return
    if Path(source).is_dir() and not any(part.startswith(".") for part in inside.parts):
        raise ValueError(
            f"{name} {str(source)!r} must not hold octile's cache {folder()}, which would be read as text: "
            "set OCTILE_CACHE_DIR to another folder"
        )


def fetch(
    settings: dict[str, Any], destination: Path, build: Callable[[], Manifest], say: Callable[[str], None]
) -> Manifest:
    """Copy the store with these settings from the cache, or build it and copy it into the cache.

    Where the cache cannot be used (a full disk, a read-only folder, one that others may write to), the logger `octile`
    warns, and the store is built.

    Args:
        settings: everything on which the store depends.
        destination: the folder into which it is copied, or `build` writes it.
        build: writes the store and returns its manifest. If its settings are others, because files changed meanwhile,
            it is not cached.
        say: prints a line that says where the store comes from, or what is waited for.

    Raises:
        OSError: the store cannot be copied to its destination.
        Exception: what `build` raises; nothing is cached then.
    """
    try:
        cache = folder()
        for each in (cache.parent, cache):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)
            disk_cache.check_private(each)
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        _cannot_store(error)
        return build()
    path = cache / json_checksum(settings)[:32]

    def read() -> Manifest | None:
        try:
            manifest = Manifest.read(path)
            check_files(path, manifest)
        except (OSError, ValueError):
            return None
        if manifest.settings != settings:
            return None
        try:
            _copy(path, destination, manifest)
        except FileNotFoundError:  # the cache is being emptied
            return None
        say(f"tokens from the cache ({path})")
        return manifest

    def write(manifest: Manifest) -> None:
        if manifest.settings == settings:
            _store(destination, path, manifest)
        else:
            _cannot_store(RuntimeError("files of the data changed while they were read"))

    return disk_cache.find_or_build(
        path,
        "token store",
        read,
        build,
        write,
        _cannot_store,
        lambda: say("another octile process prepares the same tokens: waiting for them"),
        extra="train",
    )


def _store(source: Path, path: Path, manifest: Manifest) -> None:
    partial = path.with_suffix(".partial")  # only the holder of the lock writes it
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        _copy(source, partial, manifest)
        shutil.rmtree(path, ignore_errors=True)  # one that is damaged
        os.rename(partial, path)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy(source: Path, destination: Path, manifest: Manifest) -> None:
    for name in (*manifest.files, LEFT_OUT, MANIFEST):
        shutil.copyfile(source / name, destination / name)


def _cannot_store(error: Exception) -> None:
    log.warning("the tokens cannot be cached, so other runs prepare them again: %s", error)
