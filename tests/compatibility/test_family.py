"""Converted models of transformers and torchtitan on four gloo ranks: the losses are those of one process."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.compatibility import family_cases as cases
from tests.worlds import Outcomes, each_work

pytestmark = pytest.mark.slow  # four ranks of torchtitan start for all of them

TORCHTITANS = (cases.torchtitan_llama3, cases.torchtitan_deepseek_v3)
FURTHER = (cases.torchtitan_deepseek_v3,)  # tests/integrations/test_torchtitan.py runs jobs of it on the same functions


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    works = [cases.llama, cases.qwen3_moe, cases.deepseek_v3, cases.llama_in_two_dimensions, cases.clipped]
    imports = []
    if find_spec("torchtitan") is not None:
        works += TORCHTITANS
        imports = ["torchtitan.config", "torchtitan.models.deepseek_v3", "torchtitan.models.llama3"]
    return Outcomes(tmp_path_factory, "family", works, cases.RANKS, imports=imports, further=FURTHER)


def test_llama(outcomes: Outcomes):
    outcomes.assert_passed(cases.llama)


def test_qwen3_moe(outcomes: Outcomes):
    outcomes.assert_passed(cases.qwen3_moe)


def test_deepseek_v3(outcomes: Outcomes):
    outcomes.assert_passed(cases.deepseek_v3)


def test_llama_with_fsdp2_and_tensor_parallelism(outcomes: Outcomes):
    outcomes.assert_passed(cases.llama_in_two_dimensions)


def test_gradients_of_every_layout_are_clipped_as_in_one_process(outcomes: Outcomes):
    outcomes.assert_passed(cases.clipped)


@each_work(TORCHTITANS, FURTHER)
def test_torchtitans_functions_parallelize_its_converted_models(work: Callable[[int, Path], None], outcomes: Outcomes):
    pytest.importorskip("torchtitan")
    outcomes.assert_passed(work)
