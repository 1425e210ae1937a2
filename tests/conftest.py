"""One thread, a cache of the session's own and a fixed hypothesis profile: every run computes the same thing.

Without a GPU Triton's kernels run in its interpreter, which has to be chosen before Triton is imported by anyone.
"""

import atexit
import errno
import gc
import io
import logging
import os
import shutil
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import combinations

import pytest
import torch
from hypothesis import HealthCheck, settings

gc.disable()  # until all tests are collected: little of them is garbage, and looking for it takes seconds
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
if "OCTILE_CACHE_DIR" not in os.environ:  # workers of pytest-xdist find that of the session
    from octile.kernels import disk_cache

    cache = tempfile.mkdtemp(prefix="octile-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    for kernel in disk_cache.folder().glob("*.compiled"):  # which would take seconds to compile
        shutil.copy2(kernel, cache)
    os.environ["OCTILE_CACHE_DIR"] = cache
if "ESTIMATES_OF_TESTS" not in os.environ:  # the same for all workers, and for processes that tests fork
    os.environ["ESTIMATES_OF_TESTS"] = tempfile.mkdtemp(prefix="octile-estimates-")
    atexit.register(shutil.rmtree, os.environ["ESTIMATES_OF_TESTS"], ignore_errors=True)
settings.register_profile(
    "octile", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("octile")


COVERED = {"each_value": 1, "each_pair": 2}  # how many parameters' values are tested in all combinations


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of CI, which has not the time for all slow and exhaustive tests."""
    what = "of the tests with this marker, test share K (from 0) of N; of a test's markers the first one given counts"
    parser.addoption("--share", type=_share, action="append", default=[], metavar="MARKER=K/N", help=what)


def _share(text: str) -> tuple[str, int, int]:
    marker, _, numbers = text.partition("=")
    share, shares = map(int, numbers.split("/"))
    if not marker or not 0 <= share < shares:
        raise ValueError  # argparse says which option
    return marker, share, shares


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that are exhaustive by `COVERED`, or slow by `one_case`, and leave out those of other shares."""
    _mark_exhaustive(items)
    _mark_slow(items)
    if shares := config.getoption("share"):
        known = {line.partition(":")[0].strip() for line in config.getini("markers")}
        if unknown := {marker for marker, _, _ in shares} - known:
            raise pytest.UsageError(f"--share: there is no marker {', '.join(sorted(unknown))}")
        _choose_shares(config, items, shares)


def _mark_exhaustive(items: list[pytest.Item]) -> None:
    """Mark tests of further combinations of parameters exhaustive, where a test is marked with a key of `COVERED`."""
    tests: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            for marker in item.iter_markers():
                if marker.name in COVERED:
                    tests[item.nodeid.partition("[")[0], COVERED[marker.name]].append(item)
    for (_, size), cases in tests.items():
        for i in _further([set(combinations(enumerate(item.callspec._idlist), size)) for item in cases]):
            cases[i].add_marker(pytest.mark.exhaustive)


def _further(values: list[set[tuple]]) -> list[int]:
    """Return the numbers of the cases that test nothing more than the other ones, given what each tests."""
    missing: set[tuple] = set().union(*values)
    tested: Counter[tuple] = Counter()

    def rank(i: int) -> tuple[int, int, int]:
        """First what tests most, then what is tested least, so that no value stands next to the same one always."""
        return -len(missing & values[i]), sum(tested[value] for value in values[i]), i

    further = [rank(i) for i in range(len(values))]
    heapify(further)
    while missing:
        i = further[0][-1]
        if (now := rank(i)) != further[0]:  # ranks never fall, so the first one that is up to date is the lowest
            heapreplace(further, now)
            continue
        heappop(further)
        missing -= values[i]
        tested.update(values[i])
    return [i for *_, i in further]


def _mark_slow(items: list[pytest.Item]) -> None:
    """Mark all cases slow but the first of those that are not exhaustive, where a test is marked `one_case`."""
    begun: set[str] = set()
    for item in items:
        if item.get_closest_marker("one_case") and not item.get_closest_marker("exhaustive"):
            test = item.nodeid.partition("[")[0]
            if test in begun:
                item.add_marker(pytest.mark.slow)
            begun.add(test)


def _choose_shares(config: pytest.Config, items: list[pytest.Item], shares: list[tuple[str, int, int]]) -> None:
    """Leave out tests of other shares. Tests with the same fixtures, which may take minutes, stay together.

    Neighbors are in different shares, since tests of one folder, or of one kernel, take about as long.
    """
    numbers: dict[str, dict[tuple, int]] = defaultdict(dict)  # of what stays together, among all tests of a marker
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        is_chosen = True
        for marker, share, n_shares in shares:
            if item.get_closest_marker(marker):
                number = numbers[marker].setdefault(_file_and_fixtures(item), len(numbers[marker]))
                is_chosen = number % n_shares == share
                break
        chosen[is_chosen].append(item)
    config.hook.pytest_deselected(items=chosen[False])
    items[:] = chosen[True]


def _file_and_fixtures(item: pytest.Item) -> tuple:
    """Return a test's file, and the values of the file's parametrized fixtures that it uses."""
    if not (isinstance(item, pytest.Function) and hasattr(item, "callspec")):
        return (item.path,)
    scopes = item.callspec._arg2scope
    values = ((name, i) for name, i in item.callspec.indices.items() if scopes[name].value != "function")
    return item.path, *values


def pytest_collection_finish() -> None:
    """Leave what is there before the tests out of garbage collections, which take a second each with all tests."""
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True  # six times a test pytest adds a handler to each of torch's 44 that does not
    gc.freeze()  # without a collection, which takes two seconds; its 205,000 objects of garbage stay
    gc.enable()
    gc.set_threshold(10_000)  # new objects, not 700: most tests end before there is garbage
    atexit.register(gc.unfreeze)  # extension modules report what is never collected as leaks


@pytest.fixture(scope="module", autouse=True)
def freeze_after_module() -> Iterator[None]:
    """Leave what a file's tests keep, as compilers' caches, out of the next files' collections: up to 0.7 s in each."""
    yield
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_sync() -> Iterator[None]:
    """Have nothing wait for the disk: what a test reads is in the system's cache, and no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses a closed file, too
        yield


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return full_disk(n): after the call only n more bytes can be written."""

    from octile import atomic_files

    class Limited(io.BufferedRandom):
        free = 0

        def write(self, data) -> int:
            Limited.free -= memoryview(data).nbytes
            if Limited.free < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    def fill(free: int) -> None:
        Limited.free = free
        monkeypatch.setattr(atomic_files, "open", open_on_full_disk, raising=False)

    def open_on_full_disk(path, mode="r"):
        return Limited(io.FileIO(path, mode)) if "x" in mode else open(path, mode)

    return fill


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The renames, and the folders that are forced to disk, in order, by their names."""
    done: list[str] = []
    replace, fsync = os.replace, os.fsync

    def logged_replace(source, target):
        replace(source, target)
        done.append(f"rename {os.path.basename(target)}")

    def logged_fsync(descriptor):
        fsync(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            done.append(f"sync {os.path.basename(path)}")

    monkeypatch.setattr(os, "replace", logged_replace)
    monkeypatch.setattr(os, "fsync", logged_fsync)
    return done


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where a shell has background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def process_group() -> Iterator[None]:
    """This process as a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
