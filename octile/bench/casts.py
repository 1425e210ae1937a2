"""`octile bench casts`: quantization and other memory-bound operators vs. a copy of the same number of bytes.

The bytes are those of inputs and outputs, each counted once, however often the kernel reads or writes them. Each row
has its own copy, which is measured in turn with the operator and in the same way, from a cold L2 cache. So what a
kernel costs before it moves its first byte, on an H200 some 1 µs, is part of the copy's time as of the operator's.

No kernel can make some operators as fast as a copy: those that multiply matrices, and those whose results depend on all
rows. On a GPU a second row compares them with a bound, the larger of the bytes' and the FLOPs' time:

    bytes    the time of a copy of the bytes, and of those that have to be read a second time
    FLOPs    the FLOPs of the operator's GEMMs / the speed of a large BF16 GEMM of torch
    passes   to either: for each pass over the rows but the first, the time of the smallest copy, of one element

All three times are measured in the same run. A pass is a kernel that needs a result of all programs of the one before.
What is counted (T tokens of width D, E experts):

    gate                     6·T·D·E FLOPs: an FP32 weight is three BF16 terms (`octile.ops.gate`)
    gate backward            18·T·D·E FLOPs: six products of terms for dx, three for the weight; two passes, since the
                             gradient of the weight is a sum over all tokens
    RMSNorm backward,        two passes: a sum over all rows
    norms of gradients
    balance of sequences     two passes: a sum over the tokens of a sequence
    counts of tokens         two passes: counts of blocks of entries, and their sums
    routing plan             two passes: counts of blocks of entries, and the rows, which follow from all counts before
    quantize all×all         two passes, which both read x: the maximum of all elements precedes every result
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.bench import goals
from octile.bench.kernel_time import work_seconds
from octile.bench.rows import LEGEND, Row, compare, table_with
from octile.models.config import ModelConfig
from octile.models.meta import meta_model
from octile.nn.dispatcher import LocalDispatcher, RoutingPlan
from octile.ops.adamw import adamw
from octile.ops.cross_entropy import cross_entropy, cross_entropy_backward
from octile.ops.gate import gate, gate_backward
from octile.ops.gradient_norms import gradient_norms
from octile.ops.norm import rms_norm, rms_norm_backward, rms_norm_quantize
from octile.ops.permute import count_tokens, permute, routing_plan, unpermute, unpermute_backward
from octile.ops.quantize import dequantize, quantize, quantize_with_scale
from octile.ops.rope import latent_keys, latent_keys_backward, rotate_
from octile.ops.sequence_balance import sequence_balance, sequence_balance_backward
from octile.ops.swiglu import (
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
    swiglu_quantize_and_save,
)
from octile.ops.transpose import quantize_and_transpose, quantize_rows_and_columns, requantize_transposed
from octile.train.config import preset

GPU_SHAPES, CPU_SHAPES = ((4096, 7168), (8192, 7168), (16384, 7168)), ((2048, 1024),)
NARROW_ROWS = {"cuda": 2**25, "cpu": 2**18}  # elements; on a GPU more than its L2 cache holds
HEADS = {"cuda": ((65536, 8192), (32768, 32768)), "cpu": ((512, 4096),)}  # tokens and vocabulary
GATES = {  # tokens, and the preset whose gate it is
    "cuda": ((32768, "small"), (32768, "medium"), (16384, "v3_671b")),
    "cpu": ((512, "tiny"),),
}
CHOSEN, EXPERTS = 8, 64  # experts per token, and per layer
ALIGNMENT = 2**21  # bytes; with source and target aligned to 512 only, a copy took up to 15% longer on an H200
SMALL_PART = 16  # what a copy's bytes are rounded up by is less than 1 / SMALL_PART of them
BLOCKS = {"1×128": (1, 128), "128×1": (128, 1), "128×128": (128, 128)}

TWO_PASSES = {
    "gate backward", "RMSNorm backward", "norms of gradients", "balance of sequences", "counts of tokens",
    "routing plan", "quantize all×all",
}  # fmt: skip
READ_TWICE = {"quantize all×all"}
GATE_GEMMS = {"gate": 3, "gate backward": 9}  # GEMMs of BF16 terms

BETWEEN_GEMMS = {  # operators of a layer
    "quantize 1×128", "1×128 and transposed", "requantize 1×128, transposed", "128×128 and transposed", "SwiGLU, 1×128",
    "SwiGLU, 1×128, inputs saved", "SwiGLU backward, 1×128 and transposed", "RMSNorm, 1×128",
    "RMSNorm, 1×128 and high precision", "RMSNorm backward", "permute to 8 experts", "unpermute, sums of 8", "SwiGLU",
    "SwiGLU backward", "RMSNorm", "weighted sums of 8", "weighted sums of 8, backward",
}  # fmt: skip
NARROW_COLUMNS = (128, 256, 512, 1024)


class Operator(NamedTuple):
    """An operator with its inputs.

    Attributes:
        what: its name, as committed results have it.
        call: the operator.
        inputs: its tensors.
        goal: id of the goal in `octile.bench.goals` that judges its rows; None: none does.
    """

    what: str
    call: Callable[..., Tensor | Sequence[Tensor]]
    inputs: tuple[Tensor, ...]
    goal: str | None = None


class Peak(NamedTuple):
    """What bounds operators on this GPU: FLOP/s of a large BF16 GEMM, and seconds of the smallest copy."""

    flops: float
    smallest_copy: float


def rows() -> Iterator[Row]:
    """Measure each operator and yield its row; inputs are BF16 on a GPU, FP32 on a CPU."""
    gpu = torch.cuda.is_available()
    device, dtype, shapes = ("cuda", torch.bfloat16, GPU_SHAPES) if gpu else ("cpu", torch.float32, CPU_SHAPES)
    cases = {f"{m}×{k}": partial(_cases, m, k) for m, k in shapes}
    for k in NARROW_COLUMNS:
        cases[f"{NARROW_ROWS[device] // k}×{k}"] = partial(_narrow_cases, NARROW_ROWS[device] // k, k)
    for m, v in HEADS[device]:
        cases[f"{m}×{v}"] = partial(_loss_cases, m, v)
    for t, name in GATES[device]:
        model = preset(name).model
        cases[f"{t}×{model.n_routed_experts} of {model.num_experts_per_tok}"] = partial(_gate_cases, t, model)
    many = "small" if gpu else "tiny"  # a preset
    cases[f"parameters of {many}"] = partial(_optimizer_cases, _parameter_shapes(many))
    peak = _measured_peak() if gpu else None
    for case, make in cases.items():
        torch.manual_seed(0)
        for what, operator, inputs, goal in make(device, dtype):
            outputs = operator(*inputs)
            moved = sum(t.nbytes for t in (*inputs, *([outputs] if isinstance(outputs, Tensor) else outputs)))
            source, target = halves(moved, device)
            copy = partial(target.copy_, source)
            times = work_seconds({"operator": partial(operator, *inputs), "copy": copy}, rounds=20)
            speed, peer = (n / times[name] / 1e9 for name, n in (("operator", moved), ("copy", 2 * source.nbytes)))
            yield compare(case, what, speed, "GB/s", "copy", peer, goal)
            if peak and (bound := bound_of(what, inputs, moved, moved / peer / 1e9, peak)):
                yield compare(case, what, speed, "GB/s", bound[0], moved / bound[1] / 1e9, goal)


def bound_of(what: str, inputs: Sequence[Tensor], moved: int, copy: float, peak: Peak) -> tuple[str, float] | None:
    """Return what bounds an operator, bytes or FLOPs, and its least time in seconds; None: a copy alone.

    Args:
        what, inputs: the operator.
        moved: its bytes.
        copy: seconds of a copy of as many bytes.
        peak: what bounds operators on this GPU.
    """
    flops = _flops(what, inputs)
    if not flops and what not in TWO_PASSES | READ_TWICE:
        return None
    again = inputs[0].nbytes if what in READ_TWICE else 0
    times = {goals.BOUND_OF_BYTES: copy * (moved + again) / moved, goals.BOUND_OF_FLOPS: flops / peak.flops}
    larger = max(times, key=times.__getitem__)
    return larger, times[larger] + (peak.smallest_copy if what in TWO_PASSES else 0.0)


def _flops(what: str, inputs: Sequence[Tensor]) -> int:
    """Count the FLOPs of the operator's GEMMs of BF16 terms."""
    if what not in GATE_GEMMS:
        return 0
    x, weight = inputs[:2] if what == "gate" else inputs[4:6]
    return 2 * x.numel() * len(weight) * GATE_GEMMS[what]


def _measured_peak() -> Peak:
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source, target = torch.zeros(2, 1, device="cuda")
    calls = {"gemm": lambda: a @ b.mT, "smallest copy": lambda: target.copy_(source)}
    times = work_seconds(calls, rounds=20)
    return Peak(2 * side**3 / times["gemm"], times["smallest copy"])


def halves(moved: int, device: str) -> tuple[Tensor, Tensor]:
    """Allocate the source and the target of a copy of about this many bytes: of equal size and aligned.

    Half of the bytes are rounded up to a multiple of a large power of two: a copy of any number of bytes has a second
    kernel for its last ones, which takes 2.4 µs on an H200.
    """
    half = -(-moved // 2)
    unit = min(ALIGNMENT, 1 << max((half // SMALL_PART).bit_length() - 1, 0))
    half = -(-half // unit) * unit
    distance = -(-half // ALIGNMENT) * ALIGNMENT
    buffer = torch.empty(2 * distance + ALIGNMENT, dtype=torch.uint8, device=device)
    first = -buffer.data_ptr() % ALIGNMENT
    return buffer[first : first + half], buffer[first + distance : first + distance + half]


def show(rows: Sequence[Row]) -> str:
    """Format the table, and on a GPU the verdicts on the goals."""
    verdicts = goals.casts_verdicts(rows) if torch.cuda.is_available() else ""
    return "\n\n".join(filter(None, (table_with(LEGEND, rows), verdicts)))


def _cases(m: int, k: int, device: str, dtype: torch.dtype) -> list[Operator]:
    """Return the operators with their inputs, by the names that committed results have in `what`."""
    x = torch.randn(m, k, device=device, dtype=dtype)
    cases: list[Operator] = []
    for name, block in {**BLOCKS, "all×all": tuple(x.shape)}.items():
        goal = goals.WRITE_ONCE if name in ("1×128", "128×128") else None  # the others are of other recipes
        cases += _both_ways(name, x, block, "e4m3", goal, None)
    cases += _both_ways("1×128 E5M6", x, BLOCKS["1×128"], "e5m6", goals.WRITE_ONCE, goals.WRITE_ONCE)
    tiles = quantize(x, 1, 128, "e4m3", False)
    scale = torch.ones(1, device=x.device)
    gate, up, dh = torch.randn_like(x), torch.randn_like(x), torch.randn_like(x)
    saved = quantize(torch.stack((gate, up)), 1, 128, "e4m3", False)
    weight, rstd = torch.randn(x.shape[1], device=x.device, dtype=x.dtype), torch.rand(len(x), device=x.device)
    row_ids, order, _, _ = _plan(len(x) // CHOSEN, x.device)
    tokens, shares = quantize(x[: len(row_ids)], 1, 128, "e4m3", True), torch.rand(row_ids.shape, device=x.device)
    return [
        *cases,
        Operator("quantize, scale given", lambda x, s: quantize_with_scale(x, s, "e4m3"), (x, scale)),
        Operator(
            "1×128 and transposed", lambda x: quantize_rows_and_columns(x, "e4m3", False), (x,), goals.WRITE_TWICE
        ),
        Operator("requantize 1×128, transposed", lambda *q: requantize_transposed(*q, False), tiles, goals.WRITE_TWICE),
        Operator("128×128 and transposed", lambda x: quantize_and_transpose(x, "e4m3", False), (x,), goals.WRITE_TWICE),
        Operator("SwiGLU, 1×128", lambda g, u: swiglu_quantize(g, u, "e4m3", False), (gate, up), goals.WRITE_ONCE),
        Operator(
            "SwiGLU, 1×128, inputs saved",
            lambda g, u: swiglu_quantize_and_save(g, u, "e4m3", False, "e4m3", False),
            (gate, up),
            goals.WRITE_TWICE,
        ),
        Operator(
            "SwiGLU backward, 1×128 and transposed",
            lambda d, k, s: swiglu_backward_quantize(d, *k, *s, None, "e4m3", False, "e4m3", True),
            (dh, *saved),
            goals.WRITE_TWICE,
        ),
        Operator(
            "RMSNorm, 1×128", lambda x, w: rms_norm_quantize(x, w, 1e-6, "e4m3", False), (x, weight), goals.WRITE_ONCE
        ),
        Operator(
            "RMSNorm, 1×128 and high precision",
            lambda x, w: rms_norm_quantize(x, w, 1e-6, "e4m3", False, True),
            (x, weight),
            goals.WRITE_TWICE,
        ),
        Operator("RMSNorm backward", rms_norm_backward, (dh, x, weight, rstd), goals.HIGH_PRECISION),
        Operator("SwiGLU", swiglu, (gate, up), goals.HIGH_PRECISION),
        Operator("SwiGLU backward", swiglu_backward, (dh, gate, up), goals.HIGH_PRECISION),
        Operator("RMSNorm", lambda x, w: rms_norm(x, w, 1e-6), (x, weight), goals.HIGH_PRECISION),
        Operator(f"permute to {CHOSEN} experts", permute, (*tokens, row_ids, order), goals.MOVES),
        Operator(f"unpermute, sums of {CHOSEN}", unpermute, (x, row_ids), goals.MOVES),
        Operator(
            f"weighted sums of {CHOSEN}",
            lambda x, p, w: unpermute(x, p, None, w),
            (x, row_ids, shares),
            goals.HIGH_PRECISION,
        ),
        Operator(
            f"weighted sums of {CHOSEN}, backward",
            unpermute_backward,
            (dh[: len(row_ids)], x, row_ids, shares),
            goals.HIGH_PRECISION,
        ),
        *_optimizer_cases([x.shape], device),
    ]


def _narrow_cases(m: int, k: int, device: str, dtype: torch.dtype) -> list[Operator]:
    """Return the operators between GEMMs for narrow rows, and the rotary embedding of heads of 128 channels."""
    between = [case._replace(goal=goals.NARROW) for case in _cases(m, k, device, dtype) if case.what in BETWEEN_GEMMS]
    heads, n = k // 128, 96  # of 128 channels 32 are rotary
    q, kv, dv = (torch.randn(1, m, heads, width, device=device, dtype=dtype) for width in (128, n, 128))
    k_rope, angles = (torch.randn(1, m, 32, device=device, dtype=dtype), torch.rand(m, 16, device=device))
    return [
        *between,
        Operator("rotate in place", _rotate, (q[..., n:], angles, angles), goals.NARROW),
        Operator("latent keys", lambda *tensors: latent_keys(*tensors, n), (kv, k_rope, angles, angles), goals.NARROW),
        Operator("latent keys backward", latent_keys_backward, (q, dv, angles, angles), goals.NARROW),
    ]


def _loss_cases(m: int, v: int, device: str, dtype: torch.dtype) -> list[Operator]:
    """Return what is done with the logits of a head."""
    logits, labels = torch.randn(m, v, device=device, dtype=dtype), torch.randint(v, (m,), device=device)
    dlosses, lse = torch.rand(m, device=device), cross_entropy(logits, labels)[1]
    return [
        Operator("cross-entropy", cross_entropy, (logits, labels), goals.LOSS),
        Operator("cross-entropy backward", cross_entropy_backward, (dlosses, logits, labels, lse), goals.LOSS),
    ]


def _gate_cases(t: int, model: ModelConfig, device: str, dtype: torch.dtype) -> list[Operator]:
    """Return what a gate does, its GEMMs among it, and the plan of where the tokens' rows go."""
    e, k, batch = model.n_routed_experts, model.num_experts_per_tok, max(t // 4096, 1)
    x = torch.randn(t, model.hidden_size, device=device, dtype=dtype)
    weight, bias = 0.006 * torch.randn(e, model.hidden_size, device=device), torch.zeros(e, device=device)
    best = 2 if model.topk_group < model.n_group else 1
    choice = k, model.n_group, model.topk_group, best
    weighting = "sigmoid", True, 2.5
    _, experts, logits = gate(x, weight, bias, *choice, *weighting)
    load, f = count_tokens(experts, e)[0], sequence_balance(logits, None, k, batch, "sigmoid")[1]
    dweights, dlogits, dloss = torch.randn(t, k, device=device), torch.randn_like(logits), torch.ones((), device=device)
    return [
        Operator("gate", lambda *tensors: gate(*tensors, *choice, *weighting), (x, weight, bias), goals.GATE),
        Operator(
            "gate backward",
            lambda *tensors: gate_backward(*tensors, *weighting),
            (dweights, dlogits, logits, experts, x, weight),
            goals.GATE,
        ),
        Operator(
            "balance of sequences", lambda x: sequence_balance(x, None, k, batch, "sigmoid"), (logits,), goals.ROUTING
        ),
        Operator(
            "balance of sequences, backward",
            lambda *tensors: sequence_balance_backward(*tensors, "sigmoid"),
            (dloss, logits, f),
            goals.ROUTING,
        ),
        Operator("counts of tokens", lambda experts: count_tokens(experts, e), (experts,), goals.ROUTING),
        Operator("routing plan", routing_plan, (experts, load), goals.ROUTING),
    ]


def _optimizer_cases(shapes: Sequence[Sequence[int]], device: str, _: torch.dtype | None = None) -> list[Operator]:
    """Return what the optimizer does in a step, with BF16 moments, for parameters of these shapes."""
    weights, gradients, m, v = ([torch.randn(*shape, device=device) * 1e-2 for shape in shapes] for _ in range(4))
    moments = [t.bfloat16() for t in m], [t.square_().bfloat16() for t in v]
    corrections = torch.tensor([[3e-3, 0.5, 0.9997]] * len(shapes), device=device)
    return [
        Operator(
            "AdamW, BF16 moments",
            _adamw_step,
            (*weights, *gradients, *moments[0], *moments[1], corrections),
            goals.MOVES,
        ),
        Operator(
            "norms of gradients", lambda *gradients: gradient_norms(list(gradients)), tuple(gradients), goals.MOVES
        ),
    ]


def _parameter_shapes(name: str) -> list[torch.Size]:
    return [parameter.shape for parameter in meta_model(preset(name).model).parameters()]


def _plan(tokens: int, device: torch.device) -> RoutingPlan:
    """Return where the rows of tokens go, for random experts."""
    experts = torch.rand(tokens, EXPERTS, device=device).topk(CHOSEN).indices
    return LocalDispatcher().plan(experts, experts.flatten().bincount(minlength=EXPERTS))


def _adamw_step(*tensors: Tensor) -> list[Tensor]:
    """Make a step of the optimizer and return the tensors that it writes."""
    *states, corrections = tensors
    n = len(corrections)
    weights, gradients, m, v = (states[i * n : (i + 1) * n] for i in range(4))
    adamw(weights, gradients, m, v, [], corrections, 0.9, 0.95, 1e-8)
    return [*weights, *m, *v]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotate_(x, cos, sin)
    return x


def _both_ways(
    name: str, x: Tensor, block: Sequence[int], fmt: str, goal: str | None, dequantize_goal: str | None
) -> list[Operator]:
    power_of_2 = fmt == "e5m6"  # as in the recipe
    return [
        Operator(f"quantize {name}", lambda x: quantize(x, *block, fmt, power_of_2), (x,), goal),
        Operator(
            f"dequantize {name}",
            lambda *q: dequantize(*q, *block, x.dtype),
            quantize(x, *block, fmt, power_of_2),
            dequantize_goal,
        ),
    ]
