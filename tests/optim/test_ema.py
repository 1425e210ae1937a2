"""Tests of the moving average of weights: its values, resuming, and restoring the weights."""

import pytest
import torch
from torch import nn

from octile.optim import EMA, AdamW

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@torch.no_grad()
def move(net: nn.Module, by: float) -> None:
    for param in net.parameters():
        param.add_(by)


@pytest.mark.parametrize("device", DEVICES)
def test_follows_its_recurrence(device):
    net = model().to(device)
    ema = EMA(net, 0.9)
    expected = net[0].weight.detach().cpu().clone()
    for i in range(5):
        move(net, i)
        ema.update()
        expected = expected.lerp(net[0].weight.detach().cpu(), 1 - 0.9)
        move(net, 100.0)  # an update takes the weights of its call, even where it works later
        move(net, -100.0)
    ema.synchronize()
    torch.testing.assert_close(ema.average["0.weight"], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_optimizer_waits_for_the_copies(device):
    def train(net: nn.Module, hidden: bool) -> EMA:
        optimizer = AdamW(net.parameters(), lr=0.1)
        ema = EMA(net, 0.5, optimizer if hidden else None)
        for _ in range(5):
            net(torch.ones(4, 6, device=device)).pow(2).sum().backward()
            optimizer.step()
            ema.update()
        return ema

    with_ema, without_ema = train(model().to(device), True).state_dict(), train(model().to(device), False).state_dict()
    assert all(torch.equal(with_ema[name], without_ema[name]) for name in without_ema)


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_update_changes_nothing(device):
    net = model().to(device)
    ema = EMA(net, 0.9)
    before = {name: t.clone() for name, t in ema.state_dict().items()}
    move(net, 1.0)
    skip = torch.tensor(True, device=device)
    ema.update(skip)
    skip.fill_(False)  # an update takes the flag of its call, even where it works later
    assert all(torch.equal(t, before[name]) for name, t in ema.state_dict().items())
    ema.update(skip)
    assert not torch.equal(ema.state_dict()["0.weight"], before["0.weight"])


def test_starts_from_the_weights():
    net = model()
    assert torch.equal(EMA(net, 0.9).state_dict()["2.bias"], net[2].bias)


def test_averages_bf16_weights_in_fp32():
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    ema = EMA(net, 0.999)
    start = ema.average["weight"].clone()
    with torch.no_grad():
        net.weight.add_(1.0)
    ema.update()
    moved = ema.average["weight"] - start
    assert 0 < moved.item() < 2e-3  # less than BF16 can tell apart near 1


def test_applied_puts_the_average_in():
    net = model()
    ema = EMA(net, 0.5)
    move(net, 1.0)
    with ema.applied(net):
        assert torch.equal(net[0].weight, ema.average["0.weight"])


def test_applied_gives_the_weights_back_bit_for_bit_after_an_error():
    net = model()
    ema = EMA(net, 0.5)
    move(net, 1.0)
    own = {name: p.detach().clone() for name, p in net.named_parameters()}
    with pytest.raises(RuntimeError, match="mat1 and mat2"), ema.applied(net):
        net(torch.ones(4, 7))
    assert all(torch.equal(p, own[name]) for name, p in net.named_parameters())


def test_copying_the_average_in_is_seen_by_caches_keyed_by_version():
    net = model()
    version = net[0].weight._version
    EMA(net, 0.5).copy_to(net)
    assert net[0].weight._version > version


def test_leaves_buffers_and_frozen_parameters_out():
    net = model()
    net[2].bias.requires_grad_(False)
    assert EMA(net, 0.5).average.keys() == {"0.weight", "0.bias", "1.weight", "1.bias", "2.weight"}


def test_resumes_bit_for_bit():
    net, resumed_net = model(), model()
    ema, resumed = EMA(net, 0.9), EMA(resumed_net, 0.9)
    move(net, 1.0)
    ema.update()
    resumed.load_state_dict(ema.state_dict())
    move(net, 1.0)
    ema.update()
    resumed_net.load_state_dict(net.state_dict())
    resumed.update()
    assert all(torch.equal(resumed.average[name], a) for name, a in ema.average.items())


def test_refuses_another_model():
    with pytest.raises(ValueError, match=r"differ in \['2.bias', '2.weight'\]"):
        EMA(model(), 0.5).copy_to(model()[:2])


def test_refuses_a_state_of_another_shape_and_keeps_its_own():
    ema = EMA(model(), 0.5)
    before = ema.average["0.weight"].clone()
    state = {**EMA(model(1), 0.5).state_dict(), "2.bias": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"2.bias must be \[3\], not \[4\]"):
        ema.load_state_dict(state)
    assert torch.equal(ema.average["0.weight"], before)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_refuses_a_decay_outside_zero_and_one(decay):
    with pytest.raises(ValueError, match="decay must be in"):
        EMA(model(), decay)
