"""What each of 8 gloo ranks runs for test_pipeline.py: schedules on the last 2, 4 and 8 of them, vs. one process."""

import copy
import datetime
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octile.models.stages import split_stages
from octile.nn import Linear, MoE, RMSNorm, interleave, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.fused import linear
from octile.nn.gate import Gate
from octile.parallel import pipeline as pipelines
from octile.parallel import shard_experts
from octile.parallel.pipeline import Pipeline
from octile.parallel.schedules import SCHEDULES, Schedule, make_schedule, simulate
from octile.parallel.schedules.actions import parts
from octile.recipe import Recipe
from octile.train.run.deterministic import FIXED_WORKSPACE, WORKSPACE_VARIABLE
from tests.models.conftest import MINI_V3, build
from tests.worlds import run_cases

T = TypeVar("T")
SIZES = (2, 4, 8)
PAIRS: dict[tuple[int, int], dist.ProcessGroup] = {}  # of the last four ranks
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5}


class Plain(nn.Module):
    """A stage of torch's own layers, whose width is its number; its outputs are activations and a running sum."""

    def __init__(self, stage: int):
        super().__init__()
        self.layer = nn.Linear(5 + stage, 6 + stage, dtype=torch.float64)

    def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.layer(x))
        return y, y.square().mean() + (0 if total is None else total)

    @staticmethod
    def micro_batch() -> Tensor:
        return torch.randn(3, 5, dtype=torch.float64)


class Quantized(nn.Module):
    """A stage of octile's layers, dense and experts; every second one returns BF16."""

    def __init__(self, stage: int):
        super().__init__()
        self.layer, self.moe = Linear(32, 32), MoE(Gate(32, 4, 2), 32, 32)
        self.moe.experts.use_recipe(self.layer.recipe)
        self.dtype = torch.bfloat16 if stage % 2 else torch.float32

    def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = x.float() + self.layer(x.float())
        y = y + self.moe(y)
        return y.to(self.dtype), self.moe.pop_balance_loss() + (0 if total is None else total)

    @staticmethod
    def micro_batch() -> Tensor:
        return torch.randn(1, 6, 32)


def loss(y: Tensor, total: Tensor, target: Tensor) -> Tensor:
    return (y.to(total.dtype).sum() - target).square() + total


def autocast() -> AbstractContextManager[object]:
    """BF16 on a GPU, as in training."""
    is_cpu = torch.get_default_device().type == "cpu"
    return nullcontext() if is_cpu else torch.autocast("cuda", torch.bfloat16)


def schedule_on(name: str, n_ranks: int) -> Schedule:
    """With as few micro-batches as the schedule takes, but for GPipe and 1F1B."""
    stages = 2 * n_ranks if name == "dualpipev" else n_ranks
    return make_schedule(name, stages, 2 * stages if name == "dualpipe" else stages)


def whole_model(kind: type[nn.Module], schedule: Schedule) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(stage) for stage in range(schedule.n_stages)]


def batch_of(kind: type[nn.Module], schedule: Schedule) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    inputs = [kind.micro_batch() for _ in range(schedule.n_micro_batches)]
    return inputs, [torch.randn((), dtype=inputs[0].dtype) for _ in inputs]


class Expected(NamedTuple):
    """What one process computes: losses, and the gradients of each stage's parameters."""

    losses: Tensor
    gradients: list[list[Tensor]]


def losses_alone(model: Sequence[nn.Module], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
    """Train in one process."""
    losses = []
    for x, target in zip(inputs, targets, strict=True):
        outputs: tuple[Tensor, ...] = (x,)
        for stage in model:
            outputs = stage(*outputs)
        losses.append(loss(*outputs, target))
        losses[-1].backward()
    return torch.stack(losses).detach().double().cpu()


def alone(model: Sequence[nn.Module], inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Expected:
    losses = losses_alone(model, inputs, targets)
    return Expected(losses, [[p.grad.cpu() for p in stage.parameters()] for stage in model])


def on_rank_0(work: Callable[[], T], group: dist.ProcessGroup) -> T:
    """What the first rank computes, on all ranks of a group."""
    result = [work() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(result, group=group, group_src=0)
    return result[0]


def pipeline_of(schedule: Schedule, model: Sequence[nn.Module], group: dist.ProcessGroup) -> Pipeline:
    stages = {stage: copy.deepcopy(model[stage]) for stage in schedule.stages(dist.get_rank(group))}
    return Pipeline(schedule, stages, loss, group=group)


def gradients_of(pipeline: Pipeline) -> dict[int, list[Tensor]]:
    return {stage: [p.grad.cpu() for p in module.parameters()] for stage, module in pipeline.stages.items()}


def trains_as_one_process(name: str, kind: type[nn.Module], group: dist.ProcessGroup) -> None:
    schedule = schedule_on(name, dist.get_world_size(group))
    model, (inputs, targets) = whole_model(kind, schedule), batch_of(kind, schedule)
    pipeline = pipeline_of(schedule, model, group)
    expected = on_rank_0(lambda: alone(model, inputs, targets), group)
    assert torch.equal(pipeline.step(inputs, targets).cpu(), expected.losses)
    for stage, gradients in gradients_of(pipeline).items():
        for found, wanted in zip(gradients, expected.gradients[stage], strict=True):
            rtol = TOLERANCE[found.dtype]
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=rtol * wanted.abs().max().item())
    gathered: list[dict[int, list[Tensor]]] = [{} for _ in range(schedule.n_ranks)]
    dist.all_gather_object(gathered, gradients_of(pipeline), group=group)
    for stage, own in gradients_of(pipeline).items():
        for other in (gradients[stage] for gradients in gathered if stage in gradients):
            assert all(torch.equal(*pair) for pair in zip(own, other, strict=True))


def trains_a_model_with_multi_token_prediction(name: str, group: dist.ProcessGroup) -> None:
    """In FP8, with the embedding on the first and the last stage, each rank with weights of its own before."""
    schedule = schedule_on(name, dist.get_world_size(group))
    config = replace(MINI_V3, num_hidden_layers=schedule.n_stages)
    torch.manual_seed(1)
    tokens = list(torch.randint(97, (schedule.n_micro_batches, 1, 12)))
    rank = dist.get_rank(group)

    def whole() -> tuple[Tensor, dict[str, Tensor]]:
        model = apply_recipe(build(config, seed=0), Recipe.deepseek_v3())
        with autocast():
            losses = [model(x, x) for x in tokens]
        for one in losses:
            one.backward()
        gradients = {name: p.grad.cpu() for name, p in model.named_parameters()}
        return torch.stack(losses).detach().double().cpu(), gradients

    expected, gradients = on_rank_0(whole, group)
    stages = split_stages(apply_recipe(build(config, seed=0), Recipe.deepseek_v3()), schedule.n_stages)
    own = {stage: stages[stage] for stage in schedule.stages(rank)}
    other = {ranks[stage] for stage in own for ranks in schedule.placement}
    if rank != min(other):  # the copies of the lower rank count
        for module in own.values():
            nn.init.zeros_(next(module.parameters()))
    if schedule.rank(0, 0) != rank and stages[-1] in own.values():
        nn.init.zeros_(stages[-1].model.embed_tokens.weight)
    pipeline = Pipeline(schedule, own, stages[-1].loss, group=group, tied=stages[-1].tied)
    with autocast():
        losses = pipeline.step(tokens, tokens)
    assert torch.equal(losses.cpu(), expected)
    for module in pipeline.stages.values():
        for name, p in module.named_parameters():
            wanted = gradients[name]
            torch.testing.assert_close(p.grad.cpu(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def evaluates(group: dist.ProcessGroup) -> None:
    schedule = schedule_on("dualpipe", dist.get_world_size(group))
    model, (inputs, targets) = whole_model(Plain, schedule), batch_of(Plain, schedule)
    pipeline = pipeline_of(schedule, model, group)
    losses = pipeline.evaluate(inputs, targets)
    assert all(p.grad is None for module in pipeline.stages.values() for p in module.parameters())
    assert torch.equal(losses.cpu(), on_rank_0(lambda: alone(model, inputs, targets).losses, group))
    assert torch.equal(pipeline.step(inputs, targets), losses)


class Unwaiting(TorchDispatchMode):
    """Refuses operators whose result the host waits for, as the capture of a CUDA graph does."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def a_captured_step_waits_for_no_rank(group: dist.ProcessGroup) -> None:
    """Nor for the device: what ranks agree on, they have agreed on in an earlier step."""
    schedule = schedule_on("dualpipev", dist.get_world_size(group))
    model, (inputs, targets) = whole_model(Plain, schedule), batch_of(Plain, schedule)
    pipeline = pipeline_of(schedule, model, group)
    with pytest.MonkeyPatch.context() as capture:
        capture.setattr(pipelines, "_is_capturing", lambda device: True)
        shapes = r"none has run with \[3, 5\] torch\.float64"
        with pytest.raises(RuntimeError, match=shapes):
            pipeline.step(inputs, targets)
    losses, gradients = pipeline.step(inputs, targets), gradients_of(pipeline)
    for stage in pipeline.stages.values():
        stage.zero_grad()
    with pytest.MonkeyPatch.context() as capture, Unwaiting():
        capture.setattr(pipelines, "_is_capturing", lambda device: True)
        for name in ("all_gather_messages", "send_message", "receive_message"):
            capture.setattr(pipelines, name, lambda *_: pytest.fail("a rank waits for a message"))
        assert torch.equal(pipeline.step(inputs, targets), losses)
    for stage, expected in gradients.items():
        assert all(torch.equal(*pair) for pair in zip(gradients_of(pipeline)[stage], expected, strict=True))


def a_captured_step_has_the_losses_of_eager_ones(name: str, group: dist.ProcessGroup) -> None:
    """On GPUs: a CUDA graph of all actions, replayed with other tokens, beside eager steps of the same ones."""
    schedule = schedule_on(name, dist.get_world_size(group))
    config = replace(MINI_V3, num_hidden_layers=schedule.n_stages)
    stages = split_stages(apply_recipe(build(config, seed=0), Recipe.deepseek_v3()), schedule.n_stages)
    own = {stage: stages[stage] for stage in schedule.stages(dist.get_rank(group))}
    pipeline = Pipeline(schedule, own, stages[-1].loss, group=group, tied=stages[-1].tied)
    torch.manual_seed(1)
    batches = torch.randint(97, (2, schedule.n_micro_batches, 1, 12))
    given = batches[0].clone()

    def step() -> Tensor:
        for stage in own.values():
            stage.zero_grad()
        with autocast():
            return pipeline.step(list(given), list(given))

    torch.use_deterministic_algorithms(False)  # some of them wait for the device
    graph = torch.cuda.CUDAGraph()
    try:
        eager = []
        for tokens in (batches[1], *batches, batches[1]):
            given.copy_(tokens)
            eager.append((step(), gradients_of(pipeline)))
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            losses = step()
        for tokens, (expected, gradients) in zip(batches, eager[1:3], strict=True):
            given.copy_(tokens)
            graph.replay()
            assert torch.equal(losses, expected)
            for stage, wanted in gradients.items():
                for found, one in zip(gradients_of(pipeline)[stage], wanted, strict=True):
                    torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5 * one.abs().max().item())
    finally:
        graph.reset()  # a communicator that a graph has is not destroyed
        torch.use_deterministic_algorithms(True)


def other_shapes_in_the_next_step(group: dist.ProcessGroup) -> None:
    """Only the first rank has the values of the inputs, and only the last one the targets."""
    schedule = schedule_on("1f1b", dist.get_world_size(group))
    model, (inputs, targets) = whole_model(Plain, schedule), batch_of(Plain, schedule)
    pipeline = pipeline_of(schedule, model, group)
    for rows in (1, 3, 2):
        of_rows = [x[:rows] for x in inputs]
        expected = on_rank_0(lambda: alone(model, of_rows, targets).losses, group)  # noqa: B023
        given = of_rows if pipeline.is_first else [x.to("meta") for x in of_rows]
        assert torch.equal(pipeline.step(given, targets if pipeline.is_last else None).cpu(), expected)


def holds_no_more_activations_than_the_simulation(group: dist.ProcessGroup) -> None:
    schedule = make_schedule("dualpipe", dist.get_world_size(group), 6 * dist.get_world_size(group))
    alive: list[weakref.ref] = []
    held: list[int] = []

    class Saved:
        def __init__(self, activations: Tensor):
            self.activations = activations

    class Counted(Plain):
        def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
            saved: list[weakref.ref] = []

            def pack(t: Tensor) -> Saved:
                packed = Saved(t)
                saved.append(weakref.ref(packed))
                return packed

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.activations):
                result = super().forward(x, total)
            alive.append(saved[0])
            held.append(sum(ref() is not None for ref in alive))
            return result

    inputs, targets = batch_of(Plain, schedule)
    pipeline = pipeline_of(schedule, whole_model(Counted, schedule), group)
    pipeline.step(inputs, targets)
    assert 1 < max(held) <= simulate(schedule).activations[pipeline.rank]
    assert all(ref() is None for ref in alive)


def copies_that_differ_are_found(group: dist.ProcessGroup) -> None:
    schedule = schedule_on("dualpipe", dist.get_world_size(group))
    pipeline = pipeline_of(schedule, whole_model(Plain, schedule), group)
    pipeline.check_copies()
    if pipeline.rank == 1:
        with torch.no_grad():
            pipeline.stages[1].layer.bias[2] += 1e-9
    with pytest.raises(RuntimeError, match=r"^copies of parameters differ .*: layer.bias of stage 1, on ranks"):
        pipeline.check_copies()


def frozen_parameters_have_copies_without_gradients(group: dist.ProcessGroup) -> None:
    """The first stage is frozen, so that nothing is sent back to it, and has values of its own on the second rank."""
    schedule = schedule_on("dualpipe", dist.get_world_size(group))
    model, (inputs, targets) = whole_model(Plain, schedule), batch_of(Plain, schedule)
    model[0].requires_grad_(False)
    expected = on_rank_0(lambda: losses_alone(model, inputs, targets), group)
    if dist.get_rank(group) == 1:
        with torch.no_grad():
            model[0].layer.weight.zero_()
    pipeline = pipeline_of(schedule, model, group)
    assert torch.equal(pipeline.step(inputs, targets).cpu(), expected)
    assert all(p.grad is None for p in pipeline.stages[0].parameters())
    assert all(p.grad is not None for p in pipeline.stages[1].parameters())


def gradients_of_another_step_are_refused(group: dist.ProcessGroup) -> None:
    schedule = schedule_on("dualpipe", dist.get_world_size(group))
    inputs, targets = batch_of(Plain, schedule)
    pipeline = pipeline_of(schedule, whole_model(Plain, schedule), group)
    pipeline.step(inputs, targets)
    with pytest.raises(RuntimeError, match=r"layer.bias of stage \d has a gradient already"):
        pipeline.step(inputs, targets)


def main_grads_of_several_steps_are_summed_once(group: dist.ProcessGroup) -> None:
    """Two equal steps give twice the gradients of one, in the layers that have a copy on another rank."""
    schedule = schedule_on("chimera", dist.get_world_size(group))
    inputs, targets = batch_of(Quantized, schedule)
    pipeline = pipeline_of(schedule, whole_model(Quantized, schedule), group)
    weights = [module.layer.weight for module in pipeline.stages.values()]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    found = []
    for _ in range(2):
        pipeline.step(inputs, targets)
        found.append([weight.main_grad.clone() for weight in weights])
        for module in pipeline.stages.values():
            module.zero_grad()
    for weight, once, twice in zip(weights, *found, strict=True):
        assert weight.grad is None
        assert once.any()
        assert torch.equal(twice, 2 * once)


def gemms_add_to_the_gradients_of_earlier_micro_batches(group: dist.ProcessGroup) -> None:
    """In whole and in split backward passes and in pairs: only the first gradient of a weight is stored by itself."""
    for name in ("1f1b", "zb1p", "dualpipev"):
        schedule = schedule_on(name, dist.get_world_size(group))
        pipeline = pipeline_of(schedule, whole_model(Quantized, schedule), group)
        adds = Counter[bool]()
        with pytest.MonkeyPatch.context() as record:
            for gemm in ("scaled_matmul_nt", "grouped_wgrad"):
                record.setattr(linear, gemm, partial(_counted, adds, getattr(linear, gemm)))
            pipeline.step(*batch_of(Quantized, schedule))
        assert adds[False] > 0
        assert adds[True] == (schedule.n_micro_batches - 1) * adds[False]


def _counted(adds: Counter[bool], gemm: Callable[..., Tensor], *operands: object, **settings: object) -> Tensor:
    adds["accumulate" in settings] += 1
    return gemm(*operands, **settings)


def weight_gradients_of_torchs_layers_wait_for_their_passes(group: dist.ProcessGroup) -> None:
    schedule = schedule_on("zb1p", dist.get_world_size(group))
    pipeline = pipeline_of(schedule, whole_model(Plain, schedule), group)
    (module,) = pipeline.stages.values()
    begun = []
    pipeline.on_begin = lambda operation: begun.append((operation, module.layer.weight.grad is not None))
    pipeline.step(*batch_of(Plain, schedule))
    first = next(has_gradient for operation, has_gradient in begun if operation.startswith("weight gradient"))
    assert not first


def an_input_that_requires_a_gradient_changes_no_message(group: dist.ProcessGroup) -> None:
    """The other ranks have only its shape."""
    schedule = schedule_on("1f1b", dist.get_world_size(group))
    inputs, targets = batch_of(Plain, schedule)
    pipeline = pipeline_of(schedule, whole_model(Plain, schedule), group)
    losses = pipeline.step(inputs, targets)
    given = [x.requires_grad_() if pipeline.is_first else x.to("meta") for x in inputs]
    assert torch.equal(pipeline.step(given, targets), losses)
    assert not pipeline.is_first or all(x.grad is not None for x in inputs)


class Scaled(Plain):
    """A stage with a parameter that all stages have."""

    def __init__(self, stage: int):
        super().__init__(stage)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return super().forward(self.scale * x, total)


def what_is_wrong_on_some_ranks_is_refused_on_all(group: dist.ProcessGroup) -> None:
    """Before any work, so that a rank where nothing is wrong does not wait for the others."""
    schedule = schedule_on("1f1b", dist.get_world_size(group))
    inputs, targets = batch_of(Scaled, schedule)
    stages = {stage: Scaled(stage) for stage in schedule.stages(dist.get_rank(group))}
    pipeline = Pipeline(schedule, stages, loss, group=group, tied=["scale"])

    def refused(error: type[Exception], message: str, *args: object) -> None:
        for run in (pipeline.step, pipeline.evaluate):
            with pytest.raises(error, match=message):
                run(*args)

    refused(ValueError, "^rank 0: inputs must be those of", inputs[1:] if pipeline.is_first else inputs, targets)
    refused(ValueError, "^rank 3: targets are needed", inputs, None)
    refused(TypeError, "^rank 2: a micro-batch must be", ["x" if pipeline.rank == 2 else x for x in inputs], targets)
    pipeline.step(inputs, targets)
    with pytest.raises(RuntimeError, match=r"^rank 0: scale of stage 0 has a gradient already"):
        pipeline.step(inputs, targets)
    pipeline.evaluate(inputs, targets)


def experts_are_spread_over_pipelines(group: dist.ProcessGroup) -> None:
    """Two pipelines of two ranks; the experts of a stage are spread over its ranks in both pipelines."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    own = PAIRS[ranks[rank // 2 * 2], ranks[rank // 2 * 2 + 1]], PAIRS[ranks[rank % 2], ranks[rank % 2 + 2]]
    schedule = schedule_on("dualpipe", 2)
    model, (inputs, targets) = whole_model(Quantized, schedule), batch_of(Quantized, schedule)
    for stage in model:
        stage.moe.experts.use_recipe(None)  # wgrad quantizes the tokens of all pipelines together
    inputs = [x + rank // 2 for x in inputs]
    expected = alone(model, inputs, targets)
    pipeline = pipeline_of(schedule, model, own[0])
    for stage in pipeline.stages.values():
        shard_experts(stage, own[1])
    assert torch.equal(pipeline.step(inputs, targets).cpu(), expected.losses)
    of_all = [expected.gradients, expected.gradients]
    dist.all_gather_object(of_all, expected.gradients, group=own[1])
    for stage, module in pipeline.stages.items():
        names = [name for name, _ in module.named_parameters()]
        wanted = dict(zip(names, expected.gradients[stage], strict=True))
        for name in ("moe.experts.gate_up", "moe.experts.down"):
            whole = sum(gradients[stage][names.index(name)] for gradients in of_all)
            wanted[name] = whole.chunk(2)[rank // 2]
        for name, p in module.named_parameters():
            atol = 1e-5 * wanted[name].abs().max().item()
            torch.testing.assert_close(p.grad.cpu(), wanted[name], rtol=1e-5, atol=atol)


class Fused(nn.Module):
    """A stage of two mixtures with shared experts, in FP8 data flows or in high precision."""

    def __init__(self, recipe: Recipe | None):
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(128) for _ in range(2))
        self.mixtures = nn.ModuleList(MoE(Gate(128, 4, 2), 128, 128, 128) for _ in range(2))
        if recipe is not None:
            apply_recipe(self, recipe)
        assert (self.mixtures[0].fusion() is None) == (recipe is None)

    def forward(self, x: Tensor, total: Tensor | None = None) -> tuple[Tensor, Tensor]:
        for norm, mixture in zip(self.norms, self.mixtures, strict=True):
            x, normed = pre_norm(x, norm, mixture)
            x = x + mixture(normed)
        return x, sum((m.pop_balance_loss() for m in self.mixtures), torch.zeros(()) if total is None else total)


def pairs_are_interleaved(recipe: Recipe | None, group: dist.ProcessGroup) -> None:
    """A pair's passes continue where the other one waits, with the bits of passes one after the other.

    Each rank has a pipeline of two stages of its own; the experts are spread over both ranks.
    """
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    schedule = make_schedule("dualpipev", 2, 4)
    n_pairs = sum(len(parts(action)) == 2 for action in schedule.actions[0])
    torch.manual_seed(0)
    stages = {stage: Fused(recipe) for stage in range(2)}
    shard_experts(nn.ModuleList(stages.values()), group, max_tokens=6)
    torch.manual_seed(dist.get_rank() + 1)
    inputs, targets = list(torch.randn(4, 1, 6, 128)), list(torch.randn(4))
    pipeline = Pipeline(schedule, stages, loss, group=own)
    waits: list[str] = []  # for exchanges, in pairs

    def switch() -> None:
        if interleave.is_interleaved():
            waits.append("forward" if threading.current_thread() is threading.main_thread() else "backward")
        interleave.switch()

    def in_sequence(backward: Callable[[], None], forward: Callable[[], None]) -> None:
        forward()
        backward()

    def step(name: str, replacement: Callable[..., None]) -> tuple[Tensor, dict[int, list[Tensor]]]:
        for module in stages.values():
            module.zero_grad()
        with pytest.MonkeyPatch.context() as patch, autocast():
            patch.setattr(name, replacement)
            return pipeline.step(inputs, targets), gradients_of(pipeline)

    losses, gradients = step("octile.parallel.pipeline.run_interleaved", in_sequence)
    found, of_found = step("octile.nn.dispatcher.switch", switch)
    assert torch.equal(found, losses)
    for stage, expected in gradients.items():
        assert all(torch.equal(*pair) for pair in zip(of_found[stage], expected, strict=True))
    assert waits == ["backward", "forward"] * 2 * 2 * n_pairs  # each pass of each of two mixtures waits twice


def what_does_not_fit_is_refused_on_all_ranks(group: dist.ProcessGroup) -> None:
    """Before any work, so that no rank waits for another one."""
    n_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    schedule = schedule_on("dualpipe", n_ranks)

    def stages() -> dict[int, nn.Module]:
        return {stage: Plain(stage) for stage in schedule.stages(rank)}

    def check(message: str, *args: object, **settings: object) -> None:
        with pytest.raises(ValueError, match=message):
            Pipeline(*args, group=group, **settings)

    wide = make_schedule("1f1b", n_ranks + 1, 8)
    check(f"1f1b of {n_ranks + 1} stages needs {n_ranks + 1} ranks, but the group has {n_ranks}", wide, {}, loss)
    message = f"rank 1: schedule dualpipe has stages 0, 1 of {n_ranks} on this rank, but stages has stage 1"
    check(message, schedule, stages() if rank == 0 else {1: Plain(1)}, loss)
    check("rank 0: loss is needed where the last stage is, stage 1", schedule, stages(), loss if rank else None)
    check("rank 0: tied parameter layer.scale is missing in stage 0", schedule, stages(), loss, tied=["layer.scale"])
    model = split_stages(build(MINI_V3, seed=0), n_ranks)
    own = {stage: model[stage] for stage in schedule.stages(rank)}
    message = "rank 0: tied must have model.embed_tokens.weight, which stages 0 and 1 share"
    check(message, schedule, own, model[-1].loss)
    alike = {stage: Scaled(stage) for stage in schedule.stages(rank)}
    alike[1].layer = nn.Linear(3 + rank, 5)
    scale = alike[1].scale
    check("must have copies of the same parameters", schedule, alike, loss, tied=["scale"])
    assert alike[1].scale is scale
    others = stages() if rank == 0 else {stage: nn.Linear(7, 5 + stage) for stage in (0, 1)}
    check(r"ranks 0 and 1 must have copies of the same parameters, but they have layer.bias", schedule, others, loss)
    name = "1f1b" if rank == 0 else "gpipe"
    check(
        "schedule and tied must be the same on all ranks: rank 1 differs from rank 0",
        *(make_schedule(name, n_ranks, 4), {rank: Plain(rank)}, loss),
    )
    pipeline = Pipeline(schedule, stages(), loss, group=group)
    with pytest.raises(ValueError, match="inputs must be those of 4 micro-batches, as the schedule has, not of 3"):
        pipeline.step([Plain.micro_batch()] * 3, [])
    with pytest.raises(ValueError, match="targets are needed where the last stage is"):
        pipeline.step([Plain.micro_batch()] * 4)


ON_TWO = (
    *(evaluates, other_shapes_in_the_next_step, copies_that_differ_are_found, gradients_of_another_step_are_refused),
    *(what_does_not_fit_is_refused_on_all_ranks, frozen_parameters_have_copies_without_gradients),
    *(main_grads_of_several_steps_are_summed_once, an_input_that_requires_a_gradient_changes_no_message),
    *(weight_gradients_of_torchs_layers_wait_for_their_passes, a_captured_step_waits_for_no_rank),
    gemms_add_to_the_gradients_of_earlier_micro_batches,
)
ON_FOUR = (
    *(evaluates, other_shapes_in_the_next_step, holds_no_more_activations_than_the_simulation),
    *(experts_are_spread_over_pipelines, what_is_wrong_on_some_ranks_is_refused_on_all),
)


def cases(groups: Mapping[int, dist.ProcessGroup | None]) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for size, group in groups.items():
        for name in SCHEDULES:
            for kind in (Plain, Quantized):
                found[f"{name} of {kind.__name__} on {size}"] = partial(trains_as_one_process, name, kind, group)
        for name in {2: ("1f1b", "zb1p", "dualpipe", "dualpipev"), 4: ("dualpipe",)}.get(size, ()):
            case = partial(trains_a_model_with_multi_token_prediction, name, group)
            found[f"{name} of a model with multi-token prediction on {size}"] = case
        for name, recipe in (("FP8", Recipe.deepseek_v3()), ("high precision", None)) if size == 2 else ():
            found[f"pairs are interleaved in {name} on {size}"] = partial(pairs_are_interleaved, recipe, group)
        for case in {2: ON_TWO, 4: ON_FOUR}.get(size, ()):
            found[f"{case.__name__} on {size}"] = partial(case, group)
    return found


def gpu_cases(group: dist.ProcessGroup | None) -> dict[str, Callable[[], None]]:
    """What only GPUs can run, on two of them, or by a rank that has both ends of the pipeline."""
    names = ("dualpipev",) if group is not None and dist.get_world_size(group) == 1 else tuple(SCHEDULES)
    case = a_captured_step_has_the_losses_of_eager_ones
    return {f"{name} is captured": partial(case, name, group) for name in names}


def run_alone(rank: int, folder: str) -> None:
    """Run the cases of GPUs on a single one."""
    start_on_gpu(rank, folder, 1)
    run_cases(gpu_cases(dist.group.WORLD), folder, rank)
    dist.destroy_process_group()


def start_on_gpu(rank: int, folder: str, world: int) -> None:
    os.environ[WORKSPACE_VARIABLE] = FIXED_WORKSPACE  # cuBLAS, which needs it to be deterministic, reads it once
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    torch.use_deterministic_algorithms(True)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group("nccl", f"file://{folder}/store", timeout, world, rank, device_id=device)


def run(
    rank: int, folder: str, device: str = "cpu", names: Collection[str] | None = None, world: int = max(SIZES)
) -> None:
    """Run cases of 2, 4 and 8 ranks on the last ranks of a gloo world, whose numbers in their group are others.

    On GPUs run those of 2 ranks, by NCCL. Without names all cases are run that the world has ranks for.
    """
    torch.set_num_threads(1)
    world = world if device == "cpu" else 2
    if device == "cuda":
        start_on_gpu(rank, folder, world)
    else:
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group("gloo", f"file://{folder}/store", timeout, world, rank)
    groups = {size: dist.new_group(range(world - size, world)) for size in SIZES if size <= world}
    for pair in combinations(range(world - 4, world), 2) if world > 2 else ():
        PAIRS[pair] = dist.new_group(pair)
    own = {}
    for size, group in reversed(groups.items()):  # all ranks begin together
        of_group = {name: case for name, case in cases({size: group}).items() if names is None or name in names}
        own |= of_group if rank >= world - size else dict.fromkeys(of_group, lambda: None)
    if device == "cuda":
        own |= gpu_cases(groups[2])
    run_cases(own, folder, rank)
    dist.barrier()
    dist.destroy_process_group()
