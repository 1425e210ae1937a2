"""Pipeline parallelism: the executor of any schedule in `octile.parallel.schedules`.

A rank goes through its list of actions, with sends and receives (`add_communication`):

    F               run the stage on what was received; save its inputs and the gradient edges of its outputs
    B, I            backward pass from the received gradients; I leaves wgrad GEMMs to W (`octile.nn.deferred_wgrad`)
    W               run these GEMMs, which like those of B add to the gradients of the micro-batches before, in place
    F&B             both of the pair, interleaved at the exchanges of experts' rows (`octile.nn.interleave`)
    send, receive   post it without waiting; a computation waits for its own receives

torch's executor (`torch.distributed.pipelining`) has each stage on one rank. Here a bidirectional schedule has two
copies of a stage: they begin with the same values, and their gradients are summed after the last action.

The shapes and dtypes of what a stage sends may differ between stages. They are sent once for each shape of the
micro-batches, ahead of the first message; every rank knows the micro-batches' shapes.

A step on GPUs can be captured in a CUDA graph with all of its actions, sends and receives. Steps of the same shapes
must have run before: they create NCCL's communicators and agree on what is sent, so that the host waits for nothing
while a step is captured. All ranks must capture, and replay, the same steps.

Sources: DeepSeek-V3 (arXiv 2412.19437) §3.2.1; the schedules' files name theirs.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from octile.nn.deferred_wgrad import DeferrableLinears, DeferredWgrads, defer_wgrads
from octile.nn.interleave import run_interleaved
from octile.ops.matmul import without_autocast
from octile.optim.gradient import added_in_place, gradient_of
from octile.parallel.messages import all_gather_messages, receive_message, send_message
from octile.parallel.ranks import world
from octile.parallel.schedules.actions import Action, ActionType, describe, parts
from octile.parallel.schedules.communication import SENDS_IN_FLIGHT, add_communication
from octile.parallel.schedules.schedule import Schedule

BUCKET = 2**25  # values that two ranks exchange at a time

Key = tuple[int, int]  # stage, micro-batch
Form = tuple[
    tuple[tuple[int, ...], torch.dtype, bool], ...
]  # shape, dtype and whether a gradient comes back, of each tensor
Loss = Callable[..., Tensor]


class Pipeline:
    """The stages of a model on the ranks of a process group, run by a schedule.

    All ranks of the group construct it alike, each with its own stages. Copies of a parameter on two ranks then have
    the values of the lower rank, in a bidirectional schedule buffers, too.

    Args:
        schedule: from `make_schedule`, for as many ranks as the group has.
        stages: stage → module, those that `schedule.stages(rank)` names. The first is called with a micro-batch's
            input, each other one with what the one before returns: a tensor or a tuple of tensors.
        loss: called with what the last stage returns and the micro-batch's target; returns a scalar, of which the
            gradients are those of its sum over the micro-batches. Needed on ranks that have the last stage.
        group: the ranks of the pipeline, in order; all ranks if not given.
        tied: names of parameters that the first and the last stage share, such as the embedding that multi-token
            prediction reads; all that stages of `split_stages` name in their attribute `tied`. A rank that has both
            stages has the first stage's parameter in both.
        on_begin: called with the name of each operation before it begins, which a message about a hang can quote:
            "forward pass of stage 1 for micro-batch 3".

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: on all ranks: the group has another size than the schedule, ranks have different schedules, stages
            or parameters of copies do not match, a tied parameter is missing in a stage or in `tied`, or the loss is.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module],
        loss: Loss | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        tied: Sequence[str] = (),
        on_begin: Callable[[str], None] = lambda operation: None,
    ):
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed must be initialized before a Pipeline is made")
        self.schedule, self.stages, self.loss, self.tied = schedule, dict(sorted(stages.items())), loss, tuple(tied)
        self.on_begin = on_begin
        self.group = group if group is not None else world()
        self.rank, n_ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if n_ranks != schedule.n_ranks:
            raise ValueError(
                f"schedule {schedule.name} of {schedule.n_stages} stages needs {schedule.n_ranks} ranks, but the group "
                f"has {n_ranks}"
            )
        digest = hashlib.sha256(repr((schedule, self.tied)).encode()).hexdigest()
        own = _Description(digest, self._problem())
        if own.problem is None:
            own = own._replace(copies={peer: [str(copy) for copy in copies] for peer, copies in self._copies().items()})
        _check_agreement(all_gather_messages(own, _Description, self.group))
        self._tie()
        tensors = (t for stage in self.stages.values() for t in (*stage.parameters(), *stage.buffers()))
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self._actions = add_communication(schedule)[self.rank]
        split = [action for action in self._actions if action.computation_type == ActionType.BACKWARD_WEIGHT]
        self._split = {(action.stage_index, action.microbatch_index) for action in split}
        self._forms: dict[tuple[int, int, Hashable], Form] = {}  # (stage, direction, micro-batch's form) → its outputs
        self._send_values()

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.schedule.n_stages - 1 in self.stages

    def copies_of_lower_ranks(self) -> set[nn.Parameter]:
        """This rank's parameters that a lower rank has, too, and who counts every parameter once counts there."""
        below = (copies for peer, copies in self._copies().items() if peer < self.rank)
        return {copy.parameter for copies in below for copy in copies}

    def step(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None, *, sums_copies: bool = True) -> Tensor:
        """Run the forward and backward passes of all micro-batches.

        Gradients are added to `.grad`, or to `main_grad`, of this rank's parameters. Those of copies on two ranks are
        summed over them, so that both have the same bits.

        Args:
            inputs: for each micro-batch a tensor or a tuple of tensors, on all ranks. A rank without the first stage
                reads only shapes and dtypes, so its tensors may be on the meta device.
            targets: for each micro-batch what `loss` reads; on ranks with the last stage.
            sums_copies: whether to sum over copies. Otherwise `sum_copies` must follow, after sums over other ranks:
                these may be added in another order for each copy, and the copies would differ in their last bits.

        Returns:
            the losses [M] of the micro-batches, float64, on all ranks.

        Raises:
            ValueError: on all ranks: there are more or fewer micro-batches than the schedule has, or no targets.
            TypeError: on all ranks: a micro-batch is neither a tensor nor a tuple of tensors.
            RuntimeError: on all ranks: a parameter that has a copy on another rank, over which its gradient is summed,
                has one already in `.grad`. While a CUDA graph is captured, on this rank: no step of these shapes has
                run before.
        """
        copies = self._copies() if sums_copies else {}
        self._check(inputs, targets, copies)
        earlier = self._clear_main_grads(copies)
        losses = _Step(self, inputs, targets, trains=True).run(self._actions)
        self._sum(copies, lambda parameter: parameter)
        for main_grad, values in earlier:
            main_grad += values
        return self._share(losses)

    def sum_copies(self, part_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        """Add up the gradients of copies. A parameter that no micro-batch has used gets zeros.

        Args:
            part_of: given a parameter, returns the part of it whose gradient this rank has, such as those of
                `ShardedState`; of copies the same parts.
        """
        self._sum(self._copies(), part_of)

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[Any], targets: Sequence[Any] | None = None) -> Tensor:
        """Run the forward passes of all micro-batches; arguments, result, ValueError and TypeError as in `step`."""
        self._check(inputs, targets, {})
        forward = ActionType.FORWARD, ActionType.SEND_F, ActionType.RECV_F
        actions = [part for action in self._actions for part in parts(action) if part.computation_type in forward]
        return self._share(_Step(self, inputs, targets, trains=False).run(actions))

    def check_copies(self, part_of: Callable[[nn.Parameter], nn.Parameter] = lambda parameter: parameter) -> None:
        """Compare the copies of parameters that two ranks have, bit for bit. All ranks must call this.

        Args:
            part_of: given a parameter, returns the part of it that is compared, such as those of `ShardedState`; of
                copies the same parts.

        Raises:
            RuntimeError: on all ranks: copies differ.
        """
        differ = []
        for peer, copies in self._copies().items():
            own = [part_of(copy.parameter).detach() for copy in copies]
            pairs = zip(copies, own, self._exchange(peer, own), strict=True)
            differ += [
                f"{copy.name} of stage {copy.stage}, on ranks {self.rank} and {peer} of the pipeline"
                for copy, here, there in pairs
                if self.rank < peer and not _have_same_bits(here, there)
            ]
        found = [name for names in all_gather_messages(differ, list[str], self.group) for name in names]
        if found:
            more = f", and {len(found) - 1} more" if found[1:] else ""
            raise RuntimeError(f"copies of parameters differ between two ranks: {found[0]}{more}")

    # The ranks, their stages and copies

    def _problem(self) -> str | None:
        """What is wrong with this rank's arguments."""
        schedule, last = self.schedule, self.schedule.n_stages - 1
        if tuple(self.stages) != schedule.stages(self.rank):
            needed, given = (_names("stage", numbers) for numbers in (schedule.stages(self.rank), self.stages))
            return f"schedule {schedule.name} has {needed} of {schedule.n_stages} on this rank, but stages has {given}"
        if self.is_last and self.loss is None:
            return f"loss is needed where the last stage is, stage {last}"
        for stage in (stage for stage in (0, last) if stage in self.stages):
            names = dict(self.stages[stage].named_parameters())
            for name in self.tied:
                if name not in names:
                    return f"tied parameter {name} is missing in stage {stage}"
            own = getattr(self.stages[stage], "tied", ())  # `octile.models.stages.ModelStage` says what it shares
            for name in own if last and isinstance(own, tuple) else ():
                if name not in self.tied:
                    return f"tied must have {name}, which stages 0 and {last} share"
        return None

    def _tie(self) -> None:
        """Give the last stage the first stage's parameters, if this rank has both."""
        if self.is_first and self.is_last:
            for name in self.tied:
                owner, _, own = name.rpartition(".")
                module = self.stages[self.schedule.n_stages - 1].get_submodule(owner)
                setattr(module, own, self.stages[0].get_parameter(name))

    def _copies(self) -> dict[int, list[_Copy]]:
        """The parameters that have a copy on another rank, by that rank, in one order."""
        last, seen = self.schedule.n_stages - 1, set[nn.Parameter | str]()  # names of tied ones
        found: dict[int, list[_Copy]] = defaultdict(list)
        for stage, module in self.stages.items():
            for name, parameter in module.named_parameters():
                is_tied = name in self.tied and stage in (0, last)
                if parameter in seen or (is_tied and name in seen):
                    continue
                seen |= {parameter, name} if is_tied else {parameter}
                holders = {ranks[s] for ranks in self.schedule.placement for s in ((0, last) if is_tied else (stage,))}
                for peer in holders - {self.rank}:  # the rank of the other direction, or of the pipeline's other end
                    found[peer].append(_Copy(0 if is_tied else stage, name, parameter))
        return {peer: sorted(copies, key=lambda copy: copy[:2]) for peer, copies in found.items()}

    @torch.no_grad()
    def _send_values(self) -> None:
        """Give copies of parameters and buffers the values of the lower rank."""
        values: list[tuple[int, Tensor]] = []
        values += [(peer, copy.parameter) for peer, copies in self._copies().items() for copy in copies]
        for stage, module in self.stages.items():
            peers = {ranks[stage] for ranks in self.schedule.placement} - {self.rank}
            values += [(peer, buffer) for peer in peers for buffer in module.buffers()]
        for peer, tensor in values:
            sent = tensor.contiguous()
            if self.rank < peer:
                dist.send(sent, group=self.group, group_dst=peer)
            else:
                dist.recv(sent, group=self.group, group_src=peer)
                tensor.copy_(sent)

    def _clear_main_grads(self, copies: Copies) -> list[tuple[Tensor, Tensor]]:
        """Zero the `main_grad` of copies, which a step sums over them; return each with what it had."""
        found = [getattr(copy.parameter, "main_grad", None) for peer_copies in copies.values() for copy in peer_copies]
        earlier = [(main_grad, main_grad.clone()) for main_grad in found if main_grad is not None]
        for main_grad, _ in earlier:
            main_grad.zero_()
        return earlier

    @torch.no_grad()
    def _sum(self, copies: Copies, part_of: Callable[[nn.Parameter], nn.Parameter]) -> None:
        for peer, peer_copies in copies.items():
            gradients = [copy.gradient(part_of) for copy in peer_copies if copy.parameter.requires_grad]
            for own, theirs in zip(gradients, self._exchange(peer, gradients), strict=True):
                own += theirs

    def _exchange(self, peer: int, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Send tensors to a rank, and yield those that it sends, of the same shapes; some at a time."""
        rest = deque(tensors)
        while rest:
            bucket = [rest.popleft()]
            while rest and rest[0].dtype == bucket[0].dtype and sum(t.numel() for t in bucket) < BUCKET:
                bucket.append(rest.popleft())
            own = torch.cat([t.reshape(-1) for t in bucket])
            theirs = torch.empty_like(own)
            send = dist.P2POp(dist.isend, own, group=self.group, group_peer=peer)
            receive = dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer)
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            for t, part in zip(bucket, theirs.split([t.numel() for t in bucket]), strict=True):
                yield part.view(t.shape)

    # A step

    def _check(self, inputs: Sequence[Any], targets: Sequence[Any] | None, copies: Copies) -> None:
        """Raise on all ranks what is wrong on some rank: the others would wait for it."""
        if _is_capturing(self.device):  # nothing waits for another rank here
            self._check_here(inputs, targets)
            _check_gradients(copies)
            return
        self.on_begin("agreement on the micro-batches")
        problem: Exception | None = None
        try:
            self._check_here(inputs, targets)
            _check_gradients(copies)
        except (RuntimeError, TypeError, ValueError) as error:
            problem = error
        is_wrong = torch.tensor(float(problem is not None), device=self.device)
        dist.all_reduce(is_wrong, dist.ReduceOp.MAX, group=self.group)
        if not is_wrong.item():
            return
        for rank, found in enumerate(all_gather_messages(problem, Exception | None, self.group)):
            if found is not None:
                raise type(found)(f"rank {rank}: {found}")

    def _check_here(self, inputs: Sequence[Any], targets: Sequence[Any] | None) -> None:
        if self.is_last and targets is None:
            raise ValueError("targets are needed where the last stage is")
        for name, given in (("inputs", inputs), ("targets", targets)):
            if given is not None and len(given) != self.schedule.n_micro_batches:
                raise ValueError(
                    f"{name} must be those of {self.schedule.n_micro_batches} micro-batches, as the schedule has, "
                    f"not of {len(given)}"
                )
        for micro_batch in inputs:
            _tensors(micro_batch)

    def _share(self, losses: Mapping[int, Tensor]) -> Tensor:
        """Return the losses of all ranks: each is on one, and zero on the others."""
        self.on_begin("sum of the losses")
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        shared = torch.stack(
            [losses[m].double() if m in losses else zero for m in range(self.schedule.n_micro_batches)]
        )
        dist.all_reduce(shared, group=self.group)
        return shared


class _Step:
    """The state of one step: what was received, what backward passes need, and sends that may be under way."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Any], targets: Sequence[Any] | None, trains: bool):
        self.p, self.inputs, self.targets, self.trains = pipeline, inputs, targets, trains
        self.last = pipeline.schedule.n_stages - 1
        self.signatures = [tuple((t.shape, t.dtype) for t in _tensors(micro_batch)) for micro_batch in inputs]
        self.activations: dict[Key, _Message] = {}  # that a stage reads
        self.gradients: dict[Key, _Message] = {}  # of a stage's outputs
        self.to_send: dict[Action, Sequence[Tensor]] = {}
        self.saved: dict[Key, tuple[Sequence[Tensor], Sequence[GradientEdge]]] = {}
        self.wgrads: dict[Key, DeferredWgrads] = {}
        self.sent: dict[tuple[int, ActionType], deque[_Message]] = defaultdict(deque)
        self.losses: dict[int, Tensor] = {}
        self.run_one = {
            ActionType.FORWARD: self.forward,
            ActionType.FULL_BACKWARD: self.backward,
            ActionType.BACKWARD_INPUT: self.input_gradient,
            ActionType.BACKWARD_WEIGHT: self.weight_gradient,
            ActionType.SEND_F: self.send_activations,
            ActionType.RECV_F: self.receive_activations,
            ActionType.SEND_B: self.send_gradients,
            ActionType.RECV_B: self.receive_gradients,
        }

    def run(self, actions: Sequence[Action]) -> dict[int, Tensor]:
        """Run a rank's actions, and return the losses of the micro-batches whose last stage it has."""
        for action in actions:
            self.p.on_begin(describe(action))
            work = [self.work_of(part) for part in parts(action)]
            if len(work) == 1:
                work[0]()
            else:
                forward, backward = work  # whose first exchange the forward pass's first layers hide
                run_interleaved(backward, forward)
        for messages in self.sent.values():
            for message in messages:
                message.wait()
        return self.losses

    def work_of(self, action: Action) -> Callable[[], None]:
        """Return what runs an action that is no pair."""
        assert action.microbatch_index is not None
        return partial(self.run_one[action.computation_type], action.stage_index, action.microbatch_index)

    # Computation

    def forward(self, stage: int, micro_batch: int) -> None:
        key = stage, micro_batch
        inputs = _tensors(self.inputs[micro_batch]) if stage == 0 else self.activations.pop(key).wait()
        deferrable = DeferrableLinears() if self.trains and key in self.p._split else nullcontext()
        with torch.set_grad_enabled(self.trains), deferrable:
            outputs = _tensors(self.p.stages[stage](*inputs), f"stage {stage}")
            if stage == self.last:
                assert self.p.loss is not None
                assert self.targets is not None
                loss = self.p.loss(*outputs, self.targets[micro_batch])
                outputs, self.losses[micro_batch] = (loss,), loss.detach()
            else:
                self.pass_on(stage, stage + 1, micro_batch, outputs)
        if self.trains:
            edges = [get_gradient_edge(t) for t in outputs if t.requires_grad]
            self.saved[key] = [t for t in inputs if t.requires_grad and stage > 0], edges

    def backward(self, stage: int, micro_batch: int) -> None:
        key = stage, micro_batch
        inputs, edges = self.saved.pop(key)
        gradients = None if stage == self.last else self.gradients.pop(key).wait()
        if edges:
            with self.adding(stage), without_autocast(self.p.device):
                torch.autograd.backward(edges, gradients)
        if stage > 0:
            found = [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]
            self.pass_on(stage, stage - 1, micro_batch, found)

    def input_gradient(self, stage: int, micro_batch: int) -> None:
        with defer_wgrads() as self.wgrads[stage, micro_batch]:
            self.backward(stage, micro_batch)

    def weight_gradient(self, stage: int, micro_batch: int) -> None:
        with self.adding(stage), without_autocast(self.p.device):
            self.wgrads.pop((stage, micro_batch)).compute()

    def adding(self, stage: int) -> AbstractContextManager[None]:
        """The context of a stage's backward pass, whose GEMMs add to the gradients of the micro-batches before."""
        return added_in_place(self.p.stages[stage].parameters())

    # Communication

    def pass_on(self, stage: int, to: int, micro_batch: int, tensors: Sequence[Tensor]) -> None:
        """Give activations to the next stage, or gradients to the stage before: here, or by the send that follows."""
        schedule, is_forward = self.p.schedule, to > stage
        if schedule.rank(to, micro_batch) != self.p.rank:
            kind = ActionType.SEND_F if is_forward else ActionType.SEND_B
            self.to_send[Action(stage, kind, micro_batch)] = tensors
            return
        if is_forward:
            own = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
            self.activations[to, micro_batch] = _Message(own, [])
        else:
            self.gradients[to, micro_batch] = _Message(tensors, [])

    def send_activations(self, stage: int, micro_batch: int) -> None:
        tensors = self.to_send.pop(Action(stage, ActionType.SEND_F, micro_batch))
        peer, form, key = self.p.schedule.rank(stage + 1, micro_batch), _form(tensors), self.key(stage, micro_batch)
        agreed = self.p._forms.get(key)
        if agreed is None:
            self.check_may_agree(micro_batch)
            self.p._forms[key] = form
            send_message(form, Form, self.p.group, peer)
        elif agreed != form:
            raise ValueError(
                f"stage {stage} must return tensors of the same shapes and dtypes for micro-batches of the same shape: "
                f"it returned {_describe(agreed)} before, and {_describe(form)} for micro-batch {micro_batch}"
            )
        self.send(stage, ActionType.SEND_F, peer, tensors)

    def send_gradients(self, stage: int, micro_batch: int) -> None:
        tensors = self.to_send.pop(Action(stage, ActionType.SEND_B, micro_batch))
        self.send(stage, ActionType.SEND_B, self.p.schedule.rank(stage - 1, micro_batch), tensors)

    def send(self, stage: int, kind: ActionType, peer: int, tensors: Sequence[Tensor]) -> None:
        under_way = self.sent[stage, kind]
        while len(under_way) >= SENDS_IN_FLIGHT:
            under_way.popleft().wait()
        own = [t.detach().contiguous() for t in tensors]
        under_way.append(_Message(own, [dist.isend(t, group=self.p.group, group_dst=peer) for t in own]))

    def receive_activations(self, stage: int, micro_batch: int) -> None:
        peer, key = self.p.schedule.rank(stage - 1, micro_batch), self.key(stage - 1, micro_batch)
        if key not in self.p._forms:
            self.check_may_agree(micro_batch)
            self.p._forms[key] = receive_message(Form, self.p.group, peer)
        form = self.p._forms[key]
        tensors = [torch.empty(shape, dtype=dtype, device=self.p.device) for shape, dtype, _ in form]
        message = self.receive(peer, tensors)
        for t, (_, _, has_gradient) in zip(tensors, form, strict=True):
            t.requires_grad_(has_gradient and self.trains)
        self.activations[stage, micro_batch] = message

    def receive_gradients(self, stage: int, micro_batch: int) -> None:
        form = self.p._forms[self.key(stage, micro_batch)]
        wanted = [(shape, dtype) for shape, dtype, has_gradient in form if has_gradient]
        tensors = [torch.empty(shape, dtype=dtype, device=self.p.device) for shape, dtype in wanted]
        self.gradients[stage, micro_batch] = self.receive(self.p.schedule.rank(stage + 1, micro_batch), tensors)

    def receive(self, peer: int, tensors: Sequence[Tensor]) -> _Message:
        return _Message(tensors, [dist.irecv(t, group=self.p.group, group_src=peer) for t in tensors])

    def check_may_agree(self, micro_batch: int) -> None:
        """Refuse to agree on what is sent while a CUDA graph is captured.

        Raises:
            RuntimeError: a CUDA graph is captured.
        """
        if _is_capturing(self.p.device):
            shapes = ", ".join(f"{list(shape)} {dtype}" for shape, dtype in self.signatures[micro_batch])
            raise RuntimeError(
                "a pipeline's step can be captured in a CUDA graph after an eager one with micro-batches of the same "
                f"shapes, but none has run with {shapes}"
            )

    def key(self, stage: int, micro_batch: int) -> tuple[int, int, Hashable]:
        """What the form of a stage's outputs depends on."""
        return stage, self.p.schedule.direction(micro_batch), (self.trains, self.signatures[micro_batch])


class _Message(NamedTuple):
    """Tensors that are sent or received, and the operations to wait for."""

    tensors: Sequence[Tensor]
    works: Sequence[dist.Work | None]

    def wait(self) -> Sequence[Tensor]:
        for work in self.works:
            if work is not None:
                work.wait()
        return self.tensors


class _Copy(NamedTuple):
    """A parameter that has a copy on another rank; a tied one counts as the first stage's."""

    stage: int
    name: str
    parameter: nn.Parameter

    def __str__(self) -> str:
        p = self.parameter
        frozen = "" if p.requires_grad else ", frozen"
        return f"{self.name} of stage {self.stage}: {list(p.shape)} {p.dtype}{frozen}"

    def gradient(self, part_of: Callable[[nn.Parameter], nn.Parameter]) -> Tensor:
        part = part_of(self.parameter)
        found = gradient_of(part)
        if found is None:
            found = part.grad = torch.zeros_like(part)
        if not isinstance(found, Tensor):
            raise TypeError(f"{self.name} of stage {self.stage} has a scaled gradient, which copies cannot sum")
        return found


Copies = Mapping[int, Sequence[_Copy]]  # rank → the copies that it has, too


def _have_same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _check_gradients(copies: Copies) -> None:
    """Refuse a gradient that a step would sum over copies again.

    Raises:
        RuntimeError: a copy has one already.
    """
    for copy in (copy for peer_copies in copies.values() for copy in peer_copies):
        found = gradient_of(copy.parameter)
        if found is not None and found is not getattr(copy.parameter, "main_grad", None):
            raise RuntimeError(
                f"{copy.name} of stage {copy.stage} has a gradient already, which would be summed over its copies "
                "again: call zero_grad(set_to_none=True) before each step"
            )


class _Description(NamedTuple):
    """What a rank tells the others before any work."""

    schedule: str
    problem: str | None
    copies: Mapping[int, Sequence[str]] = {}


def _check_agreement(ranks: Sequence[_Description]) -> None:
    """Refuse what does not fit on some rank, or between two.

    Raises:
        ValueError: something does not fit.
    """
    for rank, own in enumerate(ranks):
        if own.schedule != ranks[0].schedule:
            raise ValueError(f"schedule and tied must be the same on all ranks: rank {rank} differs from rank 0")
        if own.problem is not None:
            raise ValueError(f"rank {rank}: {own.problem}")
    for rank, own in enumerate(ranks):
        for peer, here in own.copies.items():
            there = ranks[peer].copies.get(rank, ())
            for pair in zip_longest(here, there, fillvalue="none"):
                if pair[0] != pair[1]:
                    raise ValueError(
                        f"ranks {rank} and {peer} must have copies of the same parameters, but they have "
                        f"{' and '.join(pair)}"
                    )


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _tensors(value: Any, name: str = "a micro-batch") -> tuple[Tensor, ...]:
    """Return a tensor or a tuple of tensors as a tuple.

    Raises:
        TypeError: it is neither.
    """
    found = value if isinstance(value, tuple) else (value,)
    for t in found:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor or a tuple of tensors, but has {type(t).__name__}")
    return found


def _form(tensors: Sequence[Tensor]) -> Form:
    return tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def _describe(form: Form) -> str:
    described = (f"{list(shape)} {dtype}{'' if has_grad else ' without a gradient'}" for shape, dtype, has_grad in form)
    return ", ".join(described) or "nothing"


def _names(what: str, numbers: Sequence[int] | Mapping[int, Any]) -> str:
    return f"{what}{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers)) or 'none'}"
