"""Tests of tools/compare_trees.py: trees are measured interleaved, each in its own process with its own octile."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "compare_trees.py"
OCTILE = {  # as much of it as the script asks for; it takes SECONDS for every product
    "bench/shapes.py": """
from dataclasses import dataclass
@dataclass
class Case:
    kind: str
    m: int
    n: int
    k: int
    what: str = "FP8"
    @property
    def name(self): return f"{self.m}×{self.n}×{self.k}"
FEW_ROWS = [Case("dense", 1, 2, 3), Case("dense", 4, 5, 6)]
""",
    "bench/gemm_case.py": """
MAX_DIFFERENCE = 1
class PreparedCase:
    out = None
    def __init__(self, case): self.case = case
    def call(self): pass
    def high_precision(self): pass
    def check(self, call, expected, out, limit): print("libraries print, too"); WRONG and 1 / 0
def prepare_case(case, device): return PreparedCase(case)
WRONG = {wrong}
""",
    "bench/tune.py": """
def problem(case): return case
def why_not_usable(config): return None
""",
    "bench/gemm_peers.py": """
def deep_gemm_call(setup):
    if setup.case.m == 1: raise RuntimeError("too small")
    return setup.call
""",
    "bench/kernel_time.py": "def kernel_seconds(calls, rounds): return dict.fromkeys(calls, {seconds})",
    "kernels/cuda/gemm/candidates.py": """
from collections import namedtuple
Config = namedtuple("Config", "tile_m tile_n warpgroups accumulators stages cluster_m cluster_n cluster_size split_k"
                    " ping_pong transposed load_c raster_along_n")
def Chip(n): return n
def choose(problem, chip): return Config(64, 32, 1, 2, 12, 1, 2, 2, 3, False, True, False, False)
""",
    "kernels/cuda/gemm/num_sms.py": "def num_sms(): return 132",
}
TORCH = """
class cuda:
    def empty_cache(): pass
"""


@pytest.fixture
def tree(tmp_path):
    """tree(name, seconds, wrong): a folder with an octile that takes so long, or whose result is wrong."""

    def make(name, seconds, wrong=False):
        for file, text in OCTILE.items():
            path = tmp_path / name / "octile" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in path.relative_to(tmp_path / name).parents[:-1]:
                (tmp_path / name / folder / "__init__.py").touch()
            path.write_text(text.replace("{seconds}", str(seconds)).replace("{wrong}", str(wrong)))
        (tmp_path / name / "torch.py").write_text(TORCH)  # takes seconds to import
        return str(tmp_path / name)

    return make


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=180)


def test_trees_are_compared_with_the_first(tree, tmp_path):
    done = run(str(tmp_path / "out.json"), tree("old", 4e-6), tree("new", 2e-6), "--products", "few", "--peer")
    assert done.returncode == 0, done.stderr
    one, two, last = done.stdout.splitlines()
    kernel = ["64×32", "w1", "a2", "s12", "c12", "k3", "transposed"]
    assert one.split() == ["1×2×3", "FP8", *kernel, "4.00", "1:new", "2.00", "(2.000)", "DeepGEMM", "nan", "(nan)"]
    assert two.split()[-6:] == ["1:new", "2.00", "(2.000)", "DeepGEMM", "4.00", "(1.000)"]
    assert last == "speed vs. 0:old: 1:new 2.0000 of 2, DeepGEMM 1.0000 of 1"
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["product"] for row in rows] == ["1×2×3 FP8", "4×5×6 FP8"]
    assert rows[0]["kernels"]["DeepGEMM"] == "none: too small"


def test_the_last_tree_decides_which_gemms_a_list_has(tree, tmp_path):
    old, new = tree("old", 4e-6), tree("new", 2e-6)
    shapes = Path(old) / "octile/bench/shapes.py"
    shapes.write_text(shapes.read_text().replace("FEW_ROWS", "ANOTHER_LIST"))
    done = run(str(tmp_path / "out.json"), old, new, "--products", "few")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:-1]] == ["1×2×3", "4×5×6"]


def test_a_tree_whose_result_is_wrong_ends_it_by_name(tree, tmp_path):
    done = run(str(tmp_path / "out.json"), tree("old", 4e-6), tree("new", 2e-6, wrong=True), "--products", "few")
    assert done.returncode == 1
    assert "RuntimeError: 1:new: ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "name a file and one tree"), (["out", "."], "no octile in ."), (["out", ".", "--products", "x"], "has x")],
)
def test_what_cannot_be_measured_is_refused(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert (done.returncode, said in done.stderr) == (2, True)
