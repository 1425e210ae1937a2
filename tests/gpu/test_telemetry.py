"""Telemetry on a GPU says what it says on the CPU, up to the order of sums, and copies to the host once a step."""

import copy

import pytest
import torch
from torch import nn

from octile.lab import telemetry
from octile.lab.capture import capturing
from octile.nn.conversion import apply_recipe
from octile.nn.mlp import MLP
from octile.nn.moe import Experts

D, T = 256, 200
OFFS = [60, 60, 200]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.experts = MLP(D, 192), Experts(3, D, 128)

    def forward(self, x):
        return self.experts(x + self.mlp(x), torch.tensor(OFFS, dtype=torch.int32, device=x.device))


def rows_of(model, device):
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    with telemetry(model.to(device)) as t:
        model(x).square().sum().backward()
        return {(r["layer"], r["product"], r.get("operand")): r for r in t.step()}


def test_rows_agree_with_the_cpus():
    model = apply_recipe(Block())
    on_cpu, on_gpu = rows_of(copy.deepcopy(model), "cpu"), rows_of(model, "cuda")
    assert on_cpu.keys() == on_gpu.keys()
    for place, row in on_cpu.items():
        other = on_gpu[place]
        for name in ("snr_db", "quantization_snr_db", "mean_blockwise_dynamic_range"):  # not what one number decides
            if name in row and row[name] is not None:
                assert other[name] == pytest.approx(row[name], abs=1.0), (place, name)
        if "accumulation_snr_db" in row:
            assert other["accumulation_snr_db"] == pytest.approx(row["accumulation_snr_db"], abs=3.0), place


def test_operands_of_the_first_layer_have_the_same_figures():
    model = apply_recipe(Block())
    place = ("mlp.gate_proj", "fprop", "x")
    on_cpu, on_gpu = rows_of(copy.deepcopy(model), "cpu")[place], rows_of(model, "cuda")[place]
    assert on_gpu.pop("scale_histogram") == on_cpu.pop("scale_histogram")
    assert on_gpu.pop("top_channels") == on_cpu.pop("top_channels")
    strings = {name for name, value in on_cpu.items() if isinstance(value, str)}
    numbers = on_cpu.keys() - strings
    assert {n: on_gpu[n] for n in numbers} == pytest.approx({n: on_cpu[n] for n in numbers}, rel=1e-4, abs=1e-6)


def test_captured_operands_come_to_the_host():
    model = apply_recipe(Block()).cuda()
    x = torch.randn(T, D, device="cuda", requires_grad=True)
    with capturing(model, "mlp.gate_proj") as recorder:
        model(x).sum().backward()
    assert all(tensor.device.type == "cpu" for tensor in recorder.tensors.values())
    assert torch.equal(recorder.tensors["mlp.gate_proj.x"], x.detach().cpu())
