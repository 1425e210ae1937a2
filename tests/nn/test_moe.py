import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from octile.nn.conversion import apply_recipe
from octile.nn.delayed_scaling import OPERANDS
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.functional import grouped_linear
from octile.nn.moe import Experts, MoE, _smooth
from octile.recipe import Recipe
from tests.nn.gates import V2, V2_LITE, V3, gate


def moe(seed=0, **settings):
    built = MoE(gate(seed, **settings), 32, 24, 48, alpha=1e-2)
    for parameter in (built.experts.gate_up, built.experts.down):
        torch.nn.init.normal_(parameter, std=0.2)
    return built


def slow_moe(m, x_BSD):
    """Every token through each of its experts, by a loop."""
    x_TD = x_BSD.flatten(0, 1)
    routing = m.gate(x_TD)
    out = []
    for token, weights, experts in zip(x_TD, routing.weights_TK, routing.experts_TK, strict=True):
        y = m.shared_experts(token[None])[0]
        for w, e in zip(weights, experts, strict=True):
            h_gate, h_up = (m.experts.gate_up[e] @ token).chunk(2)
            y = y + w * (m.experts.down[e] @ (F.silu(h_gate) * h_up))
        out.append(y)
    return torch.stack(out).view_as(x_BSD)


@pytest.mark.parametrize("settings", [V3, V2, V2_LITE], ids=str)
def test_moe_equals_a_slow_loop(settings):
    m, x = moe(**settings), torch.randn(2, 9, 32)
    torch.testing.assert_close(m(x), slow_moe(m, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 64}, "hidden_size must be the gate's, 32, not 64"),
        ({"intermediate_size": 0}, "intermediate_size must be at least 1, not 0"),
        ({"shared_intermediate_size": -1}, "shared_intermediate_size must be at least 0, not -1"),
        ({"alpha": -0.1}, "alpha must be at least 0, not -0.1"),
        ({"alpha": float("nan")}, "alpha must be at least 0, not nan"),
    ],
    ids=str,
)
def test_an_impossible_mixture_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MoE(gate(), **{"hidden_size": 32, "intermediate_size": 24, **settings})


@pytest.mark.parametrize("shape", [(9, 32), (2, 9, 64), (32,)], ids=str)
def test_an_input_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=rf"x must be \[batch, sequence, 32\], not \({shape[0]},"):
        moe()(torch.randn(*shape))


def test_moe_gradients_equal_a_slow_loops():
    fast, slow, x = moe(), moe(), torch.randn(2, 9, 32)
    fast(x).square().sum().backward()
    slow_moe(slow, x).square().sum().backward()
    for (name, p), q in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_the_inputs_gradient_equals_a_slow_loops():
    m, x = moe(), torch.randn(2, 9, 32)
    (fast,) = torch.autograd.grad(m(leaf := x.clone().requires_grad_()).square().sum(), leaf)
    (slow,) = torch.autograd.grad(slow_moe(m, leaf := x.clone().requires_grad_()).square().sum(), leaf)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_no_token_is_dropped_when_all_choose_the_same_experts():
    m, x = moe(n_group=1, topk_group=1), torch.randn(2, 9, 32)
    m.gate.e_score_correction_bias[:4] = 10.0
    y = m(x)
    assert m.last_load_E.tolist() == [18] * 4 + [0] * 12
    torch.testing.assert_close(y, slow_moe(m, x), rtol=1e-5, atol=1e-5)


def test_an_expert_without_tokens_gets_a_gradient_of_zeros():
    m = moe(n_group=1, topk_group=1)
    m.gate.e_score_correction_bias[:4] = 10.0
    m(torch.randn(2, 9, 32)).square().sum().backward()
    for weight in (m.experts.gate_up, m.experts.down):
        assert (weight.grad[4:] == 0).all()
        assert (weight.grad[:4].flatten(1).abs().sum(1) > 0).all()


@pytest.mark.slow
@given(st.integers(0, 2**31))
def test_the_order_of_the_tokens_does_not_matter(seed):
    m, x = moe(seed), torch.randn(1, 12, 32)
    order = torch.randperm(12)
    torch.testing.assert_close(m(x[:, order]), m(x)[:, order], rtol=1e-5, atol=1e-5)


def test_the_order_of_the_experts_does_not_matter():
    m, x = moe(n_group=1, topk_group=1), torch.randn(2, 9, 32)
    y, order = m(x), torch.randperm(16)
    for tensor in (m.gate.weight, m.gate.e_score_correction_bias, m.experts.gate_up, m.experts.down):
        tensor.data = tensor.data[order]
    torch.testing.assert_close(m(x), y, rtol=1e-5, atol=1e-5)


def test_last_load_counts_every_choice_of_the_last_training_pass():
    m, x = moe(), torch.randn(2, 9, 32)
    m(x)
    m.eval()(torch.randn(5, 5, 32))
    expected = m.gate(x.flatten(0, 1)).experts_TK.flatten().bincount(minlength=16)
    assert torch.equal(m.last_load_E, expected)


def test_nothing_is_read_back_to_the_host():
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):  # a fake tensor has no value: reading one raises
        m = moe()
        m(torch.randn(2, 9, 32)).sum().backward()
        m.gate.balance(m.last_load_E, 0.001)


def test_smoothing_moves_each_experts_channel_sizes_into_its_weight():
    experts, offs = Experts(3, 8, 8), torch.tensor([4, 4, 9], dtype=torch.int32)
    h = torch.randn(9, 8) * torch.tensor([1e-3, 1, 10, 1e3, 5, 7, 1e-9, 0])
    smooth_h, smooth_down = _smooth(h, experts.down, offs)
    for rows in (smooth_h[:4], smooth_h[4:]):
        assert (rows.abs().amax(0)[:-1] > 0.5).all()
    assert (smooth_h.abs() <= 1).all()
    expected = grouped_linear(h, experts.down, offs)
    torch.testing.assert_close(grouped_linear(smooth_h, smooth_down, offs), expected, rtol=1e-6, atol=1e-6)


def test_smoothing_leaves_rows_of_no_expert_zero():
    experts, offs = Experts(2, 8, 8), torch.tensor([4, 6], dtype=torch.int32)
    h = torch.randn(9, 8) * 100
    found = grouped_linear(*_smooth(h, experts.down, offs), offs)
    torch.testing.assert_close(found, grouped_linear(h, experts.down, offs), rtol=1e-6, atol=1e-6)
    assert not found[6:].any()


def test_smoothed_experts_accumulate_the_same_gradient_in_main_grad():
    experts, x, offs = Experts(2, 8, 8), torch.randn(6, 8), torch.tensor([4, 6], dtype=torch.int32)
    experts.use_recipe(Recipe.smooth_swiglu())
    experts.eval()
    experts(x, offs).square().sum().backward()
    expected, experts.down.grad = experts.down.grad, None
    experts.down.main_grad = torch.ones_like(experts.down)
    experts(x, offs).square().sum().backward()
    assert experts.down.grad is None
    assert torch.equal(experts.down.main_grad, 1 + expected)


def test_past_steps_do_not_matter_to_the_scale_of_smoothed_experts():
    experts, x, offs = Experts(2, 32, 48), torch.randn(64, 32), torch.tensor([40, 64], dtype=torch.int32)
    experts.use_recipe(Recipe.smooth_swiglu())
    expected = experts(x, offs)
    experts.use_recipe(Recipe.smooth_swiglu())
    experts.down_history.amax_OH[OPERANDS.index("w"), 1:] = 1e-6
    assert torch.equal(experts(x, offs), expected)


# combination


class Observed(LocalDispatcher):
    """A dispatcher that notes the weights with which it combines."""

    weights_TK: torch.Tensor

    def combine(self, y_RD, weights_TK, *arguments):
        self.weights_TK = weights_TK
        return super().combine(y_RD, weights_TK, *arguments)


@pytest.mark.parametrize("recipe", [None, "bf16", "deepseek_v3"])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_weights_of_experts_results_are_not_rounded_to_bf16(recipe, autocast):
    m = moe() if recipe is None else apply_recipe(moe(), Recipe.named(recipe))
    m.dispatcher, x = Observed(), torch.randn(2, 5, 32)
    if not autocast:
        m, x = m.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        m(x)
        expected = m.gate(x.flatten(0, 1)).weights_TK
    assert expected.dtype == torch.float32
    assert torch.equal(m.dispatcher.weights_TK, expected)


@pytest.mark.parametrize("added", [False, True])
def test_a_tokens_results_are_summed_in_float32_and_rounded_once(added):
    dispatcher, experts_TK = LocalDispatcher(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    plan, weights_TK = dispatcher.plan(experts_TK, torch.tensor([2, 2, 2])), torch.rand(3, 2)
    y_RD, add = torch.randn(6, 32).bfloat16(), torch.randn(3, 32).bfloat16() if added else None
    total = torch.zeros(3, 32) if add is None else add.float()
    for k in range(2):
        total = total + y_RD[plan.row_ids_TK[:, k]].float() * weights_TK[:, k, None]
    assert torch.equal(dispatcher.combine(y_RD, weights_TK, plan, add), total.bfloat16())


def test_gradients_of_a_combination_equal_autograd():
    dispatcher, experts_TK = LocalDispatcher(), torch.tensor([[0, 1], [1, 2], [2, 0]])
    plan = dispatcher.plan(experts_TK, torch.tensor([2, 2, 2]))
    inputs = [torch.randn(6, 32), torch.rand(3, 2), torch.randn(3, 32)]
    y_RD, weights_TK, add = (t.requires_grad_() for t in inputs)
    expected = (y_RD[plan.row_ids_TK] * weights_TK[..., None]).sum(1) + add
    found = dispatcher.combine(y_RD, weights_TK, plan, add)
    dy = torch.randn(3, 32)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_shared_experts_of_another_dtype_or_shape_are_added_as_torch_does():
    m, x = moe(), torch.randn(2, 9, 32)
    expected = m(x) - m.shared_experts(x)
    m.shared_experts = torch.nn.Identity()
    m.shared_experts.forward = lambda x: torch.ones(32, dtype=torch.float64)
    assert m(x).dtype == torch.float64
    torch.testing.assert_close(m(x).float(), expected + 1)


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(V3, id="V3"),
        *(pytest.param(how, id=name, marks=pytest.mark.exhaustive) for name, how in (("V2", V2), ("V2-Lite", V2_LITE))),
    ],
)
def test_a_compiled_mixture_computes_the_same_in_one_graph(settings):
    m, x, results = moe(**settings), torch.randn(2, 9, 32, requires_grad=True), []
    for call in (m, torch.compile(m, fullgraph=True, backend="aot_eager")):
        y, loss = call(x), m.pop_balance_loss()
        results.append([y, loss, *torch.autograd.grad(y.square().sum() + loss, [x, m.gate.weight])])
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


# the balance loss


def paper_balance(logits_BSE, k, scoring_func, top_k_BSK=None):
    """Equations 17 to 20 of DeepSeek-V3 in FP64, by loops; `top_k_BSK` replaces the top K of the affinities."""
    logits_BSE = logits_BSE.detach().double()
    s_BSE = logits_BSE.sigmoid() if scoring_func == "sigmoid" else logits_BSE.softmax(-1)
    batch, length, n_experts = s_BSE.shape
    total = 0.0
    for sequence in range(batch):
        for i in range(n_experts):
            f = p = 0.0
            for t in range(length):
                s = s_BSE[sequence, t].tolist()
                top = sorted(range(n_experts), key=lambda j: -s[j])[:k]
                f += i in (top if top_k_BSK is None else top_k_BSK[sequence, t].tolist())
                p += s[i] / sum(s)
            total += n_experts / (k * length) * f * p / length
    return total / batch


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 7))
def test_v3s_balance_loss_counts_the_top_k_of_the_unbiased_affinities(seed, batch, length):
    m, x = moe(seed), torch.randn(batch, length, 32)
    m(x)
    expected = paper_balance(x @ m.gate.weight.T, 4, "sigmoid")
    assert m.pop_balance_loss().item() == pytest.approx(1e-2 * expected, rel=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("settings", [V2, V2_LITE], ids=["V2", "V2-Lite"])
@given(seed=st.integers(0, 2**31), batch=st.integers(1, 3), length=st.integers(1, 7))
def test_v2s_balance_loss_counts_the_experts_that_tokens_go_to(settings, seed, batch, length):
    m, x = moe(seed, **settings), torch.randn(batch, length, 32)
    m(x)
    top_k_BSK = m.gate(x.flatten(0, 1)).experts_TK.view(batch, length, -1)
    expected = paper_balance(x @ m.gate.weight.T, 4, "softmax", top_k_BSK)
    assert m.pop_balance_loss().item() == pytest.approx(1e-2 * expected, rel=1e-5)


def test_the_bias_does_not_change_the_balance_loss():
    m, x = moe(), torch.randn(2, 9, 32)
    m(x)
    loss = m.pop_balance_loss()
    m.gate.e_score_correction_bias[:4] = 10.0
    m(x)
    assert torch.equal(m.pop_balance_loss(), loss)


def test_balance_loss_of_even_use_is_one():
    m = moe()
    with torch.no_grad():
        m.gate.weight.copy_(torch.eye(16).repeat_interleave(2, 1))
    x_SD = sum(torch.eye(16).roll(shift, 1) for shift in range(4)).repeat_interleave(2, 1)  # each expert 4 times
    m(x_SD.expand(3, 16, 32))
    assert m.pop_balance_loss().item() == pytest.approx(m.alpha)


@pytest.mark.parametrize("size", [20.0, 110.0, 700.0])
def test_the_balance_loss_is_right_where_sigmoids_underflow(size):
    """The sigmoid of −110 is 0 in FP32; in FP64 that of −700 is not."""
    m, x = moe(), torch.randn(2, 5, 32)
    x[..., 0] = 1.0
    with torch.no_grad():
        m.gate.weight[:, 0] -= size
    m(x)
    expected = paper_balance(x @ m.gate.weight.T, 4, "sigmoid")
    assert m.pop_balance_loss().item() == pytest.approx(1e-2 * expected, rel=1e-4)


@pytest.mark.parametrize("size", [-1000.0, -110.0, 0.0, 110.0, 1000.0])
def test_the_balance_losses_gradients_are_finite_for_logits_of_any_size(size):
    m, x = moe(), torch.randn(2, 5, 32)
    x[0, :3, 0] = 1.0
    with torch.no_grad():
        m.gate.weight[:, 0] = size
    m(x)
    loss = m.pop_balance_loss()
    loss.backward()
    assert loss.isfinite()
    assert m.gate.weight.grad.isfinite().all()
    assert m.gate.weight.grad.any()


def test_without_a_weight_there_is_no_balance_loss():
    m = moe()
    m.alpha = 0.0
    m(torch.full((2, 5, 32), -1e4))
    assert m.balance_loss is None
    assert m.pop_balance_loss() == 0


@pytest.mark.parametrize("shape", [(2, 0, 32), (0, 5, 32)])
def test_no_tokens_are_in_balance(shape):
    m, x = moe(), torch.zeros(shape, requires_grad=True)
    y = m(x)
    loss = m.pop_balance_loss()
    assert y.shape == shape
    assert loss == 0
    (y.sum() + loss).backward()
    assert x.grad.shape == shape


@pytest.mark.slow
def test_descending_the_balance_loss_evens_the_load_within_a_sequence():
    m, x = moe(n_group=1, topk_group=1), torch.randn(1, 256, 32) + 0.7
    m.gate.e_score_correction_bias.zero_()
    m(x)
    before = m.last_load_E.max()
    for _ in range(100):
        (gradient,) = torch.autograd.grad(m.pop_balance_loss(), m.gate.weight)
        m.gate.weight.data -= 10 * gradient
        m(x)
    assert m.last_load_E.max() < 0.7 * before


def test_balance_loss_is_taken_once_and_only_in_training():
    m = moe()
    m(torch.randn(1, 4, 32))
    assert m.pop_balance_loss() > 0
    assert m.pop_balance_loss() == 0
    m.eval()(torch.randn(1, 4, 32))
    assert m.pop_balance_loss() == 0


def test_weights_are_not_rounded_to_the_dtype_of_the_rows_that_they_multiply():
    torch.manual_seed(0)
    y_RD, weights_TK = torch.randn(9, 32).bfloat16(), torch.rand(9, 1)
    dispatcher, experts_TK = LocalDispatcher(), torch.zeros(9, 1, dtype=torch.int64)
    y_TD = dispatcher.combine(y_RD, weights_TK, dispatcher.plan(experts_TK, torch.tensor([9])))
    assert torch.equal(y_TD, (y_RD.float() * weights_TK).bfloat16())
