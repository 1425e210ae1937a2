"""Tests of the precision of a forward pass in training."""

import pytest
import torch

from octile.nn.precision import autocast, forward_precision


@pytest.mark.parametrize(
    ("device", "compute", "is_enabled"),
    [("cuda", torch.bfloat16, True), ("cuda", torch.float32, False), ("cpu", torch.bfloat16, False)],
)
def test_what_is_not_quantized_is_in_the_recipes_dtype_on_a_gpu_only(monkeypatch, device, compute, is_enabled):
    monkeypatch.setattr(torch, "autocast", lambda *given: given)
    assert autocast(torch.device(device), compute) == (device, compute, is_enabled)


def test_a_forward_pass_on_a_cpu_is_in_float32():
    with forward_precision(torch.device("cpu"), torch.bfloat16):
        assert not torch.is_autocast_enabled("cpu")
