import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from octile.nn.gate import Gate
from tests.nn.gates import V2, V2_LITE, V3, gate


def slow_gate(g, x):
    """One token at a time, with Python's own sort."""
    weights, chosen = [], []
    for token in x:
        logits = [float(token @ row) for row in g.weight.detach()]
        s = torch.tensor(logits).sigmoid() if g.scoring_func == "sigmoid" else torch.tensor(logits).softmax(0)
        score = s if g.e_score_correction_bias is None else s + g.e_score_correction_bias
        groups = list(score.view(g.n_group, -1))
        best = 2 if g.topk_method == "noaux_tc" else 1
        rank = sorted(range(g.n_group), key=lambda i: -float(groups[i].sort(descending=True).values[:best].sum()))
        size = len(score) // g.n_group
        allowed = (
            range(len(score))
            if g.topk_method == "greedy"
            else [e for e in range(len(score)) if e // size in rank[: g.topk_group]]
        )
        picked = sorted(allowed, key=lambda e: -float(score[e]))[: g.n_chosen]
        w = torch.stack([s[e] for e in picked])
        weights.append((w / w.sum() if g.norm_topk_prob else w) * g.routed_scaling_factor)
        chosen.append(picked)
    return torch.stack(weights), torch.tensor(chosen)


@pytest.mark.parametrize("settings", [V3, V2, V2_LITE, {**V3, "norm_topk_prob": False}], ids=str)
def test_gate_equals_a_slow_loop(settings):
    g, x = gate(**settings), torch.randn(40, 32)
    weights, experts = slow_gate(g, x)
    routing = g(x)
    assert torch.equal(routing.experts_TK, experts)
    torch.testing.assert_close(routing.weights_TK, weights)


@given(st.integers(0, 2**31))
def test_a_token_stays_within_its_groups(seed):
    experts_TK = gate(seed)(torch.randn(20, 32)).experts_TK
    assert all(len({int(e) // 4 for e in chosen}) <= 2 for chosen in experts_TK)


@given(st.integers(0, 2**31))
def test_normalized_weights_sum_to_the_scaling_factor(seed):
    weights_TK = gate(seed)(torch.randn(20, 32)).weights_TK
    torch.testing.assert_close(weights_TK.sum(-1), torch.full((20,), 2.5))


def test_the_bias_steers_the_choice_and_not_the_weights():
    g, x = gate(n_group=1, topk_group=1, norm_topk_prob=False), torch.randn(20, 32)
    g.e_score_correction_bias.zero_()
    g.e_score_correction_bias[3] = 10.0
    routing = g(x)
    assert (routing.experts_TK[:, 0] == 3).all()
    torch.testing.assert_close(routing.weights_TK[:, 0], (x @ g.weight[3]).sigmoid())


def test_forbidden_experts_are_masked_with_minus_infinity_and_not_zero():
    """Older transformers mask with 0: where biases make every allowed score negative, forbidden experts win."""
    g, x = gate(), torch.randn(20, 32)
    g.e_score_correction_bias.fill_(-2.0)
    score_TE = (x @ g.weight.T).sigmoid() - 2.0
    best_TG = score_TE.unflatten(1, (4, 4)).topk(2).values.sum(-1).topk(2).indices
    allowed_TE = torch.zeros(20, 4, dtype=torch.bool).scatter(1, best_TG, True).repeat_interleave(4, 1)
    zero_masked = score_TE.masked_fill(~allowed_TE, 0.0).topk(4).indices
    assert allowed_TE.gather(1, g(x).experts_TK).all()
    assert not allowed_TE.gather(1, zero_masked).any()


def test_the_gate_is_float32_under_autocast():
    g, x = gate(), torch.randn(20, 32)
    with torch.autocast("cpu", torch.bfloat16):
        routing = g(x)
    assert torch.equal(routing.weights_TK, g(x).weights_TK)


def test_the_gates_bias_stays_float32_in_a_bfloat16_model():
    g = gate()
    exact = g.e_score_correction_bias.clone()
    g.bfloat16()
    assert g.weight.dtype == torch.bfloat16
    assert torch.equal(g.e_score_correction_bias, exact)


@pytest.mark.parametrize("settings", [V2, V2_LITE], ids=str)
def test_a_v2_gate_has_no_bias_in_its_checkpoint(settings):
    assert list(gate(**settings).state_dict()) == ["weight"]


def test_balance_moves_each_bias_by_the_speed_toward_the_mean():
    g = gate()
    g.e_score_correction_bias.zero_()
    g.balance(torch.tensor([4] * 5 + [0] * 5 + [2] * 6), speed=0.001)
    assert g.e_score_correction_bias.tolist() == pytest.approx([-0.001] * 5 + [0.001] * 5 + [0.0] * 6)


@pytest.mark.slow
def test_balance_drives_a_skewed_gate_toward_even_loads():
    g, x = gate(), torch.randn(512, 32) + 1.5  # the offset makes some experts' affinity larger for every token
    g.e_score_correction_bias.zero_()

    def load():
        return g(x).experts_TK.flatten().bincount(minlength=16)

    before = load()
    for _ in range(400):
        g.balance(load(), speed=0.005)
    assert before.max() > 3 * before.float().mean()
    assert load().max() < 1.3 * load().float().mean()


def test_on_the_meta_device_it_has_shapes():
    assert gate().to("meta")(torch.empty(5, 32, device="meta")).weights_TK.shape == (5, gate().n_chosen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scoring_func": "sigmoidd"}, "scoring_func must be sigmoid or softmax, not 'sigmoidd'"),
        ({"topk_method": "nope"}, "topk_method must be noaux_tc or group_limited_greedy or greedy, not 'nope'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
        ({"n_experts": 0}, "n_experts must be at least 1, not 0"),
        ({"n_chosen": 0}, "n_chosen must be at least 1, not 0"),
        ({"n_chosen": 20}, "n_chosen must be at most n_experts, 16, not 20"),
        ({"n_chosen": 20, **V2_LITE}, "n_chosen must be at most n_experts, 16, not 20"),
        ({"n_chosen": 12, "n_group": 4, "topk_group": 2}, "n_chosen is 12, but topk_group allows 8"),
        ({"n_group": 0}, "n_group must be at least 1, not 0"),
        ({"n_group": 3}, "n_group must divide the 16 n_experts, not be 3"),
        ({"n_group": 16, "topk_group": 8}, "n_group must be at most 8, .* two of the 16 n_experts .* not 16"),
        ({"n_group": 4, "topk_group": 0}, "topk_group must be at least 1, not 0"),
        ({"n_group": 4, "topk_group": 5}, "topk_group must be at most n_group, 4, not 5"),
    ],
    ids=str,
)
def test_impossible_gate_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Gate(**{"hidden_size": 32, "n_experts": 16, "n_chosen": 4, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"n_chosen": 8, "n_group": 4, "topk_group": 2},  # all experts of its groups
        {"n_chosen": 16, "n_group": 4, "topk_group": 4},
        {"n_chosen": 16, "n_group": 4, "topk_method": "greedy"},  # which knows no groups
        {"n_chosen": 4, "n_group": 16, "topk_group": 16},  # groups of one expert, none of which is left out
        {"n_chosen": 4, "n_group": 16, "topk_group": 4, "topk_method": "group_limited_greedy"},
    ],
    ids=str,
)
def test_settings_at_the_edge_choose_different_experts(settings):
    experts_TK = Gate(32, 16, **settings)(torch.randn(20, 32)).experts_TK
    assert all(len(set(chosen)) == settings["n_chosen"] for chosen in experts_TK.tolist())


@given(st.integers(0, 2**31))
def test_the_balance_losses_gradient_is_that_of_autograd_in_float64(seed):
    g, x = gate(seed, scoring_func="sigmoid"), torch.randn(6, 32)
    leaf = (x @ g.weight.T).detach().double().requires_grad_()
    routing = g(x)
    (found,) = torch.autograd.grad(g.sequence_balance(routing, 2), routing.logits_TE)
    s_BSE = leaf.sigmoid().view(2, 3, 16)
    f_BE = F.one_hot(s_BSE.topk(4).indices, 16).sum((1, 2)) * 16 / (4 * 3)
    loss = (f_BE * (s_BSE / s_BSE.sum(-1, keepdim=True)).mean(1)).sum(1).mean()
    (expected,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("settings", [V3, V2, V2_LITE], ids=["V3", "V2", "V2-Lite"])
def test_the_balance_losses_gradient_can_be_differentiated_again(settings):
    g, x, results = gate(**settings), torch.randn(6, 32), []
    logits_TE = g(x).logits_TE.detach().requires_grad_()
    routing = g(x)._replace(logits_TE=logits_TE)

    def plain(logits_TE):
        s_TE = logits_TE.sigmoid() if g.scoring_func == "sigmoid" else logits_TE.softmax(-1)
        counted_TK = s_TE.topk(4).indices if g.topk_method == "noaux_tc" else routing.experts_TK
        f_BE = F.one_hot(counted_TK, 16).view(2, 12, 16).sum(1) * 16 / (4 * 3)
        return (f_BE * (s_TE / s_TE.sum(-1, keepdim=True)).view(2, 3, 16).mean(1)).sum(1).mean()

    for loss in (g.sequence_balance(routing, 2), plain(logits_TE)):
        (first,) = torch.autograd.grad(loss, logits_TE, create_graph=True)
        results.append([loss, first, *torch.autograd.grad(first.sin().sum(), logits_TE)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("settings", [V3, V2], ids=str)
def test_the_weights_of_a_bf16_input_are_not_rounded_to_bf16(settings):
    g, x = gate(**settings), torch.randn(20, 32).bfloat16()
    weights_TK = g(x).weights_TK
    assert weights_TK.dtype == torch.float32
    assert torch.equal(weights_TK, g(x.float()).weights_TK)
