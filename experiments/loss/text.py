"""Build the training text from pinned versions of PyPI packages and GitHub repositories.

    python -m experiments.loss.text fetch .data           pip download, git clone: .data/packages, .data/repositories
    python -m experiments.loss.text build .data           .data/text (UTF-8 files) and .data/tokens (a token store)
    python -m experiments.loss.text pack .data/tokens DIR       compresses the store into DIR/part1 and DIR/part2
    python -m experiments.loss.text unpack STORE PART…          restores it and verifies its checksums

Two fifths are prose: books in the public domain and documentation. The rest is source code. A file is left out if it is
not written by a person (long lines, few words, generated, translated, tables), or if most of its longer lines occurred
in earlier files, in the order of the sources below. 2% of the documents are held out; `octile.train.data` does that and
trains the tokenizer.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from experiments.loss.sizes import SEQUENCE, VOCABULARY
from octile.train.text_filter import MAX_BYTES, PROSE, SOURCE, DuplicateFilter, why_left_out
from octile.train.token_store import FILES, MANIFEST

SDISTS = (
    "django==5.2.19",
    "sympy==1.14.0",
    "sqlalchemy==2.1.9",
    "twisted==26.10.0",
    "mercurial==7.2.4",
    "z3_solver==5.4.0.0",
)
WHEELS = ("transformers==5.23.0", "scipy==1.18.1", "pandas==3.1.1", "numpy==2.5.5")


@dataclass(frozen=True)
class Repository:
    """Files of a GitHub repository at a commit: those with these suffixes, at most `max_bytes` in all."""

    name: str
    commit: str
    suffixes: tuple[str, ...]
    max_bytes: int = 10**9


BOOKS = Repository("mlschmitt/classic-books-markdown", "944882722e9a96fa6cf2739dc2ea757e101f412f", (".md",), 80_000_000)
REPOSITORIES = (
    BOOKS,
    Repository("MicrosoftDocs/cpp-docs", "a2e592a8fc391b6aff8d1323f5b58696abdc5d57", (".md",), 32_000_000),
    Repository("python/peps", "ba4deeb7969588d937da609008d05bb83a47b1ab", (".rst",)),
    Repository("rust-lang/rfcs", "354518a8c9025f40be6f730452c1bfe71a12dc22", (".md",)),
    Repository("ethereum/EIPs", "f767a1e8078e17c9b381a91d35a09492189ede1b", (".md",)),
    Repository("git/git", "1a3e64c6c4a623626ff0687008732a8e007e2a1c", (".adoc", ".c", ".h", ".sh", ".perl")),
)


def fetch(folder: Path) -> None:
    """Download the packages and repositories that are missing."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(packages)]
    for name in (*SDISTS, *WHEELS):
        how = ["--no-binary", name.partition("==")[0]] if name in SDISTS else ["--only-binary", ":all:", *PLATFORM]
        if not list(packages.glob(_file_prefix(name) + "*")):
            subprocess.run([*pip, *how, name], check=True)
    for repository in REPOSITORIES:
        place = _clone(folder, repository)
        if not place.exists():
            url = f"https://github.com/{repository.name}"
            subprocess.run(["git", "clone", "--bare", url, str(place)], check=True)


PLATFORM = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64",
            "--platform", "manylinux_2_27_x86_64", "--platform", "manylinux2014_x86_64")  # fmt: skip


def _file_prefix(name: str) -> str:
    """Return how the file names of a package (name==version) begin."""
    package, _, version = name.partition("==")
    return f"{re.sub('[-.]', '_', package.lower())}-{version}"


def _clone(folder: Path, repository: Repository) -> Path:
    return folder / "repositories" / repository.name.replace("/", "+")


def files(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yield (source, path, content) of every file with a suffix of text, in an order that depends only on names."""
    for repository in REPOSITORIES:
        yield from ((repository.name, path, content) for path, content in _repository_files(folder, repository))
    for name in (*SDISTS, *WHEELS):
        for path, content in _package_files(_package(folder, name)):
            if path.endswith((*SOURCE, *PROSE)) and len(content) <= MAX_BYTES:
                yield name, path, content


def _package(folder: Path, name: str) -> Path:
    found = sorted(f for f in (folder / "packages").iterdir() if f.name.lower().startswith(_file_prefix(name)))
    if not found:
        raise FileNotFoundError(f"{folder / 'packages'} has no file of {name}: run fetch first")
    return found[0]


def _repository_files(folder: Path, repository: Repository) -> Iterator[tuple[str, bytes]]:
    git = ["git", "-C", str(_clone(folder, repository))]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", repository.commit], capture_output=True, check=True).stdout
    rows = [row.split("\t", 1) for row in listed.decode().split("\0") if row]
    wanted = sorted((path, meta.split()[2]) for meta, path in rows if path.endswith(repository.suffixes))
    wanted.sort(
        key=lambda pair: hashlib.sha256(pair[0].encode()).digest()
    )  # shuffled, so that max_bytes takes a sample
    asked = "".join(f"{blob}\n" for _, blob in wanted).encode()
    answer = io.BytesIO(
        subprocess.run([*git, "cat-file", "--batch"], input=asked, capture_output=True, check=True).stdout
    )
    taken = 0
    for path, _ in wanted:
        header = answer.readline().split()
        if header[-1] == b"missing":
            continue
        content = answer.read(int(header[2]))
        answer.readline()
        if taken >= repository.max_bytes:
            return
        taken += len(content)
        yield path, content


def _package_files(file: Path) -> Iterator[tuple[str, bytes]]:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith((*SOURCE, *PROSE)):
                    yield name, archive.read(name)
        return
    found = []
    with tarfile.open(file) as archive:
        for member in archive:  # in the archive's order, since it is decompressed sequentially
            stream = (
                archive.extractfile(member) if member.isfile() and member.name.endswith((*SOURCE, *PROSE)) else None
            )
            if stream is not None:
                found.append((member.name, stream.read()))
    yield from sorted(found)


def write_text(folder: Path) -> dict[str, dict[str, int]]:
    """Write folder/text and return the bytes of each source and kind, and the number of files left out by reason."""
    taken, skipped, kinds = Counter[str](), Counter[str](), Counter[str]()
    duplicates = DuplicateFilter()
    for number, (source, path, content) in enumerate(files(folder)):
        reason = why_left_out(path, content, book=source == BOOKS.name)
        if reason is None and duplicates.has_seen(content.decode()):
            reason = "repeated"
        if reason:
            skipped[reason] += 1
            continue
        place = folder / "text" / re.sub(r"\W+", "-", source) / f"{number:06}{Path(path).suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
        taken[source] += len(content)
        kinds["prose" if path.endswith(PROSE) else "source"] += len(content)
    return {"bytes": dict(taken), "kinds": dict(kinds), "left_out": dict(skipped)}


def build(folder: Path) -> None:
    """Write folder/text and folder/tokens, and a summary of them as folder/text.json.

    Raises:
        FileExistsError: folder/text exists.
    """
    from octile.train.data import prepare

    if (folder / "text").exists():
        raise FileExistsError(f"{folder / 'text'} exists: delete it to build it again")
    facts: dict[str, object] = {**write_text(folder)}
    manifest = prepare(folder / "text", VOCABULARY, folder / "tokens", SEQUENCE - 1).manifest
    facts |= {name: getattr(manifest, name) for name in ("tokens", "documents", "sha256")}
    (folder / "text.json").write_text(json.dumps(facts, indent=1) + "\n")


def pack(store: Path, folder: Path) -> None:
    """Write folder/part1 and folder/part2, each with half of the training tokens."""
    jobs = []
    for name in (MANIFEST, *FILES):
        content = (store / name).read_bytes()
        count = CHUNKS if name == "train.npy" else 1
        size = -(-len(content) // (2 * count)) * 2  # even, so that no token is split
        for i in range(count):
            place = folder / f"part{1 + i * PARTS // count}" / f"{name}.{i}.xz"
            place.parent.mkdir(parents=True, exist_ok=True)
            jobs.append((content[i * size : (i + 1) * size], place))
    with ProcessPoolExecutor(2) as pool:
        for size in pool.map(_compress, *zip(*jobs, strict=True)):
            print(size, flush=True)


def _compress(content: bytes, place: Path) -> int:
    return place.write_bytes(lzma.compress(content, filters=FILTERS))


def unpack(store: Path, parts: list[Path]) -> None:
    """Restore a store from its parts, and open it, which verifies every file's checksum.

    Raises:
        FileNotFoundError: none of the parts has a chunk of a file.
        ValueError: a file fails its checksum.
    """
    from octile.train.token_store import TokenStore

    chunks = sorted((p for part in parts for p in part.glob("*.xz")), key=lambda p: p.name)
    store.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, MANIFEST):
        own = [chunk for chunk in chunks if chunk.name.startswith(f"{name}.")]
        if not own:
            raise FileNotFoundError(f"no chunk of {name} in {', '.join(map(str, parts))}")
        (store / name).write_bytes(b"".join(lzma.decompress(chunk.read_bytes()) for chunk in own))
    print({part: f"{n:,} tokens" for part, n in TokenStore.open(store).manifest.tokens.items()})


PARTS, CHUNKS = 2, 6
# pb=1: tokens are two bytes long, and the statistics of both bytes differ
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 3, "lp": 1, "pb": 1, "dict_size": 2**25}]


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in {"fetch": ["folder"], "build": ["folder"], "pack": ["store", "folder"]}.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument, type=Path)
    command = commands.add_parser("unpack")
    command.add_argument("store", type=Path)
    command.add_argument("parts", type=Path, nargs="+")
    asked = vars(parser.parse_args())
    run: dict[str, Callable[..., None]] = {"fetch": fetch, "build": build, "pack": pack, "unpack": unpack}
    run[asked.pop("command")](**asked)


if __name__ == "__main__":
    main()
