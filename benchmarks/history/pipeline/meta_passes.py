"""Run the actions of recorded pipelines on the meta device, and compare the tensors that live with the measured peaks.

    python benchmarks/history/pipeline/meta_passes.py

Modules take the paths of an H100 (`octile.ops.planning`). Of each rank all actions run in their order, with buffers for
what is received and what is sent. A pair's backward pass runs first, as without exchanges of rows. Weights and moments
are added. Memory inside operators, such as workspaces of GEMMs, is not seen. As in those runs, weight gradients of a
micro-batch are stored alone and then added. The last figure of a line is the peak where GEMMs add them in place, as
they do since.
"""

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the planning of kernels does not let operators import
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from octile.kernels.cuda.gemm.cost_model import Chip
from octile.models.meta import meta_model
from octile.models.stages import split_stages
from octile.nn.conversion import apply_recipe
from octile.nn.deferred_wgrad import DeferrableLinears, defer_wgrads
from octile.ops.planning import planned_kernels
from octile.optim.gradient import added_in_place
from octile.parallel.schedules import SENDS_IN_FLIGHT, ActionType, add_communication, make_schedule, parts
from octile.train.config import preset
from octile.train.memory.cpu import LiveTensors
from octile.train.memory.saved_activations import saving_activations
from octile.train.model import run_recipe
from octile.train.optimizer import make_optimizer

H100 = Chip(132, name="NVIDIA H100 80GB HBM3")
MICRO_BATCHES, GIB = 16, 2**30
SCHEDULES = {"alone": "1f1b", "both": "dualpipev"}
LINE = re.compile(
    r"^\w+ (\w+), rank (\d): [\d.]+ × alone, (?:stages of \[([\d, ]+)\] layers, )?.* peak ([\d.]+) GiB, ([\d.]+) of "
    r"them .* activations saved (\w+);",
    re.MULTILINE,
)


class Tensors(LiveTensors):
    """The tensors that live, without those of a CPU's references."""

    kernels: dict[Any, Any]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.kernels.clear()  # which hold tensors
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return returned


def peak(name: str, schedule_name: str, layers: Sequence[int], rank: int, saves: bool, in_place: bool) -> int:
    """The bytes of a rank's step when they are most."""
    config = preset(name)
    recipe = saving_activations(run_recipe(config)) if saves else run_recipe(config)
    model = meta_model(config.model)
    apply_recipe(model, recipe)
    make_optimizer(model, model, config.optim, recipe.optimizer).step()  # weights in FP8 are cached from now on
    stages = split_stages(model.train(), [range(*ends) for ends in pairwise(accumulate(layers, initial=0))])
    schedule, last = make_schedule(schedule_name, len(layers), MICRO_BATCHES), len(layers) - 1
    own = {stage: stages[stage] for stage in schedule.stages(rank)}
    actions = add_communication(schedule)[rank]
    split = {a.stage_index for a in actions if a.computation_type == ActionType.BACKWARD_WEIGHT}
    tokens_BS = torch.empty(config.micro_batch_size, config.sequence_length, dtype=torch.int64, device="meta")
    activations, gradients, outgoing, saved, wgrads = {}, {}, {}, {}, {}
    sent: dict[Any, deque[Any]] = defaultdict(deque)

    def received() -> list[Tensor]:
        h_BSD = torch.empty(*tokens_BS.shape, config.model.hidden_size, dtype=torch.bfloat16, device="meta")
        return [h_BSD, torch.empty((), device="meta")]

    def forward(stage: int, number: int) -> None:
        inputs = [tokens_BS] if stage == 0 else activations.pop((stage, number))
        with DeferrableLinears() if stage in split else nullcontext():
            outputs = own[stage](*inputs)
            if stage == last:
                outputs = (own[stage].loss(*outputs, tokens_BS),)
        passed = [t.detach().requires_grad_(t.requires_grad) for t in outputs] if stage < last else []
        if stage + 1 in own:
            activations[stage + 1, number] = passed
        elif passed:
            outgoing[ActionType.SEND_F, stage, number] = passed
        edges = [get_gradient_edge(t) for t in outputs if t.requires_grad]
        saved[stage, number] = [t for t in inputs if t.requires_grad], edges

    def adding(stage: int) -> AbstractContextManager[None]:
        return added_in_place(own[stage].parameters()) if in_place else nullcontext()

    def backward(stage: int, number: int) -> None:
        inputs, edges = saved.pop((stage, number))
        with adding(stage):
            torch.autograd.backward(edges, None if stage == last else gradients.pop((stage, number))[: len(edges)])
        if stage - 1 in own:
            gradients[stage - 1, number] = [t.grad for t in inputs]
        elif stage > 0:
            outgoing[ActionType.SEND_B, stage, number] = [t.grad for t in inputs]

    with planned_kernels(H100, recipe.compute) as kernels, Tensors(model.state_dict().values()) as live:
        live.kernels = kernels  # type: ignore[assignment]
        for action in actions:
            for part in reversed(parts(action)):
                stage, number, kind = part.stage_index, part.microbatch_index, part.computation_type
                assert number is not None
                if kind == ActionType.RECV_F:
                    activations[stage, number] = [t.requires_grad_() for t in received()]
                elif kind == ActionType.RECV_B:
                    gradients[stage, number] = received()
                elif kind in (ActionType.SEND_F, ActionType.SEND_B):
                    while len(sent[stage, kind]) >= SENDS_IN_FLIGHT:
                        sent[stage, kind].popleft()
                    sent[stage, kind].append(outgoing.pop((kind, stage, number)))
                elif kind == ActionType.FORWARD:
                    forward(stage, number)
                elif kind == ActionType.BACKWARD_WEIGHT:
                    with adding(stage):
                        wgrads.pop((stage, number)).compute()
                elif kind == ActionType.BACKWARD_INPUT:
                    with defer_wgrads() as wgrads[stage, number]:
                        backward(stage, number)
                else:
                    backward(stage, number)
    weights = {parameter for stage in own.values() for parameter in stage.parameters()}
    return live.peak + 2 * sum(parameter.nbytes for parameter in weights)  # moments are in BF16


for name in ("small", "medium"):
    text = (Path(__file__).parent / f"by_time_{name}.txt").read_text()
    for phase, rank, given, measured, before, saves in sorted(LINE.findall(text)):
        layers = [int(n) for n in given.split(",")] if given else [preset(name).model.num_hidden_layers]
        own_rank = 0 if phase in SCHEDULES else int(rank)
        step = name, SCHEDULES.get(phase, phase), layers, own_rank, saves == "True"
        found, added = (peak(*step, in_place) / GIB for in_place in (False, True))
        here = float(measured) - float(before)
        print(
            f"{name} {phase}, rank {rank}: {found:.2f} GiB, measured {here:.2f}, {found / here - 1:+.1%}; "
            f"added in place {added:.2f}",
            flush=True,
        )
