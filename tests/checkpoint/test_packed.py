"""Tensors in one buffer: read as they were written, and refused where they cannot lie in it."""

import pytest
import torch

from octile.checkpoint.packed import PackedTensors, layout_of, packed_size
from octile.checkpoint.tensor_file import TensorSpec

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([1.5, 2.5, 3.5]).to(torch.float8_e4m3fn),
    "c": torch.tensor([[1.0], [-2.0]], dtype=torch.bfloat16),
}


class Memory:
    def __init__(self, size: int):
        self.bytes = torch.zeros(size, dtype=torch.uint8)

    def read(self, begin, end):
        return self.bytes[begin:end]


def test_tensors_are_read_as_they_were_written():
    layout = layout_of({name: TensorSpec.of(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()})
    memory = Memory(packed_size(layout))
    assert len(memory.bytes) == 24 + 3 + 4
    for name, tensor in TENSORS.items():
        begin, end = layout[name]["data_offsets"]
        memory.bytes[begin:end] = tensor.flatten().view(torch.uint8)
    packed = PackedTensors(layout, memory)
    assert packed.nbytes == 31
    for name, tensor in TENSORS.items():
        read = packed.read(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read.float(), tensor.float())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F4"}, "w must have a dtype of "),
        ({"shape": [3]}, "w must have 12 bytes"),
        ({"data_offsets": [16, 0]}, "w must have 16 bytes"),
        ({"data_offsets": [2, 18]}, "w must have 16 bytes, which begin at a multiple of its element size"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(entry, message):
    layout = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **entry}}
    with pytest.raises(ValueError, match=message):
        PackedTensors(layout, Memory(64))


def test_tensors_that_overlap_are_refused():
    layout = {name: {"dtype": "F32", "shape": [2], "data_offsets": [at, at + 8]} for name, at in (("b", 4), ("a", 0))}
    with pytest.raises(ValueError, match=r"b must begin after the tensor before it, from 8, not at 4$"):
        PackedTensors(layout, Memory(12))
