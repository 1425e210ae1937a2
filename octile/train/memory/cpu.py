"""Memory that the ranks of a run on this machine are going to need on a CPU.

Linux ends a process that takes more memory than there is with SIGKILL, so a run must be refused before it begins.
`estimate_need` passes a batch through the model on torch's meta device, which allocates nothing. It adds up the tensors
that would live at the same time: those of a rank's own stages, for as many micro-batches as its schedule has in flight.
The reference operators' own temporary tensors are seen only of attention and of GEMMs, and the allocator's
fragmentation is not; RESERVE and the two factors stand for them. They were fitted to measured runs
(benchmarks/history/cpu-memory).

A run of `octile compare` has no best model, but for some steps a second set of gradients, which takes as much.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octile.kernels import cpu
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.models.stages import ModelStage, split_stages, with_stages
from octile.nn.moe import share_of_experts
from octile.ops.attention import attention, attention_backward
from octile.ops.grouped import grouped_matmul_nt, grouped_matmul_nt_out, grouped_wgrad, grouped_wgrad_out
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from octile.ops.sparse_attention_weights import sparse_attention_weights
from octile.optim import AdamW
from octile.optim.muon_update import temporary_bytes
from octile.optim.state import has_scales
from octile.parallel.schedules import held_activations
from octile.plan.muon import matrices as muon_matrices
from octile.train.config import TrainConfig
from octile.train.model import converted_meta_model
from octile.train.optimizer import make_optimizer
from octile.train.pipeline_layout import make_pipeline_schedule, pipeline_layers

RESERVE = 400 * 10**6  # bytes of a process: libraries that are loaded later, data preparation, reports
TRANSIENT_FACTOR = 1.3  # memory of a pass on a CPU, over the tensors that are counted
STAGES_FACTOR = 2.1  # the same on a rank with several stages, whose tensors of other sizes leave more gaps
BYTES_PER_TOKEN = 24  # of a step's batch: position, token, and a copy of the micro-batch
MAX_TOKENS = 2**20  # of the counted batch; a larger one is computed from it
# operators whose references have large tensors, such as a matrix of scores that grows with the square of the sequence,
# or gathered rows: they are run
SPARSE = (sparse_attention_with_lse, sparse_attention_backward, sparse_attention_weights)
WITH_SCORES = {operator.overload: operator.reference for operator in (attention, attention_backward, *SPARSE)}
GEMMS_NT = (matmul_nt, matmul_nt_out, grouped_matmul_nt, grouped_matmul_nt_out)
K_OF_BLOCK = {op.overload: 1 for op in GEMMS_NT} | {op.overload: 0 for op in (grouped_wgrad, grouped_wgrad_out)}


@dataclass(frozen=True)
class CpuNeed:
    """The memory that ranks need on a CPU in addition to what their processes have already, in bytes, all together.

    Attributes:
        ranks: how many there are.
        weights: parameters, the copy of those with the lowest held-out loss, and their moving average.
        gradients: the parameters' gradients, and what is cached between steps, such as weights in FP8.
        optimizer: the optimizer's state.
        checkpoint: the copies from which several ranks write a checkpoint while they train on.
        data: the token ids and positions of a whole step.
        update: what the optimizer's step takes in addition, if it converts whole tensors.
        sequence: what the passes of micro-batches of one sequence take, of as many as are in flight at a time.
        at_once: the sequences of a micro-batch.
        made: the weights that each rank makes at first: all layers, also on the ranks of a pipeline.
        collected: the whole model, if rank 0 has only a part of it and collects it after the last step.
        read: what a resumed run takes at its start, while the tensors that it has read and their copies live.
    """

    ranks: int
    weights: int
    gradients: int
    optimizer: int
    checkpoint: int
    data: int
    update: int
    sequence: int
    at_once: int
    made: int
    collected: int
    read: int

    @property
    def fixed(self) -> int:
        """What every step needs, whatever its batch."""
        step = self.weights + self.gradients + self.optimizer + self.checkpoint + self.data
        return self.ranks * RESERVE + step

    @property
    def step(self) -> int:
        """What a step needs."""
        return self.fixed + max(self.at_once * self.sequence, self.update)

    @property
    def total(self) -> int:
        """What the start, a step or the end needs, whichever is most, so that the run can be resumed, too."""
        start = self.ranks * RESERVE + max(self.made, self.read)
        return max(start, self.step, self.fixed + self.collected)


def estimate_need(config: TrainConfig, ranks: Sequence[int] = (0,)) -> CpuNeed:
    """Estimate the memory of some of a run's ranks on a CPU, without allocating it.

    Raises:
        ValueError: a pipeline's schedule does not fit the ranks, the layers or the micro-batches.
    """
    recipe, parallel, schedule = config.load_recipe(), config.parallel, make_pipeline_schedule(config)
    layers = 1 if schedule is None else pipeline_layers(config, schedule)
    whole = share = converted_meta_model(config, recipe)
    if parallel.ep > 1:
        with share_of_experts(0, parallel.ep):
            share = meta_model(config.model)  # a recipe keeps the weights
    optimizer = make_optimizer(whole, whole, config.optim, recipe.optimizer)
    optimizer.step()  # without gradients; quantized weights are cached from the first step on

    counted = min(config.micro_batch_size, max(MAX_TOKENS // config.sequence_length, 1))
    tokens_BS = torch.empty(counted, config.sequence_length, dtype=torch.int64, device="meta")
    passes = _count_passes(whole, layers, tokens_BS, config.micro_batches)
    held = (passes[0].saved,) if schedule is None else held_activations(schedule, [stage.saved for stage in passes])
    weights = gradients = state = checkpoint = read = 0
    in_flight = 0.0
    for rank in ranks:
        pipeline_rank = rank // parallel.dp
        stages = (0,) if schedule is None else schedule.stages(pipeline_rank)
        model, own = with_stages(whole, layers, stages), _nbytes(with_stages(share, layers, stages))
        average = own // parallel.dp if config.optim.ema_decay else 0
        optimizer = make_optimizer(model, model, config.optim, recipe.optimizer)
        own_state = optimizer.state_bytes() // parallel.dp
        weights += 2 * own + average
        gradients += sum(passes[stage].stays for stage in stages) * own // _nbytes(model)
        state += own_state
        # first all but the best model is read and copied, then the best model
        read += own + own_state + average + max(own + own_state + average, 2 * own)
        checkpoint += 0 if parallel.ranks == 1 else 2 * own // parallel.dp + average + own_state
        factor = TRANSIENT_FACTOR if len(stages) == 1 else STAGES_FACTOR
        in_flight += factor * (held[pipeline_rank] + max(passes[stage].transient for stage in stages))
    has_parts = parallel.pp > 1 or parallel.ep > 1
    return CpuNeed(
        ranks=len(ranks),
        weights=weights,
        gradients=gradients,
        optimizer=state,
        checkpoint=checkpoint,
        update=len(ranks) * count_update(config),
        data=len(ranks) * config.batch_size // parallel.dp * config.sequence_length * BYTES_PER_TOKEN,
        sequence=int(in_flight / counted),
        at_once=config.micro_batch_size,
        made=len(ranks) * _nbytes(share),
        collected=_nbytes(whole) if has_parts and 0 in ranks else 0,
        read=read,
    )


class _Passes(NamedTuple):
    """The bytes of a stage's passes of a micro-batch.

    Attributes:
        saved: between the forward and the backward pass.
        transient: at most in addition, during one of them.
        stays: gradients, and what is cached between steps.
    """

    saved: int
    transient: int
    stays: int


def _count_passes(
    model: DeepseekV3, layers: int | Sequence[range], tokens_BS: Tensor, micro_batches: int
) -> list[_Passes]:
    """Count the bytes of the passes of a micro-batch through each stage, on the meta device."""
    model.train()
    found = []
    forms: list[_Form] = []  # of what the stage before returns
    for stage in split_stages(model, layers):
        with LiveTensors(model.state_dict().values()) as live:
            for _ in range(min(micro_batches, 2)):  # a second micro-batch begins with the gradients of the first
                before = live.now
                edges, returned = _forward(stage, tokens_BS, forms)
                saved = live.now - before
                given = [_empty(form) for form in returned if form.has_gradient]
                torch.autograd.backward(edges, None if stage.is_last else given)
                del edges, given
            found.append(_Passes(saved, live.peak - live.now - saved, live.now))
        forms = returned
    return found


def count_update(config: TrainConfig) -> int:
    """Count the bytes that the optimizer's step takes in addition on a rank; of a pipeline, with the mean stages.

    Formats with a scale are converted a whole tensor at a time, so that the largest one decides, which is counted on
    the meta device; others in small parts.
    """
    formats = config.load_recipe().optimizer
    if config.optim.name == "muon":
        return _count_muon(config)
    if not has_scales(formats):
        return 0
    largest = nn.Parameter(torch.empty_like(max(meta_model(config.model).parameters(), key=Tensor.numel)))
    optimizer = AdamW([largest], lr=0.0, formats=formats)
    largest.sum().backward()
    factor, skip = (torch.empty((), dtype=dtype, device="meta") for dtype in (torch.float32, torch.bool))
    with LiveTensors([largest]) as live:
        optimizer.step(skip=skip, gradient_scale=factor)
    return live.peak - live.now


def _count_muon(config: TrainConfig) -> int:
    schedule, ep = make_pipeline_schedule(config), config.parallel.ep
    held, stages = (1, 1) if schedule is None else (len(schedule.stages(0)), schedule.n_stages)
    experts, others = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for kind, shapes in muon_matrices(config.model).items():
        for shape, count in shapes.items():
            if kind == "routed experts":
                experts[shape] += -(-count * held // (stages * ep))
            else:
                others[shape] += -(-count * held // stages)
    return temporary_bytes(experts, others, config.parallel.dp)


class _Form(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    has_gradient: bool


def _empty(form: _Form) -> Tensor:
    return torch.empty(form.shape, dtype=form.dtype, device="meta")


def _forward(stage: ModelStage, tokens_BS: Tensor, forms: Sequence[_Form]) -> tuple[list[GradientEdge], list[_Form]]:
    """Run a stage's forward pass, of the last with the loss: the edges where its backward pass begins, and its outputs.

    Args:
        stage: on the meta device.
        tokens_BS: int64 [B, S].
        forms: the forms of the outputs of the stage before.
    """
    inputs = [_empty(form).requires_grad_(form.has_gradient) for form in forms] if forms else [tokens_BS]
    h_BSD, balance = stage(*inputs)
    returned = [_Form(t.shape, t.dtype, t.requires_grad) for t in (h_BSD, balance)]
    ends = [stage.loss(h_BSD, balance, tokens_BS)] if stage.is_last else [h_BSD, balance]
    return [get_gradient_edge(t) for t in ends if t.requires_grad], returned


def _nbytes(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators inside the context returned and that still live.

    Attributes:
        now, peak: the bytes that live now, and the most that lived at a time.
    """

    def __init__(self, before: Iterable[Tensor]) -> None:
        """
        Args:
            before: the tensors that lived before, which are not counted.
        """
        super().__init__()
        self.now = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._before = {id(storage): storage for storage in map(Tensor.untyped_storage, before)}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in WITH_SCORES:
            with self:
                returned = WITH_SCORES[func](*args, **(kwargs or {}))
        else:
            returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        if func in K_OF_BLOCK:
            self.peak = max(self.peak, self.now + _copies_of_gemm(args, returned, K_OF_BLOCK[func]))
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        if key in self._storages or key in self._before:
            return

        def forget(_: object) -> None:
            del self._storages[key]
            self.now -= nbytes

        self._storages[key] = weakref.ref(storage, forget)
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def _copies_of_gemm(args: Sequence[Any], returned: Tensor | None, along_k: int) -> int:
    """Count the bytes of the reference's copies in FP32: of the operands, and of the result if it has another dtype.

    `octile.kernels.cpu` makes none, but multiplies only E4M3 in blocks of 128 along K, and not on all processors.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    operands = [t for t in tensors if t.dtype.itemsize == 1]
    is_e4m3 = all(t.dtype == torch.float8_e4m3fn for t in operands)
    blocks = [arg for arg in args if isinstance(arg, tuple | list)]
    if cpu.can_multiply() and is_e4m3 and all(block[along_k] == 128 for block in blocks):
        return 0
    result = tensors[0] if returned is None else returned  # the first argument is `out`
    is_converted = returned is None or result.dtype != torch.float32
    return 4 * (sum(map(Tensor.numel, operands)) + is_converted * result.numel())
