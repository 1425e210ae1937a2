"""Tests of how GPU tests share the memory of a GPU, with numbers for it."""

import json
import os
import threading

import pytest

from tests import gpu_memory
from tests.gpu_memory import SharedMemory

FREE = 10
OTHER = os.getppid()  # a process that is there


@pytest.fixture(autouse=True)
def polls_at_once(monkeypatch):
    monkeypatch.setattr(gpu_memory, "POLL", 0.001)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "needed.json"


def test_what_a_test_needs_is_there_for_the_others_while_it_runs(file):
    with SharedMemory(file, lambda: FREE).holding(6, seconds=60) as is_free:
        assert is_free
        assert json.loads(file.read_text()) == {str(os.getpid()): 6}
    assert json.loads(file.read_text()) == {}


def test_it_waits_until_another_test_has_ended(file):
    file.write_text(json.dumps({OTHER: 6}))
    began = threading.Event()

    def wait() -> None:
        with SharedMemory(file, lambda: FREE).holding(6, seconds=60) as is_free:
            assert is_free
            began.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not began.wait(0.1)
    with SharedMemory(file, lambda: FREE)._lock:
        file.write_text("{}")
    thread.join(60)
    assert began.is_set()


def test_it_waits_until_memory_is_free(file):
    free = iter([2, 5, 6])
    with SharedMemory(file, lambda: next(free)).holding(6, seconds=60) as is_free:
        assert is_free
    assert list(free) == []


def test_a_process_that_has_died_needs_nothing(file):
    file.write_text(json.dumps({2**22 + 1: 6}))  # above the largest number of a process
    with SharedMemory(file, lambda: FREE).holding(6, seconds=60) as is_free:
        assert is_free


def test_it_begins_after_its_time_all_the_same(file):
    with SharedMemory(file, lambda: 0).holding(6, seconds=0.01) as is_free:
        assert not is_free
        assert json.loads(file.read_text()) == {str(os.getpid()): 6}
