"""On a GPU the cross-entropy agrees with torch's, waits for nothing and needs little memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.conversion import apply_recipe
from octile.nn.fused.cross_entropy import cross_entropies, cross_entropy
from octile.ops import cross_entropy as operators
from octile.ops.cross_entropy import IGNORED
from octile.recipe import Recipe
from tests.models.conftest import build
from tests.train.conftest import MICRO

SHAPES = [(300, 8192), (5, 32768), (3, 262144), (40, 97), (7, 50257), (9, 4100), (6, 1), (0, 128)]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def inputs(m: int, v: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(v, (m,))
    labels[1:3] = IGNORED
    return (5 * torch.randn(m, v)).to(dtype), labels


def check(logits: Tensor, labels: Tensor, dlosses: Tensor) -> None:
    """Compare both operators with their reference, given its lse, within the errors that it allows."""
    expected, expected_lse = operators.cross_entropy(logits, labels)
    losses, lse = (t.cpu() for t in operators.cross_entropy(logits.cuda(), labels.cuda()))
    torch.testing.assert_close(lse, expected_lse, rtol=2.0**-20, atol=2.0**-20, equal_nan=True)
    finite = expected.isfinite() & expected_lse.isfinite()
    size = 1 + expected_lse.abs() + expected.abs()
    assert ((losses - expected).abs() <= 2.0**-20 * size)[finite].all()
    torch.testing.assert_close(losses[~finite], expected[~finite], equal_nan=True)

    arguments = dlosses, logits, labels, expected_lse
    found = operators.cross_entropy_backward(*(t.cuda() for t in arguments)).cpu().float()
    gradient = operators.cross_entropy_backward(*arguments).float()
    assert torch.equal(found.isnan(), gradient.isnan())
    distance = (logits.float() - expected_lse[:, None]).abs().nan_to_num(0, 0, 0)
    info = torch.finfo(logits.dtype)
    bound = (8 + distance) * 2.0**-23 * dlosses.abs()[:, None] + info.eps * gradient.abs() + info.smallest_normal
    assert ((found - gradient).abs() <= bound)[~gradient.isnan()].all()


@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_vocabulary_agrees_with_the_cpu(shape: tuple[int, int], dtype: torch.dtype):
    check(*inputs(*shape, dtype), torch.randn(shape[0]))


@pytest.mark.parametrize("v", [8192, 300])
@pytest.mark.parametrize("layout", ["every other column", "part of wider rows", "columns"])
def test_any_strides_give_the_same(v: int, layout: str):
    wide, labels = (t.cuda() for t in inputs(40, 2 * v))
    labels = labels.where(labels < v, 0)
    steps, dlosses = torch.stack((labels, labels), 1)[:, 0], torch.rand(1, device="cuda").expand(40)
    strided = wide[:, ::2] if layout == "every other column" else wide[:, v:]
    strided = strided.mT.contiguous().mT if layout == "columns" else strided
    expected = operators.cross_entropy(strided.contiguous(), labels)
    torch.testing.assert_close(operators.cross_entropy(strided, steps), expected)
    found = operators.cross_entropy_backward(dlosses, strided, steps, expected[1])
    gradient = operators.cross_entropy_backward(dlosses.contiguous(), strided.contiguous(), labels, expected[1])
    assert torch.equal(found, gradient)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("columns", [slice(70, 71), slice(4096), slice(4096, None), slice(None)], ids=str)
def test_nan_and_inf_stay_in_their_row(bad: str, columns: slice):
    logits, labels = inputs(6, 8192)
    logits[4, columns] = float(bad)
    check(logits, labels, torch.ones(6))


@pytest.mark.parametrize("label", [300, -1, 2**32])
def test_a_label_out_of_range_makes_its_row_nan(label: int):
    logits, labels = (t.cuda() for t in inputs(6, 300))
    labels[5] = label
    leaf = logits.requires_grad_()
    losses = cross_entropies(leaf, labels)
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert losses.isnan().tolist() == gradient.isnan().all(1).tolist() == 5 * [False] + [True]
    assert gradient[:5].isfinite().all()


def test_more_logits_than_32_bits_can_count():
    m, v = 70_000, 32_768
    logits, labels = torch.zeros(m, v, dtype=torch.bfloat16, device="cuda"), torch.zeros(m, dtype=torch.int64).cuda()
    logits[-1, v - 1], labels[-1] = 20, v - 1
    losses, lse = operators.cross_entropy(logits, labels)
    dlogits = operators.cross_entropy_backward(torch.ones_like(lse), logits, labels, lse)
    expected = F.cross_entropy(logits[-2:].float(), labels[-2:], reduction="none")
    torch.testing.assert_close(losses[-2:], expected)
    last = logits[-1].float().softmax(0)
    last[-1] -= 1
    # p − 1 cancels, and p has half a spacing of its lse, 20 in FP32
    torch.testing.assert_close(dlogits[-1].float(), last, rtol=2**-7, atol=2**-20 + 2**-23)


@every_dtype
def test_the_mean_and_its_gradient_are_torchs(dtype: torch.dtype):
    logits, labels = (t.cuda() for t in inputs(400, 8192, dtype))
    results = []
    for function in (cross_entropy, lambda x, y: F.cross_entropy(x.float(), y, ignore_index=IGNORED)):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, labels)
        results.append((loss.detach(), *torch.autograd.grad(1000 * loss, leaf)))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        eps = torch.finfo(found.dtype).eps
        torch.testing.assert_close(found, expected, rtol=max(eps, 1e-5), atol=1e-7)


def test_if_no_label_counts_the_mean_is_nan_and_its_gradient_zero():
    logits = torch.randn(5, 300, device="cuda", requires_grad=True)
    loss = cross_entropy(logits, torch.full((5,), IGNORED, device="cuda"))
    assert loss.isnan()
    assert not torch.autograd.grad(loss, logits)[0].any()


def test_the_host_does_not_wait_and_repeated_passes_have_the_same_bits():
    logits, labels = (t.cuda() for t in inputs(400, 8192))
    logits.requires_grad_()

    def loss_and_gradient() -> tuple[Tensor, Tensor]:
        loss = cross_entropy(logits, labels)
        return loss.detach(), torch.autograd.grad(loss, logits)[0]

    first = loss_and_gradient()  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = loss_and_gradient()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_and_gradient()
    graph.replay()
    for one, other, third in zip(first, second, captured, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


def test_compiled_without_a_graph_break_it_is_the_same():
    logits, labels = (t.cuda() for t in inputs(400, 8192))
    logits.requires_grad_()
    compiled = torch.compile(cross_entropy, fullgraph=True)
    (found, expected) = (torch.autograd.grad(f(logits, labels), logits)[0] for f in (compiled, cross_entropy))
    torch.testing.assert_close(found, expected)


def test_both_passes_need_the_memory_of_the_gradient_alone():
    logits, labels = torch.randn(4096, 8192, device="cuda").bfloat16().requires_grad_(), torch.zeros(4096).long().cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(cross_entropy(logits, labels), logits)
    assert torch.cuda.max_memory_allocated() - before < 1.01 * logits.nbytes


def test_the_loss_of_a_model_counts_only_positions_with_a_label():
    """The last positions of a sequence have logits on a GPU, but no label."""
    model = apply_recipe(build(MICRO), Recipe.bf16()).cuda()
    tokens = torch.randint(MICRO.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0)).cuda()
    labels = tokens.clone()
    labels[0, 5:9] = IGNORED
    with torch.autocast("cuda", torch.bfloat16):
        drafts = [logits.float() for logits in model.with_drafts(tokens)]
        expected = [
            F.cross_entropy(x[:, : 24 - n].flatten(0, 1), labels[:, n:].flatten(), ignore_index=IGNORED)
            for x, n in zip(drafts, (1, 2), strict=True)
        ]
        loss = model(tokens, labels)
    found = [model.last_losses[name] for name in ("main", "mtp")]
    torch.testing.assert_close(found, [t.detach() for t in expected], rtol=1e-3, atol=0)
    head = model.lm_head.weight
    (dhead,) = torch.autograd.grad(loss, head)
    (dexpected,) = torch.autograd.grad(expected[0] + model.mtp_loss_weight * expected[1], head)
    assert (dhead - dexpected).norm() < 1e-2 * dexpected.norm()
