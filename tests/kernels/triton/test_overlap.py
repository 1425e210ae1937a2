"""Launches overlap where a context allows it and the GPU has the instructions."""

import pytest
import torch

from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.triton.compile_all import ARCHITECTURES
from octile.kernels.triton.device import assume_device
from octile.kernels.triton.overlap import overlap_options


@pytest.mark.parametrize(("architecture", "overlaps"), [("sm_80", False), ("sm_89", False), ("sm_90", True)])
def test_launches_overlap_on_gpus_that_can(architecture: str, overlaps: bool):
    device = torch.device("meta")
    with assume_device(ARCHITECTURES[architecture]):
        assert overlap_options(device) == {"OVERLAPS": False}
        with overlapping_launches():
            assert overlap_options(device)["OVERLAPS"] is overlaps
