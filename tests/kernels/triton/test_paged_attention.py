"""The kernels of paged attention against the reference, for any number of splits."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.triton import paged_attention as kernel
from octile.kernels.triton.device import DeviceProperties
from octile.ops.latent_cache import PAGE, fp8_rows
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from tests.kernels.triton.gpus import EVERY_GPU, any_gpu, every_cache
from tests.ops.paged_caches import filled_cache

pytestmark = pytest.mark.usefixtures("gpu")
LENGTHS = torch.tensor([1, 64, 65, 0, 200], dtype=torch.int32)
PAGES = torch.randperm(20, generator=torch.Generator().manual_seed(0)).int().view(5, 4)


def queries(heads: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, heads, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("sizes", [(3, 40, 8), (16, 96, 32), (40, 136, 6)], ids=str)
@every_cache
@pytest.mark.parametrize("n_splits", [1, 3, 0])
def test_attention_equals_the_reference(sizes: tuple[int, int, int], cache_dtype: torch.dtype, n_splits: int):
    heads, c, r = sizes
    q, cache = queries(heads, c + r), filled_cache(20, c, r, cache_dtype)
    found = kernel.launch(q, cache, PAGES, LENGTHS, c, 0.1, n_splits=n_splits)
    expected = paged_attention(q, cache, PAGES, LENGTHS, c, 0.1)
    # the terms of a score are about 2⁷ in all, so that FP32's rounding changes a weight by 2⁻¹⁷ of itself
    torch.testing.assert_close(found, expected, rtol=2**-17, atol=2**-17 * 32.0)


@any_gpu
def test_the_weights_of_bf16_queries_are_rounded_once():
    q, cache = queries(3, 48, torch.bfloat16), filled_cache(20, 40, 8, torch.bfloat16)
    found = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, n_splits=2)
    expected = paged_attention(q, cache, PAGES, LENGTHS, 40, 0.1)
    largest = cache.float().abs().max()  # a softmax's weights sum to 1, and each has an error of 2⁻⁹ of itself
    assert ((found - expected).abs() <= 2**-9 * largest + 2**-7 * expected.abs()).all()


@pytest.mark.one_case
@pytest.mark.each_value
@every_cache
@pytest.mark.parametrize("part", [64, 128, 256])
def test_parts_of_rows_have_the_references_values(cache_dtype: torch.dtype, part: int):
    q, cache = queries(3, 48), filled_cache(20, 40, 8, cache_dtype)
    found = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, part)
    torch.testing.assert_close(
        found, paged_attention(q, cache, PAGES, LENGTHS, 40, 0.1), rtol=2**-17, atol=2**-17 * 32.0
    )


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.usefixtures("new_memory_is_nan")
@every_cache
@pytest.mark.parametrize("part", [64, 128])
@pytest.mark.parametrize("max_partials", [2**18, 2 * 3 * 4])
def test_a_row_of_parts_does_not_depend_on_other_rows(
    cache_dtype: torch.dtype, part: int, max_partials: int, monkeypatch: pytest.MonkeyPatch
):
    """Nor on the pages of the longest text, or on the rows that attend in one launch."""
    q, cache = queries(3, 48), filled_cache(20, 40, 8, cache_dtype)
    monkeypatch.setattr(kernel, "MAX_PARTIALS", max_partials)
    together = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, part)
    for row in range(5):
        pages = PAGES[row : row + 1, : max(-(-int(LENGTHS[row]) // PAGE), 1)]
        alone = kernel.launch(q[row : row + 1], cache, pages, LENGTHS[row : row + 1], 40, 0.1, part)
        assert torch.equal(alone[0], together[row])


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("gpu", EVERY_GPU, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [3, 16, 40])
def test_rows_of_a_text_that_attend_together_have_the_values_of_rows_alone(dtype: torch.dtype, heads: int):
    lengths = torch.tensor([62, 63, 64, 65, 199, 200, 0, 0], dtype=torch.int32)  # of two texts, the second padded
    pages, cache = PAGES[:2].repeat_interleave(4, 0), filled_cache(20, 40, 8, dtype)
    q = torch.randn(8, heads, 48, generator=torch.Generator().manual_seed(1)).to(dtype)
    alone = kernel.launch(q, cache, pages, lengths, 40, 0.1, 64)
    together = kernel.launch(q, cache, pages, lengths, 40, 0.1, 64, rows_per_text=4)
    # in the interpreter sums depend on a row's place in a tile; tests/gpu compares bits
    torch.testing.assert_close(together, alone, rtol=2**-8, atol=2**-17 * 32.0)
    assert not together[6:].any()
    _, lse = kernel.launch_with_lse(q, cache, pages, lengths, 40, 0.1, 64, 4)
    _, expected = paged_attention_with_lse.reference(q, cache, pages, lengths, 40, 0.1, 64)
    torch.testing.assert_close(lse, expected, rtol=2**-8, atol=2**-8)


@any_gpu
@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("part", [64, 256])
def test_a_block_takes_heads_of_any_rows_of_a_text(part: int):
    """Of two texts of 11 rows with 3 heads: 33 heads in blocks of 16, which begin and end within rows."""
    lengths = torch.tensor([*range(59, 70), *range(190, 200), 0], dtype=torch.int32)
    pages, cache = PAGES[:2].repeat_interleave(11, 0), filled_cache(20, 40, 8, torch.float32)
    q = torch.randn(22, 3, 48, generator=torch.Generator().manual_seed(1))
    found = kernel.launch_with_lse(q, cache, pages, lengths, 40, 0.1, part, 11)
    expected = paged_attention_with_lse.reference(q, cache, pages, lengths, 40, 0.1, part)
    torch.testing.assert_close(found[0], expected[0], rtol=2**-17, atol=2**-17 * 32.0)
    torch.testing.assert_close(found[1], expected[1], rtol=2**-17, atol=2**-12)


@pytest.mark.parametrize(("partials", "rows"), [(6, 2048), (2**9, 2048), (2**10, 1024), (1536, 512), (2**21, 1)])
def test_all_rows_of_a_text_attend_together_unless_their_partial_results_are_too_many(partials: int, rows: int):
    assert kernel.rows_together(partials, 2048) == rows


def test_two_blocks_of_keys_are_loaded_ahead_where_shared_memory_has_room_for_them():
    hopper = DeviceProperties(num_sms=132, shared_bytes=SHARED_BYTES, fp8=True, dependent_launch=True)
    assert [kernel.choose_stages(128, 64, columns, False, hopper) for columns in (256 + 64, 256 + 128)] == [5, 2]
    assert kernel.choose_stages(128, 64, 256 + 64, True, hopper) == 2
    assert kernel.choose_stages(16, 32, 512 + 64, False, hopper) == 2


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """PyTorch fills memory that is allocated and not written with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def put_nan(cache: Tensor, page: int, place: int, c: int) -> None:
    """Make the position's last latent NaN; in FP8 its tile's scale."""
    if cache.dtype == torch.uint8:
        fp8_rows(cache, c)[1][page, place, -1] = torch.nan
    else:
        cache[page, place, c - 1] = torch.nan


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.usefixtures("new_memory_is_nan")
@every_cache
@pytest.mark.parametrize(("n_splits", "position"), [(1, 100), (2, 0), (4, 100), (7, 199)])
def test_a_nan_in_one_position_of_a_text_makes_its_row_nan(cache_dtype: torch.dtype, n_splits: int, position: int):
    """Whichever of the splits it lies in; with 7 splits some have no position, and their results are not read."""
    q, cache = queries(3, 48), filled_cache(20, 40, 8, cache_dtype)
    before = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, n_splits=n_splits)
    put_nan(cache, int(PAGES[4, position // PAGE]), position % PAGE, 40)
    found = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, n_splits=n_splits)
    assert torch.equal(found.isnan(), paged_attention.reference(q, cache, PAGES, LENGTHS, 40, 0.1).isnan())
    assert found[4].isnan().all()
    assert torch.equal(found[:4], before[:4])


@pytest.mark.one_case
@any_gpu
@pytest.mark.usefixtures("new_memory_is_nan")
@pytest.mark.parametrize("n_splits", [1, 2, 7])
def test_a_nan_in_a_query_makes_its_head_nan_unless_it_attends_to_nothing(n_splits: int):
    q, cache = queries(3, 48), filled_cache(20, 40, 8, torch.float32)
    before = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, n_splits=n_splits)
    q[:, 1, 47] = torch.nan
    found = kernel.launch(q, cache, PAGES, LENGTHS, 40, 0.1, n_splits=n_splits)
    assert torch.equal(found.isnan(), paged_attention.reference(q, cache, PAGES, LENGTHS, 40, 0.1).isnan())
    assert found[[0, 1, 2, 4], 1].isnan().all()
    assert not found[3].any()
    assert torch.equal(found[:, ::2], before[:, ::2])
