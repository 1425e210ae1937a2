import copy
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octile.models import deepseek_v3
from octile.models.config import PRESETS
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import convert
from octile.nn.moe import share_of_experts
from octile.nn.packed_texts import PackedTexts, TextStatistics
from octile.recipe import Recipe
from tests.models.conftest import MINI_V2, MINI_V3, build
from tests.train.conftest import MICRO


def tokens(batch=2, length=24, seed=0):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


def cross_entropy(logits, labels, ahead):
    """The mean over all predictions, one at a time."""
    losses = [
        -logits[b, t].log_softmax(-1)[labels[b, t + ahead]]
        for b in range(len(labels))
        for t in range(labels.shape[1] - ahead)
        if labels[b, t + ahead] != -100
    ]
    return torch.stack(losses).mean()


def slow_mtp_logits(model, tokens_BS):
    """MTP by the paper's figure: the embedding and hidden state of each position, concatenated, then one block."""
    hidden = {}
    model.model.norm.register_forward_hook(lambda _, __, output: hidden.update(h=output))
    model(tokens_BS)
    mtp, d = model.model.layers[-1], model.config.hidden_size
    from_emb, from_h = mtp.eh_proj.weight[:, :d], mtp.eh_proj.weight[:, d:]
    columns = []
    for t in range(tokens_BS.shape[1] - 1):
        emb = mtp.enorm(model.model.embed_tokens(tokens_BS[:, t + 1]))
        columns.append(emb @ from_emb.T + mtp.hnorm(hidden["h"][:, t]) @ from_h.T)
    x = torch.stack(columns, dim=1)
    cos_sin = model.rope.cos_sin(torch.arange(x.shape[1]))
    x = x + mtp.self_attn(mtp.input_layernorm(x), cos_sin)
    x = x + mtp.mlp(mtp.post_attention_layernorm(x))
    return model.lm_head(mtp.shared_head["norm"](x))


# the loss


def test_loss_outside_training_is_the_next_tokens_cross_entropy(mini):
    t = tokens()
    expected = cross_entropy(mini.eval()(t), t, 1)
    torch.testing.assert_close(mini(t, t), expected)


def test_a_label_of_minus_100_is_not_predicted(mini):
    t = tokens()
    labels = t.clone()
    labels[0, 5:] = -100
    torch.testing.assert_close(mini.eval()(t, labels), cross_entropy(mini(t), labels, 1))


def test_mtp_loss_equals_a_slow_reference(mini):
    t = tokens()
    mini(t, t)
    expected = cross_entropy(slow_mtp_logits(mini, t), t, 2)
    torch.testing.assert_close(mini.last_losses["mtp"], expected.detach())


def test_training_loss_is_the_weighted_sum_of_its_parts(mini):
    t = tokens()
    loss, parts = mini(t, t), mini.last_losses
    torch.testing.assert_close(loss, parts["main"] + 0.3 * parts["mtp"] + parts["balance"])


def test_balance_loss_is_the_sum_over_every_mixture(mini):
    mini(tokens(), tokens())
    one_layer = MINI_V3.aux_loss_alpha  # what even use costs
    assert len(mini.moe_layers()) == 3
    assert 3 * one_layer < mini.last_losses["balance"] < 6 * one_layer


def test_every_parameter_gets_a_gradient(mini):
    mini(tokens(), tokens()).backward()
    missing = [name for name, p in mini.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    assert not missing


@pytest.mark.slow
@pytest.mark.parametrize("config", [MINI_V3, MINI_V2], ids=["V3", "V2"])
def test_training_lowers_the_loss(config):
    torch.manual_seed(0)
    model = DeepseekV3(replace(config, initializer_range=0.05))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    t, losses = tokens(batch=4), []
    for _ in range(30):
        loss = model(t, t)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_model_can_be_copied_after_a_training_pass(mini):
    mini(tokens(), tokens())
    mini(tokens())
    assert torch.equal(copy.deepcopy(mini).eval()(tokens()), mini.eval()(tokens()))


def test_bfloat16_autocast_stays_close(mini):
    t = tokens()
    expected = mini(t, t)
    with torch.autocast("cpu", torch.bfloat16):
        actual = mini(t, t)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=0)


# compiled


def loss_and_gradients(call, model):
    """A training pass with its loss: what it returns and what it leaves in the model, by name."""
    t = tokens()
    loss = call(t, t)  # without autocast, as a CPU trains: with it the compiler rounds BF16 gradients elsewhere
    loss.backward()
    left = {name: moe.last_load_E for name, moe in model.moe_layers().items()}
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **model.last_losses, **left, **gradients}


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe.bf16(), id="bf16", marks=pytest.mark.exhaustive),
        pytest.param(Recipe.deepseek_v3(), id="deepseek_v3"),
    ],
)
def test_compiled_without_a_graph_break_the_whole_model_computes_the_same(recipe):
    model = build(replace(MICRO, num_hidden_layers=1))  # a dense block; that of multi-token prediction has experts
    convert(model, recipe)
    copied = copy.deepcopy(model)
    found = loss_and_gradients(torch.compile(copied, fullgraph=True, backend="aot_eager"), copied)
    expected = loss_and_gradients(model, model)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# drafts


@torch.no_grad()
def test_a_draft_equals_the_slow_reference(mini):
    t = tokens()
    main, drafts = mini.with_drafts(t)
    torch.testing.assert_close(main, mini(t))
    torch.testing.assert_close(drafts, slow_mtp_logits(mini, t))


def test_drafts_leave_no_balance_loss_behind(mini):
    t = tokens()
    mini.train().with_drafts(t)
    mini.eval()(t, t)
    assert mini.last_losses["balance"] == 0


def test_a_model_without_multi_token_prediction_drafts_nothing():
    with pytest.raises(ValueError, match="the model has no multi-token prediction"):
        build(replace(MINI_V3, num_nextn_predict_layers=0)).with_drafts(tokens())


def test_drafts_need_two_tokens(mini):
    with pytest.raises(ValueError, match=r"tokens must be .* of two tokens or more, not \[2, 1\]"):
        mini.with_drafts(tokens(length=1))


# refusals


@pytest.mark.parametrize("shape", [(24,), (2, 0), (1, 2, 3)])
def test_tokens_must_be_a_batch_of_sequences(mini, shape):
    with pytest.raises(ValueError, match=r"tokens must be \[batch, sequence\]"):
        mini(torch.zeros(shape, dtype=torch.int64))


def test_more_tokens_than_the_context_are_refused(mini):
    with pytest.raises(ValueError, match="65 tokens are more than the model's max_position_embeddings, 64"):
        mini(tokens(length=65))


@pytest.mark.parametrize(
    ("wrong", "given"),
    [([[1, 2]], "a list"), (torch.ones(2, 24), r"torch\.float32"), (tokens().int(), r"torch\.int32")],
)
def test_tokens_and_labels_of_another_type_are_refused(mini, wrong, given):
    with pytest.raises(TypeError, match=f"tokens must be a tensor of int64, not {given}"):
        mini(wrong)
    with pytest.raises(TypeError, match=f"labels must be a tensor of int64, not {given}"):
        mini(tokens(), wrong)


def test_labels_of_another_shape_are_refused(mini):
    with pytest.raises(ValueError, match=r"labels must have the tokens' shape \[2, 24\]"):
        mini(tokens(), tokens(length=23))


@pytest.mark.parametrize(("training", "shortest"), [(True, 3), (False, 2)], ids=["with MTP", "without"])
def test_sequences_too_short_for_a_loss_are_refused(mini, training, shortest):
    mini.train(training)
    with pytest.raises(ValueError, match=f"a loss needs sequences of at least {shortest} tokens, not {shortest - 1}"):
        mini(tokens(length=shortest - 1), tokens(length=shortest - 1))
    assert mini(tokens(length=shortest), tokens(length=shortest)).isfinite()


# initialization


def test_weights_begin_with_the_configured_deviation():
    config = PRESETS["tiny"]()
    torch.manual_seed(0)
    model = DeepseekV3(config)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            assert (p == 1).all(), name
        else:
            assert p.std().item() == pytest.approx(config.initializer_range, rel=0.1), name


def test_the_same_seed_gives_the_same_model():
    a, b = build(MINI_V3, seed=3), build(MINI_V3, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize(("rank", "n_ranks"), [(0, 2), (1, 2), (3, 4)])
def test_the_share_of_a_rank_has_the_bits_of_the_whole_model(rank, n_ranks):
    models = []
    for share in (nullcontext(), share_of_experts(rank, n_ranks)):
        torch.manual_seed(3)
        with share:
            models.append(DeepseekV3(MINI_V3))
    whole, own = (dict(model.named_parameters()) for model in models)
    after = torch.rand(())
    assert whole.keys() == own.keys()
    for name, weight in whole.items():
        cut = weight.chunk(n_ranks)[rank] if ".experts." in name and "shared" not in name else weight
        assert torch.equal(own[name], cut), name
    torch.manual_seed(3)
    DeepseekV3(MINI_V3)
    assert torch.equal(torch.rand(()), after)  # what is drawn afterwards is the same, too


def test_a_share_allocates_one_stacked_weight_of_all_experts_at_a_time():
    class Allocated(TorchDispatchMode):
        """The largest number of elements of tensors of all experts that live at the same time."""

        largest, alive = 0, []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dim() == 3 and len(result) == MINI_V3.n_routed_experts:
                self.alive.append(weakref.ref(result))
            self.alive[:] = [tensor for tensor in self.alive if tensor() is not None]
            self.largest = max(self.largest, len({tensor().data_ptr() for tensor in self.alive}))
            return result

    with Allocated() as allocated, share_of_experts(0, 2):
        DeepseekV3(MINI_V3)
    assert allocated.largest == 1


def test_experts_that_the_ranks_do_not_divide_are_refused():
    with share_of_experts(0, 3), pytest.raises(ValueError, match="must be a multiple of the 3 ranks, not 4"):
        DeepseekV3(MICRO)


# sparse attention

SPARSE = replace(MINI_V3, index_n_heads=4, index_head_dim=16, index_topk=6)


def test_every_layer_and_multi_token_prediction_has_an_indexer():
    assert len(build(SPARSE).indexers()) == SPARSE.num_hidden_layers + 1
    assert build(MINI_V3).indexers() == []


@torch.no_grad()
def test_an_indexer_that_chooses_every_token_changes_nothing():
    sparse = build(replace(SPARSE, index_topk=24)).eval()
    dense = DeepseekV3(MINI_V3).eval()
    dense.load_state_dict({n: t for n, t in sparse.state_dict().items() if ".indexer." not in n})
    assert torch.equal(sparse(tokens()), dense(tokens()))
    assert torch.equal(sparse(tokens(), tokens()), dense(tokens(), tokens()))


@torch.no_grad()
def test_an_indexer_that_chooses_few_tokens_changes_the_later_logits_alone():
    model = build(SPARSE).eval()
    sparse = model(tokens())
    for indexer in model.indexers():
        indexer.topk = 24
    dense = model(tokens())
    torch.testing.assert_close(sparse[:, :6], dense[:, :6])
    assert (sparse[:, 12:] - dense[:, 12:]).abs().amax() > 0.1


def test_the_indexers_loss_is_part_of_the_loss_in_training():
    model = build(SPARSE)
    loss = model(tokens(), tokens())
    parts = model.last_losses
    assert parts["indexer"] > 0
    expected = parts["main"] + SPARSE.mtp_loss_weight * parts["mtp"] + parts["balance"] + parts["indexer"]
    torch.testing.assert_close(loss.detach(), expected)
    model.eval()(tokens(), tokens())
    assert model.last_losses["indexer"] == 0


def test_the_model_learns_from_its_own_losses_alone():
    def gradients(model) -> dict[str, torch.Tensor | None]:
        model(tokens(), tokens()).backward()
        return {name: p.grad for name, p in model.named_parameters() if ".indexer." not in name}

    without_alignment = build(SPARSE)
    for indexer in without_alignment.indexers():
        indexer.align = lambda index, q, *_: q
    expected = gradients(without_alignment)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(build(SPARSE)).items())


def test_the_warm_up_trains_the_indexers_alone_on_dense_attention():
    model = build(SPARSE)
    dense = DeepseekV3(MINI_V3)
    dense.load_state_dict({n: t for n, t in model.state_dict().items() if ".indexer." not in n})
    model.warm_up_indexers(True)
    model(tokens(), tokens()).backward()
    dense(tokens(), tokens())
    torch.testing.assert_close(model.last_losses["main"], dense.last_losses["main"])
    assert all((p.grad is not None) == (".indexer." in name) for name, p in model.named_parameters())
    model.warm_up_indexers(False)
    assert all(p.requires_grad for p in model.parameters())


@torch.no_grad()
def test_the_warm_up_is_evaluated_with_sparse_attention():
    model = build(SPARSE).eval()
    sparse = model(tokens())
    model.warm_up_indexers(True)
    assert torch.equal(model(tokens()), sparse)


def test_a_model_without_indexers_has_no_warm_up():
    with pytest.raises(ValueError, match="the model has no indexer: index_n_heads"):
        build(MINI_V3).warm_up_indexers(True)


def test_the_log_probability_of_a_certain_token_has_the_sign_of_the_engine(monkeypatch: pytest.MonkeyPatch):
    """A loss of 0, of which −0 is the negative, has other bits than the difference of a logit and an equal sum."""
    monkeypatch.setattr(deepseek_v3, "cross_entropies", lambda _, labels: torch.zeros(labels.shape))
    log_probs = build(MINI_V3).log_probs(tokens())
    assert not log_probs.any()
    assert not log_probs.signbit().any()


# several texts in a sequence

LENGTHS = ((9, 1, 14), (24,))  # of the texts of each sequence


def packed() -> PackedTexts:
    is_first = torch.zeros(2, 24, dtype=torch.bool)
    is_first[0, [0, 9, 10]] = True
    return PackedTexts(is_first, TextStatistics(3, 12))


def each_text(t):
    return [text[None] for row, lengths in zip(t, LENGTHS, strict=True) for text in row.split(lengths)]


@torch.no_grad()
@pytest.mark.parametrize("recipe", [None, "deepseek_v3"])
def test_packed_texts_have_the_logits_that_they_have_alone(recipe):
    model, t = build(MINI_V3), tokens()
    if recipe is not None:
        convert(model, Recipe.named(recipe))
    main, drafts = model.eval().with_drafts(t, packed())
    found = [part for row, lengths in zip(main, LENGTHS, strict=True) for part in row.split(lengths)]
    for ours, text in zip(found, each_text(t), strict=True):
        torch.testing.assert_close(ours[None], model(text), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(drafts[0, 10:], model.with_drafts(t[:1, 10:])[1][0], rtol=1e-5, atol=1e-5)


def packed_loss(model, t):
    return model(t, t, packed())


def loss_of_each(model, t):
    """The same sum, of one text at a time: a text of n tokens has n − 1 labels, and n − 2 of the tokens after them."""
    main, mtp = [], []
    for text in [text for text in each_text(t) if text.shape[1] > 2]:
        model(text, text)
        n = text.shape[1]
        main.append(model.last_losses["main"] * (n - 1))
        mtp.append(model.last_losses["mtp"] * (n - 2))
    return sum(main) / (8 + 13 + 23), sum(mtp) / (7 + 12 + 22)


def test_the_loss_of_packed_texts_is_the_mean_over_their_own_labels(mini):
    t = tokens()
    packed_loss(mini, t)
    ours = mini.last_losses
    main, mtp = loss_of_each(mini, t)
    torch.testing.assert_close(ours["main"], main)
    torch.testing.assert_close(ours["mtp"], mtp)


def test_a_text_gets_no_gradient_from_its_neighbors(mini):
    t = tokens(batch=1)
    labels = t.clone()
    labels[:, 9:] = -100  # the second and third text have no loss
    texts = PackedTexts(packed().is_first_BS[:1])
    mini.eval()(t, labels, texts).backward()
    others = [token for token in t[0, 9:].tolist() if token not in t[0, :9]]
    assert not mini.model.embed_tokens.weight.grad[others].any()
    assert mini.model.embed_tokens.weight.grad[t[0, :8]].any()


def test_given_numbers_of_labels_divide_the_sums(mini):
    t = tokens()
    packed_loss(mini, t)
    means, counts = mini.last_losses, packed().count_labels(t)
    mini(t, t, packed(), torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(mini.last_losses["main"], means["main"] * counts[0] / 10)
    torch.testing.assert_close(mini.last_losses["mtp"], means["mtp"] * counts[1] / 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda: convert(DeepseekV3(replace(MICRO, moe_intermediate_size=128)), Recipe.exact()),
            "attention is that of serving",
        ),
        (lambda: DeepseekV3(replace(MICRO, index_n_heads=2, index_head_dim=32, index_topk=4)), "attention is sparse"),
    ],
    ids=["exact", "sparse"],
)
def test_attention_that_does_not_know_the_borders_of_texts_is_refused(change, message):
    with pytest.raises(ValueError, match=f"texts must be None where {message}"):
        change()(tokens(), None, packed())


def test_texts_of_another_shape_are_refused(mini):
    with pytest.raises(ValueError, match=r"texts must have the tokens' shape \[2, 24\], not \[2, 23\]"):
        mini(tokens(), None, packed().without_last())
