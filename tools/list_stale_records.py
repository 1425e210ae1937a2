"""List the records under benchmarks/results whose code has changed since the commit that they are of.

    python -m tools.list_stale_records [--json]

A record is the files of one name, such as h200_gemm.json and h200_gemm.txt. Its commit is the one in its JSON, or else
stands in RECORDS, with the files and folders of the code that it measures. For each record are counted

    commits  from its commit to HEAD
    changes  those of them that touch its code, or what the code is called today

A change need not matter: whether a record is worth measuring again is for the reader to decide. Needs git and the
history of the repository.
"""

import argparse
import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from octile.bench.rows import align_columns

ROOT = Path(__file__).parents[1]
GEMM = ("octile/kernels/cuda/gemm", "octile/kernels/cuda/jit", "octile/ops/matmul.py", "octile/ops/grouped.py")
KERNELS = ("octile/kernels", "octile/ops")
CPU = ("octile/kernels/cpu.cpp", "octile/kernels/cpu.py", "octile/kernels/native.py")
LAYERS = (*KERNELS, "octile/nn", "octile/recipe.py")
SERVE = (*LAYERS, "octile/models", "octile/serve", "octile/bench/serve")
TRAIN = (*LAYERS, "octile/models", "octile/optim", "octile/train")
TENSOR_CORE = ("octile/lab/tensor_core", "octile/lab/probe")
RECORDS: dict[str, tuple[str | None, tuple[str, ...]]] = {  # commit (None: in the JSON) and code
    "casts": (None, (*CPU, "octile/ops", "octile/bench/casts.py")),
    "compile_times": ("a5c7415", ("octile/kernels/cuda",)),
    "gemm": (None, (*CPU, "octile/ops/matmul.py", "octile/ops/grouped.py", "octile/bench/gemm.py")),
    "h200_attention": (
        None, ("octile/kernels/cuda/attention", "octile/ops/paged_attention.py", "octile/bench/attention.py")
    ),
    "h200_bits": ("223c7dc", (*GEMM, *TENSOR_CORE)),
    "h200_casts": (None, (*KERNELS, "octile/bench/casts.py")),
    "h200_deep_gemm_suite": ("654a73a", (*GEMM, "octile/compat")),
    "h200_dispatch": (
        "e15823a",
        ("octile/kernels/triton/peer_rows.py", "octile/parallel/symmetric_memory.py", "octile/parallel/experts.py",
         "octile/bench/dispatch.py"),
    ),
    "h200_gemm": (None, (*GEMM, "octile/bench/gemm.py", "octile/bench/gemm_peers.py")),
    "h200_gemm_few_rows": ("d055cde", GEMM),
    "h200_profile": ("95f174d", GEMM),
    "h200_sanitizer": ("dafb973", KERNELS),
    "h200_serve": (None, SERVE),
    "h200_sparse": (
        None, ("octile/kernels/cuda/attention", "octile/ops/sparse_attention.py", "octile/bench/sparse.py")
    ),
    "h200_step": (None, (*LAYERS, "octile/optim", "octile/bench/step")),
    "h200_step_torchao": (None, (*LAYERS, "octile/optim", "octile/bench/step")),
    "h200_step_adamw": ("9bd00d3", (*LAYERS, "octile/optim", "octile/bench/step")),
    "h200_tensor_core": ("2e7b109", TENSOR_CORE),
    "h200_tensor_core_40": ("cfa4865b", TENSOR_CORE),  # the commit that added it
    "h200_tests": ("55beaf5", (*LAYERS, "octile/optim", "tests/gpu", "tests/optim")),
    "h200_train": (None, (*TRAIN, "octile/bench/train")),
    "h200_transformers": (None, (*LAYERS, "octile/integrations", "octile/bench/transformers.py")),
    "h200_vllm": (None, SERVE),
    "lab": (None, ("octile/lab", "octile/bench/lab.py")),
    "serve": (None, SERVE),
    "step": (None, (*TRAIN, "octile/bench/step")),
}  # fmt: skip
BOTH_CHIPS = ("attention", "casts", "gemm", "serve", "sparse", "step", "train", "transformers", "vllm")
RECORDS |= {f"h100_{name}": RECORDS[f"h200_{name}"] for name in BOTH_CHIPS}


@dataclass(frozen=True)
class Record:
    """A record, and how much has happened since.

    Attributes:
        name: of its files, without ending.
        commit: that it is of.
        date: of the measurement, or of the commit where the record does not say.
        commits: since its commit.
        changes: of these, that touch its code.
        code: files and folders.
    """

    name: str
    commit: str
    date: str
    commits: int
    changes: int
    code: Sequence[str]


def find_records() -> list[Record]:
    """Return all records of RECORDS, those with the most commits since first.

    Raises:
        ValueError: a commit is not in this clone, or there is no clone.
    """
    return sorted(map(_find, RECORDS), key=lambda record: -record.commits)


def _find(name: str) -> Record:
    commit, code = RECORDS[name]
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    machine = json.loads(path.read_text(encoding="utf-8")).get("machine", {}) if path.exists() else {}
    commit = (commit or machine["commit"]).removesuffix("+")  # of a tree with changes
    try:
        date = machine.get("date") or _git("log", "-1", "--format=%cs", commit)
        counts = (_git("rev-list", "--count", f"{commit}..HEAD", "--", *paths) for paths in ((), code))
        return Record(name, commit, date, *map(int, counts), code)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"commit {commit} of {name} is not in this clone: {error.stderr.strip()}") from error


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def table(records: Sequence[Record]) -> str:
    """Format the records whose code has changed as a table, and the others as a line."""
    columns = ("record", "date", "commit", "commits since", "change its code")
    stale = [record for record in records if record.changes]
    rows = [(r.name, r.date, r.commit, f"{r.commits:,}", f"{r.changes:,}") for r in stale]
    others = ", ".join(record.name for record in records if not record.changes) or "none"
    return f"{align_columns([columns, *rows], right=set(columns[3:]))}\n\nunchanged since: {others}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.list_stale_records", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print all records as JSON, the unchanged ones too")
    as_json = parser.parse_args(arguments).json
    records = find_records()
    print(json.dumps([asdict(record) for record in records], indent=2) if as_json else table(records))


if __name__ == "__main__":
    main()
