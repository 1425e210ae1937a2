"""Tests on a GPU, from the operators up to training. Without a GPU each is skipped, with the reason.

    pytest tests/gpu -n 16 --dist load --maxschedchunk 1       # on 16 cores; each process takes one test at a time

A test that hangs, or that leaves its process without a usable CUDA context, ends its worker: pytest-xdist reports the
test and starts another worker for those that follow.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octile.kernels.cuda.gemm import request as gemm_request
from tests.gpu_memory import SharedMemory
from tests.train.conftest import store, text  # noqa: F401  (fixtures)

if torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # instead of 16 processes for each of this suite's
    import triton  # noqa: F401  (before tests/kernels/triton chooses the interpreter for the process)


TIMEOUT = 120  # seconds of a test; one that waits for a kernel can only be ended with its process
CACHED = 2**30  # bytes of torch's cache that a process may keep from the others
START_FIRST = (  # the longest tests, which compile much or start processes
    "test_transformers.py",
    "test_train_bench.py",
    "test_step.py",
    "test_out_of_memory.py",
    "test_both_kernels.py",
    "test_disaggregated.py",
    "test_serve.py",
)
STARTED_ONCE = ("test_experts.py",)  # one test starts the ranks, while the others would wait for its result
LARGE = ("cuda/test_shapes.py",)  # spread over the session, and each begins when its memory is free
LARGE_BYTES = 8 * 2**30  # of such a test; 6 GiB of tensors at most
WAIT = 300  # seconds in which so much must be free; then a test begins all the same, and may fail for lack of memory


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Limit the time of the tests of this folder, and order them. Without a GPU skip each, once for all parameters."""
    folder = Path(__file__).parent
    if not torch.cuda.is_available():
        _skip_once(config, items, folder)
        return
    seen, ranks = set[str](), dict[pytest.Item, int]()
    large: list[pytest.Item] = []
    for item in items:
        name = str(item.path.relative_to(folder)) if item.path.is_relative_to(folder) else ""
        if name and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT, method="thread"))
        if name in LARGE:
            large.append(item)
        waits = name in STARTED_ONCE and name in seen
        ranks[item] = 2 if waits else 0 if name in START_FIRST + STARTED_ONCE else 1
        seen.add(name)
    others = sorted((item for item in items if item not in large), key=ranks.__getitem__)
    step = len(others) // max(len(large), 1)
    for i, item in reversed([*enumerate(large)]):
        others.insert(i * step, item)
    items[:] = others


def _skip_once(config: pytest.Config, items: list[pytest.Item], folder: Path) -> None:
    """Skip the tests of the folder before their fixtures are made, and leave out further parameters of each."""
    kept, further, seen = list[pytest.Item](), list[pytest.Item](), set[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if item.path.is_relative_to(folder):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
            (further if test in seen else kept).append(item)
            seen.add(test)
        else:
            kept.append(item)
    config.hook.pytest_deselected(items=further)
    items[:] = kept


@pytest.fixture(autouse=True)
def memory_for_others():
    """Return torch's cached memory to the GPU, which other workers share."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > CACHED:
        torch.cuda.empty_cache()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the time limit, which the wait is not part of
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Let a large test of a session of several workers wait for its memory."""
    is_large = item.path in [Path(__file__).parent / name for name in LARGE]
    session = getattr(item.config, "workerinput", {}).get("testrunuid")
    if not is_large or not session or not torch.cuda.is_available():
        return (yield)
    file = Path(tempfile.gettempdir(), f"octile-gpu-tests-{session}.json")
    with SharedMemory(file, lambda: torch.cuda.mem_get_info()[0]).holding(LARGE_BYTES, WAIT) as is_free:
        if not is_free:
            gib = f"{LARGE_BYTES / 2**30:g} GiB"
            item.add_report_section("setup", "GPU memory", f"{gib} were not free within {WAIT} s: it began without")
        return (yield)


def pytest_runtest_logfinish(nodeid: str) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # an error of a kernel stays with the process
            os._exit(1)


@pytest.fixture(autouse=True)
def a_gpu_that_runs_the_kernels() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"needs a GPU of sm_80 or later, not {torch.cuda.get_device_name()}")
    from triton import knobs

    if knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set in this process: run `pytest tests/gpu` by itself")


@pytest.fixture(params=["hopper", "portable"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with Hopper's CUDA kernels, and with the Triton kernels that every other GPU uses."""
    if request.param == "portable":
        monkeypatch.setattr(gemm_request, "why_not_on", lambda device: "the portable kernels are tested")
