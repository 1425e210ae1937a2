"""Tests of the launch cache of quantizations: kernels by their constants, launches by their arguments."""

from typing import Any

import pytest
import torch

from octile.kernels.cuda.jit import launch, prepared, specialize
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.kernels.cuda.quantize import launcher

E4M3 = torch.float8_e4m3fn


class FakeKernel:
    def __init__(self) -> None:
        self.made: list[Any] = []
        self.launched = 0

    def current_stream(self) -> int:
        return 7

    def ready(self, *arguments: Any) -> Any:
        self.made.append(arguments)
        return self.launch

    def launch(self) -> None:
        self.launched += 1


@pytest.fixture
def kernels(monkeypatch) -> list[FakeKernel]:
    """The kernels that are loaded, in order."""
    loaded: list[FakeKernel] = []

    def load(*_: Any) -> FakeKernel:
        loaded.append(FakeKernel())
        return loaded[-1]

    monkeypatch.setattr(specialize, "load", load)
    monkeypatch.setattr(launcher.num_sms, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(prepared, "_launches", BoundedCache(8))
    monkeypatch.setattr(launch, "_prepared", BoundedCache(8))
    return loaded


def test_tensors_at_the_same_addresses_are_prepared_once_and_launched_every_time(kernels: list[FakeKernel]):
    x, scale = torch.zeros(64, 256), torch.ones(1)
    out = torch.empty(64, 256, dtype=E4M3)
    for _ in range(3):
        launcher._launch_tiles(launcher.SETTINGS["scale given"], x, E4M3, False, data=out, given=scale)
    assert (len(kernels), len(kernels[0].made), kernels[0].launched) == (1, 1, 3)


def test_other_addresses_share_the_kernel(kernels: list[FakeKernel]):
    results = [launcher.quantize(torch.zeros(64, 256), 1, 128, E4M3, False) for _ in range(2)]
    assert len(kernels) == 1
    addresses = [made[4][1] for made in kernels[0].made]
    assert addresses == [data.data_ptr() for data, _ in results]


@pytest.mark.parametrize("other", [{"power_of_2": True}, {"dtype": torch.float8_e5m2}, {"block_cols": 1}])
def test_another_kind_of_quantization_loads_another_kernel(kernels: list[FakeKernel], other: dict[str, Any]):
    call = {"block_rows": 128, "block_cols": 128, "dtype": E4M3, "power_of_2": False}
    launcher.quantize(torch.zeros(64, 256), **call)
    launcher.quantize(torch.zeros(64, 256), **call | other)
    assert len(kernels) == 2


def test_other_settings_load_another_kernel(kernels: list[FakeKernel], monkeypatch):
    launcher.quantize(torch.zeros(64, 256), 1, 128, E4M3, False)
    monkeypatch.setitem(launcher.SETTINGS, "tiles, 32 bits", launcher.SETTINGS["tiles, 32 bits"] | {"warps": 4})
    launcher.quantize(torch.zeros(64, 256), 1, 128, E4M3, False)
    assert len(kernels) == 2
