"""FSDP2 with weights that two gloo ranks gather in FP8: bits, bytes, training as in one process, refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octile
from octile.parallel.fsdp import boundary_amax, quantize_rows, scale_order
from octile.recipe import Recipe
from tests.parallel import fsdp_cases as cases
from tests.worlds import Outcomes

WORKS = (
    *(cases.bits, cases.values, cases.training, cases.bf16, cases.accumulated, cases.recomputed, cases.unfused),
    *(cases.sparse_attention, cases.compiled, cases.fewer_bytes, cases.saved, cases.summary, cases.refused),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory, "fsdp", WORKS)


@pytest.mark.slow
def test_gathered_are_the_bits_that_quantizing_the_whole_weight_gives(outcomes: Outcomes):
    outcomes.assert_passed(cases.bits)


@pytest.mark.slow
def test_other_code_reads_the_dequantized_values_of_a_gathered_weight_and_cannot_write_it(outcomes: Outcomes):
    outcomes.assert_passed(cases.values)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_process_bit_for_bit(outcomes: Outcomes):
    outcomes.assert_passed(cases.training)


@pytest.mark.slow
def test_mixed_precision_quantizes_the_shards_in_their_own_precision(outcomes: Outcomes):
    outcomes.assert_passed(cases.bf16)


@pytest.mark.slow
def test_micro_batches_add_their_gradients(outcomes: Outcomes):
    outcomes.assert_passed(cases.accumulated)


@pytest.mark.slow
def test_recomputed_gate_and_up_read_the_gathered_weights(outcomes: Outcomes):
    outcomes.assert_passed(cases.recomputed)


@pytest.mark.slow
def test_layers_with_hooks_read_the_gathered_weights(outcomes: Outcomes):
    outcomes.assert_passed(cases.unfused)


@pytest.mark.slow
def test_sparse_attention_reads_the_gathered_weights(outcomes: Outcomes):
    outcomes.assert_passed(cases.sparse_attention)


@pytest.mark.slow
def test_compiled_blocks_read_the_gathered_weights_without_graph_breaks(outcomes: Outcomes):
    outcomes.assert_passed(cases.compiled)


@pytest.mark.slow
def test_fp8_gathers_a_byte_a_value_where_bf16_gathers_two(outcomes: Outcomes):
    outcomes.assert_passed(cases.fewer_bytes)


@pytest.mark.slow
def test_checkpoints_hold_the_weights_in_high_precision(outcomes: Outcomes):
    outcomes.assert_passed(cases.saved)


@pytest.mark.slow
def test_the_summary_says_which_weights_are_gathered_in_high_precision_and_why(outcomes: Outcomes):
    outcomes.assert_passed(cases.summary)


@pytest.mark.slow
def test_what_cannot_be_gathered_in_fp8_is_refused(outcomes: Outcomes):
    outcomes.assert_passed(cases.refused)


# Blocks whose rows several ranks hold, without processes

EXTREMES = st.sampled_from([0.0, 1e-40, 448.0, -1e30, torch.inf, torch.nan])


@settings(max_examples=60)
@given(
    n=st.integers(1, 300),
    ranks=st.integers(1, 5),
    k=st.integers(1, 260),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from(["float32", "power_of_2"]),
    outliers=st.lists(st.tuples(st.integers(0, 1499), st.integers(0, 259), EXTREMES), max_size=4),
)
def test_parts_of_blocks_are_quantized_as_the_whole_weight(n, ranks, k, dtype, scale, outliers):
    weight = torch.randn(n * ranks, k, generator=torch.Generator().manual_seed(n)) * torch.logspace(-6, 2, k)
    for row, column, value in outliers:
        weight[row % len(weight), column % k] = value
    weight[: len(weight) // 3] *= 0  # blocks of zeros, too
    weight = weight.to(dtype)
    shards, of_w = weight.chunk(ranks), Recipe.deepseek_v3().with_weight_scale(scale).formats.w
    amax = torch.stack([boundary_amax(shard, rank, ranks) for rank, shard in enumerate(shards)]).amax(0)
    parts = [quantize_rows(shard, rank, ranks, amax, of_w) for rank, shard in enumerate(shards)]
    data, scales = (torch.cat(part) for part in zip(*parts, strict=True))
    expected = octile.quantize(weight, (128, 128), octile.E4M3, scale)
    torch.testing.assert_close(scales[scale_order(n, ranks)], expected.scale, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
