"""Tests of the GPU test runner: a test that hangs or crashes does not stop the others."""

import subprocess
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

TESTS = {
    "test_good.py": "def test_one(): pass\ndef test_two(): assert False\n",
    "test_crash.py": "import os\ndef test_crash(): os._exit(9)\n",
    "alone/test_hang.py": "import subprocess, pathlib\ndef test_hang():\n"
    "    child = subprocess.Popen(['sleep', '600'])\n"
    "    pathlib.Path('child').write_text(str(child.pid))\n"
    "    child.wait()\n"
    "def test_fast(): pass\n",
    "alone/test_large.py": "def test_first(): pass\ndef test_second(): pass\n",
    "alone/test_many.py": "import pytest\n@pytest.mark.parametrize('x', range(20))\ndef test_many(x): pass\n",
}

LIMIT = 60  # seconds of a process


class HungSooner(subprocess.Popen):
    """A process whose time limit is over when its test hangs, instead of after a wait."""

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None and self.args[-1].endswith("::test_hang"):
            assert timeout == LIMIT
            child = Path("child")
            while not (child.exists() and child.read_text()):
                assert self.poll() is None
                time.sleep(0.01)
            timeout = 0.0
        return super().wait(timeout)


@pytest.fixture
def runner(script, tmp_path, monkeypatch):
    for name, text in TESTS.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    runner = script("run_gpu_tests")
    monkeypatch.setattr(runner, "ALONE", ("alone",))
    monkeypatch.setattr(runner, "IN_TURN", ("alone/test_large.py",))
    monkeypatch.setattr(runner, "TIMEOUT", LIMIT)
    monkeypatch.setattr(subprocess, "Popen", HungSooner)
    monkeypatch.setattr(runner, "MAX_PROCESSES", 2)
    return runner


def test_tests_that_may_hang_run_alone(runner):
    assert runner.units(["."]) == [
        "alone/test_large.py",
        "alone/test_many.py::test_many",
        "test_crash.py",
        "test_good.py",
        "alone/test_hang.py::test_hang",
        "alone/test_hang.py::test_fast",
    ]


def test_a_test_that_hangs_is_killed_and_the_others_are_counted(runner, tmp_path, capsys):
    assert runner.main(tmp_path, ["test_good.py", "test_crash.py", "alone/test_hang.py"]) == 1
    said = capsys.readouterr().out
    assert "test_good.py: 1 passed, 1 failed, 0 skipped" in said
    assert "test_crash.py: no result: exit code 9" in said
    assert "test_hang.py::test_hang: no result: it hung, or took too long" in said
    assert "test_hang.py::test_fast: 1 passed, 0 failed, 0 skipped" in said
    names = {case.get("name") for case in ElementTree.parse(tmp_path / "tests.xml").iter("testcase")}
    assert names == {"test_one", "test_two", "test_fast"}

    child = Path("/proc", (tmp_path / "child").read_text(), "stat")  # what it started is killed too
    assert not child.exists() or child.read_text().split()[2] == "Z"
