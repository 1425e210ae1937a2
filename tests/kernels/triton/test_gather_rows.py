"""Rows copied by an index of which only a part is used, compared with torch.index_select."""

import pytest
import torch

from octile.kernels.triton import gather_rows
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


@pytest.mark.one_case
@pytest.mark.parametrize("n_bytes", [224, 1, 6, 12, 7168])
@pytest.mark.parametrize("counts", [[3, 0, 8], [0], [5], [0, 0, 0], [40, 2, 28], [999]])
def test_as_many_rows_as_the_counts_add_up_to_are_copied(n_bytes: int, counts: list[int]):
    torch.manual_seed(n_bytes)
    x = torch.randint(256, (13, n_bytes), dtype=torch.uint8)
    index = torch.randint(13, (70,), dtype=torch.int32)
    out = torch.full((90, -(-n_bytes // 32) * 32 + 32), 9, dtype=torch.uint8)
    gather_rows.launch(x, index, torch.tensor(counts), out[:, :n_bytes])
    expected, used = torch.full_like(out, 9), min(sum(counts), 70)
    expected[:used, :n_bytes] = x.index_select(0, index[:used])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("n_bytes", [6, 224])
def test_without_an_index_the_first_rows_are_copied(n_bytes: int):
    x = torch.randint(256, (13, n_bytes + 32 - n_bytes % 32), dtype=torch.uint8)
    out = torch.full((13, n_bytes), 9, dtype=torch.uint8)
    gather_rows.launch(x[:, :n_bytes], None, torch.tensor([2, 5]), out)
    assert torch.equal(out, torch.cat([x[:7, :n_bytes], torch.full_like(out[7:], 9)]))


@pytest.mark.parametrize(("rows", "entries"), [(0, 0), (3, 0)])
def test_without_entries_nothing_is_written(rows: int, entries: int):
    out = torch.full((4, 32), 9, dtype=torch.uint8)
    x, index = torch.zeros(rows, 32, dtype=torch.uint8), torch.zeros(entries, dtype=torch.int32)
    gather_rows.launch(x, index, torch.zeros(2, dtype=torch.int64), out)
    assert (out == 9).all()
