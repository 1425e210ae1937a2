"""A model in stages: the same loss and gradients, the same names, every parameter in its place."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.models.stages import split_stages, with_stages
from octile.nn.rope import Rope
from octile.nn.tables import tables_once
from tests.models.conftest import MINI_V2, MINI_V3, build

EMBEDDING = "model.embed_tokens.weight"


def tokens() -> Tensor:
    return torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.one_case
@pytest.mark.parametrize("config", [MINI_V3, MINI_V2], ids=["v3", "v2"])
@pytest.mark.parametrize("given", [3, 1, 2, [range(2), range(2, 3), range(3, 3)]], ids=["3", "1", "2", "only a head"])
def test_loss_and_gradients_are_those_of_the_model_bit_for_bit(config, given):
    model, tokens_BS = build(config), tokens()
    expected = model(tokens_BS, tokens_BS)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    stages = split_stages(model, given)
    outputs: tuple[Tensor, ...] = (tokens_BS,)
    for stage in stages:
        outputs = stage(*outputs)
    loss = stages[-1].loss(*outputs, tokens_BS)
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(p.grad, q) for p, q in zip(model.parameters(), gradients, strict=True))
    assert stages[-1].last_losses["balance"] == model.last_losses["balance"]


def test_the_loss_in_evaluation_is_that_of_the_model():
    model, tokens_BS = build(MINI_V3).eval(), tokens()
    first, last = split_stages(model, 2)
    assert torch.equal(last.loss(*last(*first(tokens_BS)), tokens_BS), model(tokens_BS, tokens_BS))


def test_stages_and_their_loss_share_rotary_tables(monkeypatch: pytest.MonkeyPatch):
    tables, compute, tokens_BS = [], Rope.cos_sin, tokens()
    monkeypatch.setattr(Rope, "cos_sin", lambda *arguments: tables.append(compute(*arguments)) or tables[-1])
    first, last = split_stages(build(MINI_V3), 2)
    with tables_once():
        last.loss(*last(*first(tokens_BS)), tokens_BS)
    assert len(tables) == 1


def test_stages_have_the_parameters_of_the_model_under_their_names_and_share_the_embedding():
    model = build(MINI_V3)
    names = [dict(stage.named_parameters()) for stage in split_stages(model, 3)]
    assert {name: p for own in names for name, p in own.items()} == dict(model.named_parameters())
    assert [name for name in names[0] if name in names[2]] == [EMBEDDING]
    assert not names[1].keys() & (names[0].keys() | names[2].keys())


@pytest.mark.parametrize(
    ("n_layers", "counts"), [(8, [2, 2, 2, 2]), (9, [2, 3, 2, 2]), (11, [3, 3, 3, 2]), (4, [1, 1, 1, 1])]
)
def test_layers_are_divided_evenly_with_fewer_at_the_ends(n_layers: int, counts: list[int]):
    stages = split_stages(build(replace(MINI_V3, num_hidden_layers=n_layers)), 4)
    assert [len(stage.layers) for stage in stages] == counts


@pytest.mark.parametrize("n_stages", [0, 4])
def test_more_stages_than_layers_are_refused(n_stages: int):
    with pytest.raises(ValueError, match=f"n_stages must be from 1 to the model's 3 layers, not {n_stages}"):
        split_stages(build(MINI_V3), n_stages)


@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (0, 2)])
def test_a_model_with_some_stages_has_their_parameters_and_no_others(stages: tuple[int, ...]):
    model = build(replace(MINI_V3, num_hidden_layers=3), seed=0)
    whole = split_stages(model, 3)
    expected = {name: p for stage in stages for name, p in whole[stage].named_parameters()}
    own = with_stages(model, 3, stages)
    assert dict(own.named_parameters()) == expected
    for stage in stages:
        found = dict(split_stages(own, 3)[stage].named_parameters())
        assert found == dict(whole[stage].named_parameters())


def test_layers_that_are_named_are_those_of_the_stages():
    model = build(replace(MINI_V3, num_hidden_layers=4))
    assert [stage.layers for stage in split_stages(model, [range(3), range(3, 4)])] == [range(3), range(3, 4)]
    with pytest.raises(ValueError, match="4 layers in order, all but the last at least one, not 0 to 2, 2 to 3"):
        split_stages(model, [range(3), range(2, 4)])
