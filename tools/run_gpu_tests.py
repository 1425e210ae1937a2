"""Run the GPU tests in many processes, each with a time limit: `python -m tools.run_gpu_tests OUT [PATH …]`.

A kernel that hangs then fails only its own test. Each test of tests/gpu/cuda, tests/gpu/compat and the file of the
quantization kernels, and each file elsewhere, gets its own process; a test with many parameters gets one for all of
them, and so do DeepGEMM's own tests, which need much memory. Several processes run at a time.

Writes OUT/tests.xml (JUnit) and OUT/tests.txt (the tests' output), and prints a line for each process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ALONE = ("tests/gpu/cuda", "tests/gpu/compat", "tests/gpu/test_quantize_kernels.py")  # a process for each test
IN_TURN = ("tests/gpu/compat/test_deep_gemm_suite.py",)  # up to 48 GiB a test: a process for all of them
MAX_PROCESSES_PER_TEST = 12  # a test with more parameters gets one process for all of them
DEFAULT = ("tests/gpu", "tests/optim")
MAX_PROCESSES = 12  # at a time
TIMEOUT = 300  # seconds a process
TOTAL_TIMEOUT = 500  # seconds
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib -ra")


@dataclass(frozen=True)
class Result:
    """The result of one process: its tests, exit code (or "killed"), seconds, output and JUnit suites."""

    unit: str
    code: int | str
    seconds: float
    printed: str
    suites: Sequence[ElementTree.Element]

    @property
    def counts(self) -> dict[str, int]:
        names = ("tests", "failures", "errors", "skipped")
        return {name: sum(int(suite.get(name, 0)) for suite in self.suites) for name in names}

    @property
    def summary(self) -> str:
        if not self.suites:
            return f"no result: {'it hung, or took too long' if self.code == 'killed' else f'exit code {self.code}'}"
        c = self.counts
        bad = c["failures"] + c["errors"]
        return f"{c['tests'] - bad - c['skipped']} passed, {bad} failed, {c['skipped']} skipped"


def units(paths: Sequence[str]) -> list[str]:
    """List the pytest node IDs that get a process each; those of several tests, which take longest, come first."""
    done = subprocess.run([*PYTEST, "--collect-only", "-q", *paths], capture_output=True, text=True, check=False)
    names = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(" ")]
    if not names:
        raise RuntimeError(f"pytest finds no tests:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    parameters = Counter(_function(name) for name in names)
    found = dict.fromkeys(
        name.partition("::")[0]
        if not name.startswith(ALONE) or name.startswith(IN_TURN)
        else _function(name)
        if parameters[_function(name)] > MAX_PROCESSES_PER_TEST
        else name
        for name in names
    )
    several = [name for name in found if name not in names]
    return several + [name for name in found if name in names]


def _function(name: str) -> str:
    return name.partition("[")[0]


def run(unit: str, deadline: float) -> Result:
    """Run one node ID in a process, at most until the deadline (time.monotonic seconds)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        xml, log = Path(folder, "tests.xml"), Path(folder, "tests.txt")
        with log.open("w") as printed:
            command = [*PYTEST, "-q", "--durations=3", f"--junitxml={xml}", unit]
            process = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True)
            code: int | str
            try:
                code = process.wait(max(1.0, min(TIMEOUT, deadline - start)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)  # with the processes that it started
                process.wait()
                code = "killed"
        suites = list(ElementTree.parse(xml).getroot()) if xml.exists() else []
        return Result(unit, code, time.monotonic() - start, log.read_text(errors="replace"), suites)


def main(out: Path, paths: Sequence[str]) -> int:
    """Run all tests below the paths. Return 1 if any did not pass."""
    deadline = time.monotonic() + TOTAL_TIMEOUT
    root, ran = ElementTree.Element("testsuites"), []
    with ThreadPoolExecutor(MAX_PROCESSES) as pool, (out / "tests.txt").open("w") as log:
        for done in pool.map(lambda unit: run(unit, deadline), units(paths or DEFAULT)):
            ran.append(done)
            root.extend(done.suites)
            print(f"{done.seconds:6.0f} s  {done.unit}: {done.summary}", flush=True)
            log.write(f"== {done.unit}: {done.summary}\n{done.printed}\n")
            ElementTree.ElementTree(root).write(out / "tests.xml", encoding="unicode")
    bad = [done for done in ran if done.code not in (0, 5)]
    total = {name: sum(done.counts[name] for done in ran) for name in ("tests", "failures", "errors", "skipped")}
    print(f"\n{total}; {len(bad)} of {len(ran)} processes did not pass")
    for done in bad:
        print(f"    {done.unit}: {done.summary}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
