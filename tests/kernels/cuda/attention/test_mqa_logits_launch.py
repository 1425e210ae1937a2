"""What is launched of the indexer's kernels: nothing without keys, and never with operands that TMA cannot read."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mqa_logits as kernel
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.ops.mqa_logits import PAGE, mqa_logits, paged_mqa_logits, paged_mqa_schedule
from tests.ops.paged_keys import int32

E4M3 = torch.float8_e4m3fn


class Launched:
    """Takes the place of a kernel on a GPU: remembers what it was launched with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[tuple[int, ...]] = []
        monkeypatch.setattr(kernel, "why_unsupported", lambda q: None)
        monkeypatch.setattr(kernel.num_sms, "num_sms", lambda device: 132)
        monkeypatch.setattr(kernel, "_prepared", BoundedCache(8))
        monkeypatch.setattr(kernel, "MappedKernel", lambda made, device: self)

    def launch_at(self, values: tuple[int, ...]) -> Callable[[], None]:
        return lambda: self.values.append(values)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    return Launched(monkeypatch)


def operands_for_hopper(t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ones(3, 32, 32).to(E4M3), torch.ones(t, 32).to(E4M3), torch.ones(t), torch.ones(3, 32)


@pytest.mark.parametrize("width", [0, 64])
def test_without_keys_no_kernel_is_launched(launched: Launched, width: int):
    arguments = *operands_for_hopper(0), int32([0, 0, 0]), int32([0, 0, 0]), width, False, torch.float32
    found = mqa_logits.kernels["cuda"](*arguments)
    assert torch.equal(found, mqa_logits(*arguments))
    assert not launched.values


def test_without_pages_in_the_cache_no_kernel_is_launched(launched: Launched):
    q, weights = torch.ones(3, 1, 32, 32).to(E4M3), torch.ones(3, 32)
    cache, lengths = torch.zeros(0, PAGE * 36, dtype=torch.uint8), int32([[0], [0], [0]])
    places = lengths, int32([[0], [0], [0]]), paged_mqa_schedule(lengths, 2)
    for clean in (True, False):
        arguments = q, cache, weights, *places, 8, clean, torch.float32
        assert torch.equal(paged_mqa_logits.kernels["cuda"](*arguments), paged_mqa_logits(*arguments))
    assert not launched.values


def off_by(n_bytes: int, t: Tensor) -> Tensor:
    """Return a contiguous copy that begins so many bytes after a multiple of 16."""
    buffer = torch.zeros(t.nbytes + 32, dtype=torch.uint8)
    first = -buffer.data_ptr() % 16 + n_bytes
    return buffer[first : first + t.nbytes].view(t.dtype).view(t.shape).copy_(t)


def test_a_kernel_gets_copies_of_tensors_that_begin_elsewhere(launched: Launched):
    operands = tuple(off_by(8, t) for t in operands_for_hopper(70))
    mqa_logits.kernels["cuda"](*operands, int32([0, 0, 0]), int32([70, 70, 70]), 0, False, torch.float32)
    q = off_by(8, torch.ones(3, 1, 32, 32).to(E4M3))
    lengths, cache = int32([[1], [1], [1]]), torch.zeros(1, PAGE * 36, dtype=torch.uint8)
    places = lengths, torch.zeros_like(lengths), paged_mqa_schedule(lengths, 2)
    paged_mqa_logits.kernels["cuda"](q, cache, operands[3], *places, 8, False, torch.float32)
    assert [value % 16 for values in launched.values for value in values[:4]] == [0] * 8


def test_a_cache_that_begins_elsewhere_is_refused():
    q, weights = torch.ones(1, 1, 32, 32).to(E4M3), torch.ones(1, 32)
    lengths = int32([[1]])
    places = lengths, int32([[0]]), paged_mqa_schedule(lengths, 2)
    buffer = torch.zeros(8 + PAGE * 36, dtype=torch.uint8)
    with pytest.raises(ValueError, match="cache must begin at a multiple of 16 bytes of its storage, not at 8"):
        paged_mqa_logits(q, buffer[8:].view(1, -1), weights, *places, 8, False, torch.float32)
