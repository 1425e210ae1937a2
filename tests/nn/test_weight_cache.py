"""Tests of the weight cache: a weight is quantized again exactly when it may have changed."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

from octile.nn import Linear, convert, frozen_weights, functional
from octile.nn.deferred_wgrad import defer_wgrads
from octile.nn.fused import quantize as fused_quantize
from octile.nn.mlp import MLP
from octile.nn.weight_cache import can_cache, quantized_once_in_capture, quantized_weight, recorded_requests
from octile.optim import AdamW
from octile.recipe import BLOCK, TENSOR, OperandFormat, Recipe
from octile.scaled import ScaledTensor, quantize

FORMAT = OperandFormat(block=BLOCK)


class Counter:
    """A quantization function that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, t: Tensor, fmt: OperandFormat) -> ScaledTensor:
        self.calls += 1
        return quantize(t, fmt.block, fmt.fmt, fmt.scale)


@pytest.fixture
def counter() -> Counter:
    return Counter()


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(5, 7))


def test_a_weight_that_did_not_change_is_quantized_once(weight, counter):
    first = quantized_weight(weight, FORMAT, counter)
    assert quantized_weight(weight, FORMAT, counter) is first
    assert counter.calls == 1


def test_the_quantized_weight_is_the_weight_quantized(weight, counter):
    found, expected = quantized_weight(weight, FORMAT, counter), quantize(weight.detach(), FORMAT.block)
    assert torch.equal(found.dequantize(), expected.dequantize())


def test_a_gradient_does_not_change_the_weight(weight, counter):
    quantized_weight(weight, FORMAT, counter)
    weight.square().sum().backward()
    quantized_weight(weight, FORMAT, counter)
    assert counter.calls == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, AdamW], ids=["SGD", "torch AdamW", "AdamW"])
def test_an_optimizer_step_changes_the_weight(optimizer, weight, counter):
    step = optimizer([weight], lr=0.1)
    weight.grad = torch.randn_like(weight)
    quantized_weight(weight, FORMAT, counter)
    step.step()
    found = quantized_weight(weight, FORMAT, counter)
    assert torch.equal(found.dequantize(), quantize(weight.detach(), FORMAT.block).dequantize())
    assert counter.calls == 2


def test_writing_in_place_changes_the_weight(weight, counter):
    quantized_weight(weight, FORMAT, counter)
    with torch.no_grad():
        weight.mul_(2)
    quantized_weight(weight, FORMAT, counter)
    assert counter.calls == 2


def test_assigning_data_changes_the_weight(weight, counter):
    quantized_weight(weight, FORMAT, counter)
    weight.data = torch.randn(5, 7)
    quantized_weight(weight, FORMAT, counter)
    assert counter.calls == 2


def test_new_data_at_a_reused_address_changes_the_weight(counter):
    layer = nn.Linear(256, 256)
    quantized_weight(layer.weight, FORMAT, counter)
    layer.to(torch.bfloat16).to(torch.float32)  # the allocator likes to hand out the memory that was just freed
    quantized_weight(layer.weight, FORMAT, counter)
    assert counter.calls == 2


def test_loading_a_state_dict_changes_the_weight(counter):
    layer = nn.Linear(7, 5)
    quantized_weight(layer.weight, FORMAT, counter)
    layer.load_state_dict(nn.Linear(7, 5).state_dict())
    quantized_weight(layer.weight, FORMAT, counter)
    assert counter.calls == 2


def test_another_format_is_quantized_separately(weight, counter):
    quantized_weight(weight, FORMAT, counter)
    assert quantized_weight(weight, OperandFormat(block=TENSOR), counter).scale.numel() == 1


def test_a_copy_has_its_own_cache_entry(weight, counter):
    copied = copy.deepcopy(weight)
    quantized_weight(weight, FORMAT, counter)
    with torch.no_grad():
        copied.mul_(2)
    assert torch.equal(
        quantized_weight(copied, FORMAT, counter).dequantize(),
        2 * quantized_weight(weight, FORMAT, counter).dequantize(),
    )


def test_the_entry_of_a_deleted_weight_is_freed(counter):
    weight = nn.Parameter(torch.randn(5, 7))
    saved = weakref.ref(quantized_weight(weight, FORMAT, counter))
    del weight
    gc.collect()
    assert saved() is None


def step(*weights: Tensor) -> None:
    """An optimizer step that changes nothing."""
    torch.optim.SGD(weights, lr=0.0).step()


def test_a_weight_that_an_optimizer_steps_can_be_cached(weight):
    step(weight)
    assert can_cache(weight, FORMAT)


def test_a_weight_that_no_optimizer_has_stepped_cannot_be_cached(weight):
    assert not can_cache(weight, FORMAT)


def test_without_gradients_a_weight_cannot_be_cached(weight):
    step(weight)
    with torch.no_grad():
        assert not can_cache(weight, FORMAT)


def test_frozen_weights_can_be_cached(weight):
    layer = Linear(7, 5)
    with frozen_weights(layer), torch.no_grad():
        assert can_cache(layer.weight, FORMAT)
        assert not can_cache(weight, FORMAT)  # of another model
    assert not can_cache(layer.weight, FORMAT)


@pytest.fixture
def quantized(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that layers quantize."""
    shapes = []
    quantize_once = fused_quantize._quantize_one_layout
    monkeypatch.setattr(
        fused_quantize, "_quantize_one_layout", lambda w, fmt: shapes.append(tuple(w.shape)) or quantize_once(w, fmt)
    )
    return shapes


class LowRankAdapter(nn.Module):
    """A frozen layer and a trained correction of rank 2 beside it, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_a_weight_without_gradient_is_quantized_once_while_adapters_train(quantized):
    model = nn.Sequential(LowRankAdapter(Linear(64, 128)), LowRankAdapter(Linear(128, 64)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        x = torch.randn(5, 64, requires_grad=True)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert quantized == [(128, 64), (64, 128)]


def test_without_gradients_a_frozen_weight_is_quantized_once_where_that_is_promised(quantized):
    layer = Linear(64, 128).requires_grad_(False)
    with frozen_weights(layer), torch.no_grad():
        for _ in range(3):
            layer(torch.randn(5, 64))
    assert quantized == [(128, 64)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_without_gradients_an_adapter_that_was_merged_through_data_is_seen(mode):
    layer, x = Linear(64, 128, bias=False).requires_grad_(False), torch.randn(3, 64)
    layer(x.clone().requires_grad_()).sum().backward()
    with mode():
        before = layer(x)
        layer.weight.data += layer.weight.data
        assert torch.equal(layer(x), 2 * before)


def test_a_layer_that_gets_another_place_is_quantized_again():
    """As when peft has merged adapters through `.data` and puts the layer where the adapted one was."""
    layer, x = Linear(64, 128, bias=False).requires_grad_(False), torch.randn(3, 64, requires_grad=True)
    before = layer(x)
    layer.weight.data += layer.weight.data
    assert torch.equal(nn.Sequential(layer)(x), 2 * before)


def test_adapters_around_a_layer_stay_as_they_are():
    model = LowRankAdapter(convert(nn.Sequential(nn.Linear(64, 128)))[0])
    x = torch.randn(5, 64)
    assert (type(model.base), type(model.down), type(model.up)) == (Linear, nn.Linear, nn.Linear)
    assert torch.equal(model(x), model.base(x) + (x @ model.down.weight.T) @ model.up.weight.T)


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.weight.mul_(2),
        lambda layer: layer.weight.copy_(2 * layer.weight),
        lambda layer: layer.load_state_dict({"weight": 2 * layer.weight}),
        lambda layer: torch._foreach_mul_([layer.weight], 2),
        lambda layer: setattr(layer.weight, "data", 2 * layer.weight),
        lambda layer: setattr(layer, "weight", nn.Parameter(2 * layer.weight, requires_grad=False)),
    ],
    ids=["mul_", "copy_", "load_state_dict", "foreach", "new data", "new parameter"],
)
def test_a_write_to_a_weight_without_gradient_is_seen(write):
    layer, x = Linear(64, 128, bias=False).requires_grad_(False), torch.randn(3, 64, requires_grad=True)
    before = layer(x)
    with torch.no_grad():
        write(layer)
    assert torch.equal(layer(x), 2 * before)


def test_a_weight_that_was_frozen_and_is_trained_again_is_quantized_again():
    layer, x = Linear(64, 128, bias=False).requires_grad_(False), torch.randn(3, 64, requires_grad=True)
    before = layer(x)
    layer.requires_grad_(True)
    layer.weight.data.mul_(2)  # a training loop written by hand
    assert torch.equal(layer(x), 2 * before)


def test_a_step_over_the_memory_of_a_frozen_weight_is_seen():
    """An optimizer may hold one flat tensor of which the weights are views, and a fused one does not count."""
    flat = nn.Parameter(torch.randn(128 * 64))
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64, requires_grad=True)
    layer.weight = nn.Parameter(flat.data.view(128, 64), requires_grad=False)
    before = layer(x)
    flat.grad = torch.ones_like(flat)
    torch.optim.AdamW([flat], lr=0.5, fused=True).step()
    assert not torch.equal(layer(x), before)
    assert torch.equal(layer(x), functional.linear(x, flat.detach().view(128, 64), None, layer.recipe))


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_list_of_layers_is_made_within_a_compiled_model():
    """As transformers' models slice their layers."""

    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Linear(64, 64), Linear(64, 64)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = layer(x)
            return x

    model, x = Sliced(), torch.randn(3, 64)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_a_tensor_that_is_no_parameter_cannot_be_cached(weight):
    assert not can_cache(weight.detach(), FORMAT, needs_dgrad=True)


def test_weights_that_fsdp_gathers_cannot_be_cached(weight, monkeypatch):
    """They are freed after the layer, and written without counting before it."""
    weight.requires_grad_(False)
    assert can_cache(weight, FORMAT, needs_dgrad=True)
    monkeypatch.setattr("octile.nn.weight_cache._module_state_mapping", {nn.Linear(2, 2): None})
    assert not can_cache(weight, FORMAT, needs_dgrad=True)


def test_freezing_resets_the_cache(counter):
    layer = Linear(7, 5)
    quantized_weight(layer.weight, FORMAT, counter)  # as in a training step; later writes are not counted
    layer.weight.data.mul_(3)
    with frozen_weights(layer):
        q = quantized_weight(layer.weight, FORMAT, counter)
    assert torch.equal(q.data, quantize(layer.weight.detach(), BLOCK).data)
    assert torch.equal(q.scale, quantize(layer.weight.detach(), BLOCK).scale)


def test_nested_freezing_ends_with_the_outer_context():
    layer = Linear(7, 5)
    with frozen_weights(layer):
        with frozen_weights(layer):
            pass
        assert can_cache(layer.weight, FORMAT)


def test_a_tensor_computed_from_a_weight_cannot_be_cached(weight):
    step(weight)
    assert not can_cache(weight * 2, FORMAT)


def test_weights_whose_writes_are_not_counted_cannot_be_cached():
    with torch.inference_mode():
        layer = Linear(7, 5)
    with frozen_weights(layer):
        assert not can_cache(layer.weight, FORMAT)


def test_a_weight_with_a_delayed_scale_cannot_be_cached(weight):
    step(weight)
    assert not can_cache(weight, OperandFormat(block=TENSOR, amax="delayed"))


def test_a_write_through_data_is_seen_by_the_next_forward_pass():
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    before = layer(x)
    layer.weight.data.mul_(2)
    assert torch.equal(layer(x), 2 * before)


def test_an_average_swapped_in_through_data_and_out_again_leaves_no_trace():
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    step(layer.weight)
    before, weight = layer(x), layer.weight.detach().clone()
    step(layer.weight)
    layer.weight.data.zero_()
    with torch.no_grad():
        averaged = layer(x)
    layer.weight.data.copy_(weight)
    assert not averaged.any()
    assert torch.equal(layer(x), before)


def test_a_training_loop_written_by_hand_learns():
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    before = layer(x)
    before.square().sum().backward()
    layer.weight.data.add_(layer.weight.grad, alpha=-0.01)
    assert layer(x).square().sum() < before.square().sum()


def set_to_none(weight: Tensor) -> None:
    weight.grad = None


def set_to_zero(weight: Tensor) -> None:
    weight.grad.zero_()


def replace(weight: Tensor) -> None:
    weight.grad = torch.zeros_like(weight)


@pytest.mark.parametrize("reset", [set_to_none, set_to_zero, replace])
@pytest.mark.parametrize("has_hook", [False, True], ids=["", "hook"])
def test_a_training_loop_written_by_hand_is_seen_after_an_optimizer_stepped(reset, has_hook):
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    step(layer.weight)
    if has_hook:
        layer.weight.register_hook(lambda gradient: gradient)
    for _ in range(2):
        y = layer(x)
        assert torch.equal(y, functional.linear(x, layer.weight.detach().clone(), None, layer.recipe))
        y.square().sum().backward()
        layer.weight.data.add_(layer.weight.grad, alpha=-0.01)
        reset(layer.weight)


def test_a_training_loop_written_by_hand_over_main_grad_is_seen_after_an_optimizer_stepped():
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    layer.weight.main_grad = torch.zeros(128, 64)
    step(layer.weight)
    for _ in range(2):
        y = layer(x)
        assert torch.equal(y, functional.linear(x, layer.weight.detach().clone(), None, layer.recipe))
        y.square().sum().backward()
        layer.weight.data.add_(layer.weight.main_grad, alpha=-0.01)
        layer.weight.main_grad.zero_()


@pytest.mark.parametrize("reset", [set_to_none, set_to_zero, replace])
@pytest.mark.parametrize("run", [nullcontext, defer_wgrads])
def test_a_write_between_the_backward_passes_of_two_forward_passes_is_seen(reset, run):
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    step(layer.weight)
    before = layer(x)
    losses = [layer(x).square().sum() for _ in range(2)]
    for loss in losses:
        with run() as wgrads:
            loss.backward()
        if wgrads is not None:
            wgrads.compute()
        if loss is losses[0]:
            layer.weight.data.mul_(2)
            reset(layer.weight)
    assert torch.equal(layer(x), 2 * before)


def test_a_write_after_a_backward_pass_and_a_capture_is_seen():
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    step(layer.weight)
    before = layer(x)
    before.square().sum().backward()
    with quantized_once_in_capture():
        layer(x)
    layer.weight.data.mul_(2)
    layer.weight.grad = None
    assert torch.equal(layer(x), 2 * before)


def test_a_weight_that_a_backward_pass_uses_twice_is_quantized_once_in_all_micro_batches(quantized):
    layer = Linear(128, 128)
    layer.weight.main_grad = torch.zeros(128, 128)
    step(layer.weight)
    for _ in range(3):
        layer(layer(torch.randn(3, 128))).square().sum().backward()
    assert quantized == [(128, 128)]


@pytest.mark.parametrize("has_main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("run", [nullcontext, defer_wgrads])
def test_micro_batches_quantize_a_weight_once(quantized, has_main_grad, run):
    """Their forward and backward passes alternate, as those of a pipeline after its first ones do."""
    layer = Linear(64, 128)
    if has_main_grad:
        layer.weight.main_grad = torch.zeros(128, 64)
    step(layer.weight)
    waiting = [layer(torch.randn(3, 64)).square().sum() for _ in range(2)]
    for _ in range(3):
        with run() as wgrads:
            waiting.pop(0).backward()
        waiting.append(layer(torch.randn(3, 64)).square().sum())
        if wgrads is not None:
            wgrads.compute()
    assert quantized == [(128, 64)]


def test_micro_batches_whose_gradients_are_stored_in_fp8_quantize_a_weight_once(quantized):
    layer, recipe = Linear(64, 128), Recipe.fp8_lm()
    optimizer = AdamW(layer.parameters(), lr=0.1, formats=recipe.optimizer)
    optimizer.step()
    for _ in range(3):
        layer(torch.randn(3, 64)).square().sum().backward()
        assert layer.weight.grad is None
    assert quantized == [(128, 64)]


def test_micro_batches_whose_gradients_ddp_reduces_quantize_a_weight_once(quantized, process_group):
    """DDP writes the gradients at the end of each backward pass."""
    layer = Linear(64, 128)
    step(layer.weight)
    model = nn.parallel.DistributedDataParallel(layer)
    for _ in range(3):
        model(torch.randn(3, 64)).square().sum().backward()
    assert quantized == [(128, 64)]


def test_checkpointed_layers_of_one_weight_quantize_it_once_in_all_micro_batches(quantized):
    layer = Linear(128, 128)
    layer.weight.main_grad = torch.zeros(128, 128)
    step(layer.weight)
    for _ in range(2):
        x = torch.randn(3, 128, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        x.square().sum().backward()
    assert quantized == [(128, 128)]


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_compiled_autograd_runs_the_backward_pass_of_a_layer_that_is_not_compiled():
    layer, x = Linear(64, 128), torch.randn(3, 64)
    step(layer.weight)
    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with compiled_autograd._enable(torch.compile(backend="eager")):
        layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
def test_a_write_through_data_between_two_forward_passes_is_seen_after_frozen_weights(context):
    """What docs/compatibility.md says to do where a step's forward passes have no backward pass between them."""
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    step(layer.weight)
    before = layer(x)
    layer.weight.data.mul_(2)
    with frozen_weights(layer):
        pass
    with context():
        assert torch.equal(layer(x), 2 * before)


def test_a_fused_optimizer_that_writes_without_counting_invalidates_too(weight, counter):
    before = quantized_weight(weight, FORMAT, counter)
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()
    assert not torch.equal(quantized_weight(weight, FORMAT, counter).data.float(), before.data.float())


def test_a_step_of_another_model_leaves_a_frozen_weight_alone(weight, counter):
    weight.requires_grad_(False)
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    quantized_weight(weight, FORMAT, counter)
    torch.optim.SGD([other], lr=0.1).step()
    quantized_weight(weight, FORMAT, counter)
    assert counter.calls == 1


def test_a_step_invalidates_a_weight_that_another_tensor_may_be_trained_for(weight, counter):
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    quantized_weight(weight, FORMAT, counter)
    torch.optim.SGD([other], lr=0.1).step()
    quantized_weight(weight, FORMAT, counter)
    assert counter.calls == 2


def test_a_step_invalidates_a_frozen_weight_that_its_optimizer_holds(weight, counter):
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight.requires_grad_(False)], lr=0.5, fused=True)
    before = quantized_weight(weight, FORMAT, counter)
    optimizer.step()
    assert not torch.equal(quantized_weight(weight, FORMAT, counter).data.float(), before.data.float())


@pytest.fixture
def capturing(monkeypatch) -> None:
    """Let torch say that a CUDA graph is being captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


def test_a_weight_is_not_cached_during_graph_capture(weight, capturing):
    step(weight)
    assert not can_cache(weight, FORMAT)


def test_a_capture_quantizes_a_weight_once(weight, counter, capturing):
    with quantized_once_in_capture():
        assert can_cache(weight, FORMAT)
        first = quantized_weight(weight, FORMAT, counter)
        assert quantized_weight(weight, FORMAT, counter) is first
    assert counter.calls == 1


def test_a_capture_neither_reads_nor_loses_what_was_cached_before(weight, counter, capturing):
    before = quantized_weight(weight, FORMAT, counter)
    with quantized_once_in_capture():
        assert quantized_weight(weight, FORMAT, counter) is not before
    assert quantized_weight(weight, FORMAT, counter) is before


def test_a_capture_caches_no_weight_without_a_gradient(weight, capturing):
    with quantized_once_in_capture():
        assert not can_cache(weight.requires_grad_(False), FORMAT, needs_dgrad=True)


def test_the_weights_that_are_quantized_to_be_cached_are_recorded(weight, counter):
    other = nn.Parameter(torch.randn(5, 7))
    quantized_weight(other, FORMAT, counter)  # before
    with recorded_requests() as requests:
        for _ in range(2):
            quantized_weight(weight, FORMAT, counter)
            quantized_weight(other, FORMAT, counter)
    quantized_weight(weight, OperandFormat(block=TENSOR), counter)  # after
    ((found,), *settings) = requests[0]
    assert found is weight
    assert settings == [FORMAT, False]
    assert len(requests) == 1


@pytest.mark.parametrize("make", [lambda: Linear(200, 140, bias=False), lambda: MLP(200, 256)], ids=["Linear", "MLP"])
def test_weights_that_are_quantized_before_a_captured_step_give_the_same_bits(make, capturing, monkeypatch):
    module, x = make(), torch.randn(3, 200, requires_grad=True)
    with quantized_once_in_capture(), recorded_requests() as requests:
        y = module(x)
    with quantized_once_in_capture():
        fused_quantize.quantize_requested([*requests, *requests])
        for name in ("_quantize_one_layout", "_quantize_joined"):
            monkeypatch.setattr(fused_quantize, name, None)  # no weight is quantized alone
        assert torch.equal(module(x), y)


def test_a_weight_that_is_written_after_it_was_quantized_for_a_captured_step_is_quantized_again(capturing):
    layer, x = Linear(200, 140, bias=False), torch.randn(3, 200, requires_grad=True)
    with quantized_once_in_capture(), recorded_requests() as requests:
        layer(x)
    with quantized_once_in_capture():
        fused_quantize.quantize_requested(requests)
        with torch.no_grad():
            layer.weight.mul_(-3)  # as the weights of other ranks are
        found = layer(x)
    assert torch.equal(found, layer(x))


def test_weights_with_one_scale_are_left_to_their_first_use(capturing):
    layer, x = Linear(200, 140, bias=False, recipe=Recipe.per_tensor()), torch.randn(3, 200, requires_grad=True)
    with quantized_once_in_capture(), recorded_requests() as requests:
        y = layer(x)
    assert requests
    with quantized_once_in_capture():
        fused_quantize.quantize_requested(requests)
        with recorded_requests() as missing:
            assert torch.equal(layer(x), y)
    assert len(missing) == len(requests)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, AdamW], ids=["SGD", "torch AdamW", "AdamW"])
def test_a_foreign_parameter_that_was_stepped_can_be_swapped(optimizer):
    layer, other = nn.Linear(7, 5, bias=False), nn.Parameter(torch.ones(5, 7))
    layer(torch.randn(3, 7)).sum().backward()
    optimizer(layer.parameters(), lr=0.1).step()
    layer.weight.grad = None
    torch.utils.swap_tensors(layer.weight, other)
    assert torch.equal(layer.weight, torch.ones(5, 7))


def test_a_cached_weight_can_be_swapped_and_the_layer_computes_with_its_new_content():
    layer, other, x = Linear(64, 128, bias=False), nn.Parameter(torch.randn(128, 64)), torch.randn(3, 64)
    expected = functional.linear(x, other.detach(), None, layer.recipe)
    step(layer.weight)
    layer(x)
    assert can_cache(layer.weight, FORMAT)
    torch.utils.swap_tensors(layer.weight, other)
    assert torch.equal(layer(x), expected)


def test_a_module_moves_by_swapping_after_a_step(monkeypatch):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer = Linear(64, 128, bias=False)
    step(layer.weight)
    layer(torch.randn(3, 64))
    weight = layer.weight
    assert layer.to(torch.bfloat16).weight is weight
    assert weight.dtype == torch.bfloat16


def test_a_frozen_weight_whose_data_is_replaced_is_quantized_again():
    layer, x = Linear(64, 128, bias=False), torch.randn(3, 64)
    with frozen_weights(layer):
        before = layer(x)
        layer.weight.data = layer.weight.data * 2
        assert torch.equal(layer(x), 2 * before)


def test_a_sparse_parameter_can_be_stepped():
    with torch.sparse.check_sparse_tensor_invariants(False):
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (3,)).requires_grad_()
    torch.optim.SGD([sparse], lr=0.1).step()


def test_a_lazy_module_is_made_while_weights_are_cached():
    layer = Linear(128, 128)
    with torch.no_grad():
        layer(torch.ones(1, 128))
    assert nn.Sequential(nn.LazyLinear(4))[0].has_uninitialized_params()
