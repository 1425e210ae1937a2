"""Layers that share the top-k keys of an earlier layer's indexer, as in GLM-5.2, in training."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaIndexer

from octile.checkpoint import load, save
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.flops import multiply_adds, train_flops_per_token
from octile.models.stages import split_stages
from octile.nn.fused.index_alignment import index_logits
from octile.nn.indexer import Indexer, IndexReader
from octile.nn.packed_texts import PackedTexts
from tests.models.conftest import MINI_V3, build

TOPK, LENGTH = 6, 24
SHARED = replace(
    MINI_V3,
    num_hidden_layers=5,
    index_n_heads=4,
    index_head_dim=16,
    index_topk=TOPK,
    indexer_rope_interleave=True,
    indexer_types=("full", "shared", "full", "shared", "shared"),
)
OWN = [0, 2, 5]  # the layers that have an indexer, with that of multi-token prediction
OF_TRANSFORMERS = replace(SHARED, num_nextn_predict_layers=0, aux_loss_alpha=0.0, rope_scaling=None)


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(97, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


def gradients(model: DeepseekV3) -> dict[str, Tensor]:
    """The gradients of a training step's loss, by name, and its parts."""
    model(tokens(), tokens()).backward()
    return {**{name: p.grad for name, p in model.named_parameters()}, **model.last_losses}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare by name, with an error that is small beside the largest number of each."""
    for name, exact in expected.items():
        assert (found[name].double() - exact).abs().amax() <= tolerance * exact.abs().amax(), name


def test_a_layer_that_shares_keys_has_no_indexer():
    names = {name for name, _ in build(SHARED).named_parameters() if ".indexer." in name}
    assert {int(name.split(".")[2]) for name in names} == {*OWN}
    assert len(names) == 5 * len(OWN)


def test_loss_and_gradients_are_those_of_transformers_in_float64(tmp_path, monkeypatch):
    """Of all weights but the indexers', with the keys that octile chooses: last bits of FP8 decide between some."""
    save(build(OF_TRANSFORMERS), tmp_path, "float32")
    ours, top_k = load(tmp_path), list[Tensor]()
    find = Indexer.top_k_keys
    monkeypatch.setattr(Indexer, "top_k_keys", lambda *args: top_k.append(find(*args)) or top_k[-1])
    found = gradients(ours.train())
    assert len(top_k) == 2
    how = {"dtype": torch.float64, "experts_implementation": "eager"}  # the others have no FP64
    theirs = GlmMoeDsaForCausalLM.from_pretrained(tmp_path, **how).train()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(ours.state_dict()[name])
    of_layer = dict(zip(OWN, top_k, strict=False))
    own_S1 = torch.arange(LENGTH, dtype=torch.int32)[:, None]

    def find_as_ours(indexer: GlmMoeDsaIndexer, *_: object, **__: object) -> Tensor:
        top_k_BSK = of_layer[indexer.layer_idx]
        return torch.where(top_k_BSK < 0, own_S1, top_k_BSK)

    monkeypatch.setattr(GlmMoeDsaIndexer, "forward", find_as_ours)
    loss = theirs(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    names = {"mlp.experts.gate_up_proj": "mlp.experts.gate_up", "mlp.experts.down_proj": "mlp.experts.down"}
    expected = {"main": loss.detach()}
    for name, parameter in theirs.named_parameters():
        ending = next((ending for ending in names if name.endswith(ending)), "")
        if ".indexer." not in name:
            expected[name.removesuffix(ending) + names.get(ending, "")] = parameter.grad
    missing = {name for name in found.keys() - expected.keys() if ".indexer." not in name}
    assert missing == {"mtp", "balance", "indexer"}
    assert_close(found, expected, 1e-4)


def aligned_with(model: DeepseekV3, monkeypatch) -> dict[int, list[tuple[Tensor, ...]]]:
    """What each indexer is aligned with in a forward pass: for its first layer the arguments of `align_top_k`."""
    calls = dict[int, list[tuple[Tensor, ...]]]()
    align, own = IndexReader.align_top_k, {id(model.model.layers[i].self_attn.indexer): i for i in OWN}

    def noting(reader: IndexReader, index, top_k_BSK, weights_BSK, o_BSHV):
        first = own.get(id(reader), max(calls, default=0))
        calls.setdefault(first, []).append((*index, top_k_BSK, weights_BSK))
        return align(reader, index, top_k_BSK, weights_BSK, o_BSHV)

    monkeypatch.setattr(IndexReader, "align_top_k", noting)
    return calls


def test_an_indexer_learns_the_mean_distribution_of_the_layers_that_read_its_keys(monkeypatch):
    """The gradient of IndexCache's averaged loss (arXiv 2603.12201 §3.2), by autograd in FP64 over all keys."""
    model = build(SHARED)
    calls = aligned_with(model, monkeypatch)
    loss = model(tokens(), tokens())
    assert {layer: len(readers) for layer, readers in calls.items()} == {0: 2, 2: 3, 5: 1}
    for layer, readers in calls.items():
        q, k, weights, top_k_BSK, _ = readers[0]
        assert all(torch.equal(other[3], top_k_BSK) for other in readers)
        assert len({float(other[4].norm()) for other in readers}) == len(readers)  # each has its own attention
        mean_BSK = torch.stack([p for *_, p in readers]).double().mean(0)
        is_key_BSK = top_k_BSK >= 0
        logits_BSK = index_logits(q.double(), k.double(), weights.double()).gather(-1, top_k_BSK.clamp(min=0).long())
        log_BSK = logits_BSK.masked_fill(~is_key_BSK, -torch.inf).log_softmax(-1).masked_fill(~is_key_BSK, 0.0)
        divergence = (torch.xlogy(mean_BSK, mean_BSK) - mean_BSK * log_BSK).sum() / mean_BSK[..., 0].numel()
        parameters = dict(model.model.layers[layer].self_attn.indexer.named_parameters())
        expected = torch.autograd.grad(divergence, parameters.values(), retain_graph=True)
        found = torch.autograd.grad(loss, parameters.values(), retain_graph=True)
        assert_close(dict(zip(parameters, found, strict=True)), dict(zip(parameters, expected, strict=True)), 1e-3)


def test_the_warm_up_trains_the_indexers_alone_on_the_dense_attention_of_all_layers():
    model = build(SHARED)
    model.warm_up_indexers(True)
    found = gradients(model)
    alone = build(SHARED)
    alone.warm_up_indexers(True)
    for reader in alone.index_readers():
        if not isinstance(reader, Indexer):
            reader.align = lambda index, q, *_: q
    of_own_layer = gradients(alone)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {
        name for name in found if ".indexer." in name
    }
    changed = {name for name in found if ".indexer." in name and not torch.equal(found[name], of_own_layer[name])}
    assert {int(name.split(".")[2]) for name in changed} == {0, 2}


@pytest.mark.one_case
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_the_same_under_activation_checkpointing(use_reentrant):
    def checkpointed(run: Callable[..., object], *args: object) -> object:
        return checkpoint(run, *args, use_reentrant=use_reentrant)

    expected, model = gradients(build(SHARED)), build(SHARED)
    for layer in model.model.layers:
        layer.forward = partial(checkpointed, layer.forward)
    assert_close(gradients(model), {name: value.double() for name, value in expected.items()}, 1e-6)


@pytest.mark.oldest_torch
@pytest.mark.exhaustive
def test_compiled_without_a_graph_break_the_model_has_the_gradients_of_eager_training():
    model = build(replace(SHARED, num_hidden_layers=2, indexer_types=("full", "shared"), num_nextn_predict_layers=0))
    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward, backend="aot_eager", fullgraph=True)
    assert_close(gradients(compiled), {name: value.double() for name, value in gradients(model).items()}, 1e-6)


@torch.no_grad()
def test_up_to_index_topk_tokens_attention_is_dense():
    sparse, dense = build(replace(SHARED, index_topk=LENGTH)).eval(), DeepseekV3(replace(MINI_V3, num_hidden_layers=5))
    dense.eval().load_state_dict({n: t for n, t in sparse.state_dict().items() if ".indexer." not in n})
    assert torch.equal(sparse(tokens()), dense(tokens()))


@torch.no_grad()
def test_evaluation_aligns_nothing():
    model = build(SHARED).eval()
    model(tokens())
    assert all(reader.alignment_loss is None for reader in model.index_readers())


def test_one_stage_has_the_loss_of_the_model_and_several_are_refused():
    model = build(SHARED)
    (stage,) = split_stages(model, 1)
    assert torch.equal(stage.loss(*stage(tokens()), tokens()), model(tokens(), tokens()))
    with pytest.raises(
        ValueError, match=r"stages must be 1 for a model with indexers, not 2: .* keys that layers share"
    ):
        split_stages(model, 2)


def test_packed_texts_are_refused():
    texts = PackedTexts(torch.zeros(2, LENGTH, dtype=torch.bool).index_fill(1, torch.tensor([0, 5]), True))
    with pytest.raises(ValueError, match="texts must be None where attention is sparse"):
        build(SHARED)(tokens(), texts=texts)


def test_a_layer_that_shares_keys_needs_those_of_an_earlier_one():
    model = build(SHARED)
    x, cos_sin = torch.randn(1, LENGTH, SHARED.hidden_size), model.rope.cos_sin(torch.arange(LENGTH))
    with pytest.raises(ValueError, match="found must be what an earlier layer's indexer has found"):
        model.model.layers[1](x, cos_sin)


def test_layers_that_share_keys_have_no_operations_of_an_indexer():
    keys, own = 1000, replace(SHARED, indexer_types=None)
    assert multiply_adds(SHARED, keys)["indexer"] * 5 == multiply_adds(own, keys)["indexer"] * 2
    assert train_flops_per_token(SHARED, keys) < train_flops_per_token(own, keys)
