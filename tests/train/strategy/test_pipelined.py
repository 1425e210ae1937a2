"""`octile train` on the ranks of a pipeline, 2 and 4 of gloo, compared with one process; see pipeline_cases.py."""

from collections.abc import Callable
from functools import partial

import pytest

from tests.train.strategy import pipeline_cases
from tests.train.strategy.test_ranks import free_port
from tests.worlds import Failures, assert_passed, start_once, start_ranks

NAMES = {world: list(pipeline_cases.cases(world)) for world in (2, 4)}


FURTHER = {  # with what shows the same
    "moved-chimera-2x2": "moved-1f1b",
    "equal_run-dualpipe-2x2": "equal_run-dualpipe and equal_run-1f1b-2x2",
    "equal_run-zb1p-4": "equal_run-zb1p and equal_run-1f1b-2x2, and its passes in tests/parallel/test_pipeline.py",
    "late-1f1b-2x2": "late-dualpipe, and late weights of data-parallel ranks in test_ranks.py",
    "delayed-dualpipe": "deepseek_v3-zb1p and moved-1f1b, whose recipe is delayed",
    "equal_run-gpipe": "equal_run-1f1b, of the same stages, and GPipe's passes in tests/parallel/test_pipeline.py",
    "equal_run-chimera": "equal_run-dualpipe, of the same stages, and its passes in tests/parallel/test_pipeline.py",
    "equal_run-zb1p": "ramp, whose steps by ZB1P are those of one process, and equal_run-1f1b, of the same stages",
    **{f"resumed-{name}": "resumed-dualpipev" for name in pipeline_cases.SCHEDULES if name != "dualpipev"},
    **{f"resumed-{name}-4": "resumed-dualpipev" for name in pipeline_cases.SCHEDULES},
    "muon-1f1b": "moved-1f1b, whose optimizer has two moments of each weight, and Muon's state in test_ranks.py",
}


@pytest.fixture(scope="module")
def failures(store, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Failures]:
    """What went wrong in the further cases of a world or in the others, by rank."""

    def start_cases(further: bool, world: int, folder: str) -> None:
        names = [name for name in NAMES[world] if (name in FURTHER) == further]
        arguments = world, folder, str(store.folder), free_port(), "cpu", names
        start_ranks(pipeline_cases.run, arguments, world)

    worlds = [
        start_once(tmp_path_factory, f"pipelined-{further}", partial(start_cases, further)) for further in (False, True)
    ]
    return lambda world, further: worlds[further](world)


@pytest.mark.parametrize(
    ("world", "name"),
    [
        pytest.param(world, name, marks=pytest.mark.exhaustive if name in FURTHER else pytest.mark.slow)
        for world, names in NAMES.items()
        for name in names
    ],
)
def test_trainers(failures, world: int, name: str):
    assert_passed(failures(world, name in FURTHER), name)
