"""A buffer that another process opens by its address; on a GPU `tests/gpu/test_new_weights.py` does."""

import os

import pytest
import torch

from octile.parallel.shared_buffer import SharedBuffer, open_buffer

CPU = torch.device("cpu")


def test_what_is_written_is_read_until_both_have_closed_it():
    buffer = SharedBuffer(10, CPU)
    buffer.bytes.copy_(torch.arange(10))
    buffer.wait()
    opened = open_buffer(buffer.address, 10, CPU)
    assert opened.read(3, 7).tolist() == [3, 4, 5, 6]
    buffer.close()
    assert not os.path.exists(buffer.address["shared_memory"])
    assert opened.read(8, 10).tolist() == [8, 9]
    opened.close()


def test_only_its_owner_can_open_it():
    buffer = SharedBuffer(10, CPU)
    assert os.stat(buffer.address["shared_memory"]).st_mode & 0o777 == 0o600
    buffer.close()


@pytest.mark.parametrize("size", [9, 11])
def test_another_size_is_refused(size):
    buffer = SharedBuffer(10, CPU)
    with pytest.raises(ValueError, match=f"^shared_memory must have {size} bytes, not 10$"):
        open_buffer(buffer.address, size, CPU)
    buffer.close()


def test_one_that_is_cut_off_while_it_is_read_is_refused(tmp_path):
    (tmp_path / "buffer").write_bytes(bytes(10))
    opened = open_buffer({"shared_memory": str(tmp_path / "buffer")}, 10, CPU)
    (tmp_path / "buffer").write_bytes(bytes(4))
    with pytest.raises(ValueError, match="became smaller"):
        opened.read(2, 8)
    opened.close()
