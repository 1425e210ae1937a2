"""The kernel that divides groups of rows into tiles equals the reference."""

import pytest
import torch

from octile.kernels.triton import groups, launch_config
from octile.ops.groups import align_groups, num_tiles
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("elements", [4096, 16], ids=["one program", "many"])
@pytest.mark.parametrize("past", [0, 1, 200])
@pytest.mark.parametrize("counts", [[130, 0, 128, 1, 1, 300], [], [0], [0, 0, 5], [1] * 40, [700]], ids=str)
def test_tiles(counts: list[int], past: int, elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(launch_config.GROUP_TILES, "elements", elements)
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    rows = sum(counts) + past
    found = groups.launch(offs, rows, num_tiles(rows, len(counts)))
    for ours, theirs in zip(found, align_groups(offs, rows), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)


def test_offsets_may_be_strided():
    offs = torch.tensor([3, 9, 8, 9], dtype=torch.int32)[::2]
    assert torch.equal(groups.launch(offs, 20, 3)[0], align_groups(offs.contiguous(), 20)[0])


def test_offsets_out_of_bounds_are_clamped():
    tiles, offs = groups.launch(torch.tensor([-5, 9, 500], dtype=torch.int32), 20, num_tiles(20, 3))
    assert tiles.tolist() == [[0, 9], [9, 20], [0, 0], [0, 0]]
    assert offs.tolist() == [0, 128, 256]
