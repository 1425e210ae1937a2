"""Telemetry on a GPU agrees with the CPU up to the order of sums, and copies to the host once a step."""

import copy

import pytest
import torch

from octile.lab.capture import capturing
from octile.nn.conversion import apply_recipe
from tests.lab.agreement import Block, D, T, assert_agree, rows_of


def test_rows_agree_with_those_of_the_cpu():
    model = apply_recipe(Block())
    on_cpu, on_gpu = rows_of(copy.deepcopy(model), "cpu"), rows_of(model, "cuda")
    assert on_cpu.keys() == on_gpu.keys()
    for place, row in on_cpu.items():
        assert_agree(row, on_gpu[place])


def test_operands_of_the_first_layer_have_the_same_figures():
    model = apply_recipe(Block())
    place = ("mlp.gate_proj", "fprop", "x")
    on_cpu, on_gpu = rows_of(copy.deepcopy(model), "cpu")[place], rows_of(model, "cuda")[place]
    assert on_gpu.pop("scale_histogram") == on_cpu.pop("scale_histogram")
    assert on_gpu.pop("top_channels") == on_cpu.pop("top_channels")
    strings = {name for name, value in on_cpu.items() if isinstance(value, str)}
    numbers = on_cpu.keys() - strings
    assert {n: on_gpu[n] for n in numbers} == pytest.approx({n: on_cpu[n] for n in numbers}, rel=1e-4, abs=1e-6)


def test_captured_operands_are_copied_to_the_host():
    model = apply_recipe(Block()).cuda()
    x = torch.randn(T, D, device="cuda", requires_grad=True)
    with capturing(model, "mlp.gate_proj") as recorder:
        model(x).sum().backward()
    assert all(tensor.device.type == "cpu" for tensor in recorder.tensors.values())
    assert torch.equal(recorder.tensors["mlp.gate_proj.x"], x.detach().cpu())
