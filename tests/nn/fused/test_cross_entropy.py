"""The differentiable cross-entropy: torch's mean over the labels that count, on a CPU bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.nn.fused import cross_entropy as module
from octile.nn.fused.cross_entropy import cross_entropies, cross_entropy
from octile.ops.cross_entropy import IGNORED


@pytest.fixture(params=["torch's", "the operators"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute with torch's functions, as on a CPU, and with the operators, as on a GPU, by their reference."""
    if request.param == "the operators":
        monkeypatch.setattr(module, "can_use_kernel", module.can_use_operators)
    return request.param


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(50, (3, 7))
    labels[1, 2:5] = IGNORED
    return (3 * torch.randn(3, 7, 50)).to(dtype).requires_grad_(), labels


def torchs(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


def loss_and_gradient(function, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = function(logits, labels)
    return loss.detach(), torch.autograd.grad(3 * loss, logits)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_it_is_torchs_bit_for_bit(dtype: torch.dtype):
    for found, expected in zip(
        loss_and_gradient(cross_entropy, *inputs(dtype)), loss_and_gradient(torchs, *inputs(dtype)), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_mean_is_torchs_over_the_labels_that_count(dtype: torch.dtype):
    loss, gradient = loss_and_gradient(cross_entropy, *inputs(dtype))
    expected, expected_gradient = loss_and_gradient(torchs, *inputs(dtype))
    assert gradient.dtype == dtype
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, expected_gradient, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-7)


@pytest.mark.usefixtures("either")
def test_the_losses_are_those_of_each_label():
    logits, labels = inputs()
    losses = cross_entropies(logits, labels)
    assert losses.shape == labels.shape
    expected = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    torch.testing.assert_close(losses, expected.masked_fill(labels == IGNORED, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("either")
def test_if_no_label_counts_the_mean_is_nan_and_its_gradient_zero():
    logits, labels = inputs()
    loss, gradient = loss_and_gradient(cross_entropy, logits, torch.full_like(labels, IGNORED))
    assert loss.isnan()
    assert not gradient.any()


@pytest.mark.usefixtures("either")
def test_a_nan_stays_nan():
    logits, labels = inputs()
    with torch.no_grad():
        logits[0, 0, 3] = float("nan")
    assert cross_entropy(logits, labels).isnan()


@pytest.mark.usefixtures("either")
def test_a_second_backward_pass_gives_the_same_gradient():
    logits, labels = inputs()
    loss = cross_entropy(logits, labels)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.usefixtures("either")
def test_second_derivatives_are_right():
    found, expected = [], []
    for function, result in ((cross_entropy, found), (torchs, expected)):
        logits, labels = inputs()
        (gradient,) = torch.autograd.grad(function(logits, labels), logits, create_graph=True)
        result.append(torch.autograd.grad((100 * gradient).square().sum(), logits)[0])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.oldest_torch
@pytest.mark.one_case
@pytest.mark.usefixtures("either")
def test_compiled_without_a_graph_break_it_is_the_same():
    logits, labels = inputs(torch.bfloat16)
    compiled = torch.compile(cross_entropy, fullgraph=True, backend="aot_eager")
    for found, expected in zip(
        loss_and_gradient(compiled, logits, labels), loss_and_gradient(cross_entropy, logits, labels), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_row_without_leading_dimensions_is_a_row():
    logits, label = torch.randn(50), torch.tensor(7)
    assert torch.equal(cross_entropy(logits, label), cross_entropy(logits[None], label[None]))


def test_a_label_out_of_range_is_refused_on_a_cpu():
    with pytest.raises(IndexError, match="50"):
        cross_entropy(torch.zeros(2, 50), torch.tensor([0, 50]))


def test_transforms_of_torch_func_work():
    logits, labels = inputs()
    found = torch.func.grad(lambda x: cross_entropy(x, labels))(logits.detach())
    torch.testing.assert_close(found, torch.autograd.grad(torchs(logits, labels), logits)[0])
