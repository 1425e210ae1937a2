"""Linear layers that torch shards over two gloo ranks as DTensors, compared with one process."""

import pytest

from tests.nn import tensor_parallel_cases as cases
from tests.worlds import Outcomes

WORKS = (
    *(cases.column_and_row, cases.sequence, cases.replicated, cases.swiglu, cases.optimizer, cases.autocast),
    *(cases.bf16_recipe, cases.refused, cases.attention_to_top_k_keys, cases.partial_gradients),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "tensor-parallel", WORKS)


@pytest.mark.slow
def test_column_and_row_wise_layers_compute_what_one_process_does(outcomes: Outcomes):
    outcomes.assert_passed(cases.column_and_row)


def test_inputs_and_outputs_may_be_sharded_along_the_sequence(outcomes: Outcomes):
    outcomes.assert_passed(cases.sequence)


def test_a_replicated_layer_computes_what_one_process_does(outcomes: Outcomes):
    outcomes.assert_passed(cases.replicated)


def test_a_swiglu_block_computes_what_its_layers_do_in_one_process(outcomes: Outcomes):
    outcomes.assert_passed(cases.swiglu)


def test_sparse_attention_calls_a_sharded_layer_for_keys_and_values(outcomes: Outcomes):
    outcomes.assert_passed(cases.attention_to_top_k_keys)


def test_octiles_adamw_steps_the_shards(outcomes: Outcomes):
    outcomes.assert_passed(cases.optimizer)


def test_octiles_adamw_sums_gradients_that_ranks_have_in_parts(outcomes: Outcomes):
    outcomes.assert_passed(cases.partial_gradients)


def test_partial_sums_have_the_dtype_of_autocast(outcomes: Outcomes):
    outcomes.assert_passed(cases.autocast)


def test_a_recipe_without_fp8_needs_no_whole_blocks(outcomes: Outcomes):
    outcomes.assert_passed(cases.bf16_recipe)


def test_what_would_cross_ranks_or_has_another_layout_is_refused(outcomes: Outcomes):
    outcomes.assert_passed(cases.refused)
