"""Goals: the floor and the aim that octile's benchmarks are judged by, and the lines that say whether they are met.

A goal is missed if some of its cases were not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import geometric_mean

from octile.bench import drawn, shapes
from octile.bench.drawn import DrawnClass
from octile.bench.gemm_table import HOST
from octile.bench.rows import Row
from octile.bench.shapes import Case

COPY = "copy"  # a peer

# octile bench casts: ids of goals, which `octile.bench.casts` gives to its operators

WRITE_ONCE, WRITE_TWICE, MOVES, LOSS = "write once", "write twice", "moves", "loss"
HIGH_PRECISION, GATE, ROUTING, NARROW = "high precision", "gate", "routing", "narrow rows"
BOUND_OF_BYTES, BOUND_OF_FLOPS = "bound: bytes", "bound: FLOPs"  # peers of operators that no copy can be compared with
CASTS = {  # id: title, floor and aim of each one's speed vs. a copy
    WRITE_ONCE: ("quantization that writes once", 0.80, 0.92),
    WRITE_TWICE: ("quantization that transposes or writes twice", 0.70, 0.85),
    MOVES: ("permutation and optimizer", 0.80, None),
    LOSS: ("cross-entropy of logits", 0.80, None),
    HIGH_PRECISION: ("norms, SwiGLU and sums in high precision", 0.70, None),
    GATE: ("expert gates, with their GEMMs", 0.70, None),
    ROUTING: ("balance and routing of experts", 0.70, None),
    NARROW: ("rows of 128 to 1024", 0.70, None),
}

# octile bench dispatch: ids of goals, which rows of the default number of SMs have

DISPATCH_FP8, COMBINE_BF16, BOTH_WAYS = "dispatch FP8", "combine BF16", "dispatch and combine"
DISPATCH = (  # id, its peer, floor and aim of the ratio
    (DISPATCH_FP8, COPY, 0.70, 0.85),
    (COMBINE_BF16, COPY, 0.70, 0.85),
    (BOTH_WAYS, "plain", 2.0, None),
    (BOTH_WAYS, "plain, permuted", 2.0, None),
)

# octile bench attention: ids of goals are heads and the format of the cache

BANDWIDTH, FLOPS = "bandwidth", "FLOPs"
ATTENTION = (  # heads, what, floor and aim: of the ratio to a copy, or of TFLOP/s
    (16, BANDWIDTH, 0.75, 0.90),
    (128, FLOPS, 300, 600),
)
CACHE_FORMATS = ("BF16", "FP8")
SLOW_COPY = 0.9  # of the fastest of a run: a copy below it says nothing of the memory

# octile bench attention and sparse: ids of goals against FlashMLA, with 128 heads

FLASH_MLA, FLASH_MLA_HEADS = "FlashMLA", 128
DENSE_DECODING, SPARSE_PREFILL, SPARSE_DECODING = "decoding in BF16", "sparse prefill", "sparse decoding in FP8"
FLASH_MLA_FLOORS = {DENSE_DECODING: 1.0, SPARSE_PREFILL: 1.0, SPARSE_DECODING: 1.0}


def attention_goal(heads: int, cache_format: str) -> str:
    """Return the id of the goal of so many heads with such a cache."""
    return f"{heads} heads, {cache_format}"


# octile bench gemm: the ids of goals of drawn cases are the names of their classes

HOST_FLOOR, HOST_AIM = 25.0, 10.0  # µs until a warm call returns
DEEP_GEMM = "DeepGEMM"
DEEP_GEMM_CLEAN = "DeepGEMM, clean L2"  # both after a flush by reading (`kernel_time`)


@dataclass(frozen=True)
class Goal:
    """Floor and aim of ratios ours / theirs over several GEMMs.

    Attributes:
        title: the name of the cases.
        cases: the GEMMs; or a class of drawn ones, of which the peer may lack some.
        peer: as in a row.
        mean: (floor, aim) of the geometric mean; None: no bound.
        each: (floor, aim) of the smallest ratio.
    """

    title: str
    cases: Sequence[Case] | DrawnClass
    peer: str
    mean: tuple[float | None, float | None] = (None, None)
    each: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Verdict:
    """Whether a goal was met.

    Attributes:
        goal: the goal.
        measured, needed: number of cases that were measured, and of those that the goal has.
        mean, smallest: the geometric mean of the ratios, and the smallest.
        worst: the case with the smallest ratio.
        floor, aim: whether it is met; None where there is no bound.
    """

    goal: Goal
    measured: int
    needed: int
    mean: float
    smallest: float
    worst: str
    floor: bool | None
    aim: bool | None


LARGE = {"mean": (1.00, 1.04), "each": (0.95, None)}  # bounds of the list and of drawn cases
FEW_ROWS = {"mean": (1.06, 1.12), "each": (0.97, None)}
ACCUMULATED, GROUPED, MASKED = {"mean": (1.15, 1.35)}, {"mean": (1.02, 1.03)}, {"mean": (1.02, 1.05)}
GOALS = (
    Goal("dense, large", shapes.LARGE, DEEP_GEMM, **LARGE),
    Goal("dense, large", shapes.LARGE, "cuBLASLt fast", each=(None, 0.97)),
    Goal("dense, M = 128", shapes.M128, DEEP_GEMM, **FEW_ROWS),
    Goal("dense, M = 1 … 64", shapes.FEWER, DEEP_GEMM, mean=(0.97, 1.12)),
    Goal("dense, M = 128", shapes.M128, DEEP_GEMM_CLEAN, **FEW_ROWS),
    Goal("dense, M = 1 … 64", shapes.FEWER, DEEP_GEMM_CLEAN, mean=(0.97, 1.12)),
    Goal("1D1D, FP32 +=", shapes.ACCUMULATED, DEEP_GEMM, **ACCUMULATED),
    Goal("1D1D, BF16 store", shapes.BOTH_TILES, "octile 1D2D", each=(None, 0.93)),
    Goal("wgrad, grouped", shapes.WGRAD, DEEP_GEMM, mean=(1.05, 1.30)),
    Goal("grouped", shapes.GROUPED, DEEP_GEMM, **GROUPED),
    Goal("masked", shapes.MASKED, DEEP_GEMM, **MASKED),
    Goal("drawn, dense, 2,048 rows or more", drawn.LARGE, DEEP_GEMM, **LARGE),
    Goal("drawn, dense, 257 … 2,047 rows", drawn.MIDDLE, DEEP_GEMM),
    Goal("drawn, dense, 8 … 256 rows", drawn.FEW_ROWS, DEEP_GEMM, **FEW_ROWS),
    Goal("drawn, dense, 1 … 7 rows", drawn.FEWEST_ROWS, DEEP_GEMM),
    Goal("drawn, dense, 8 … 256 rows", drawn.FEW_ROWS, DEEP_GEMM_CLEAN, **FEW_ROWS),
    Goal("drawn, dense, 1 … 7 rows", drawn.FEWEST_ROWS, DEEP_GEMM_CLEAN),
    Goal("drawn, 1D1D, FP32 +=", drawn.WEIGHT_GRADIENTS, DEEP_GEMM, **ACCUMULATED),
    Goal("drawn, grouped", drawn.EXPERTS, DEEP_GEMM, **GROUPED),
    Goal("drawn, masked", drawn.DECODING_EXPERTS, DEEP_GEMM, **MASKED),
    Goal("drawn, wgrad of small experts", drawn.SMALL_EXPERTS, "BF16", each=(1.0, None)),
    Goal("drawn, wgrad of small experts, stored in BF16", drawn.STORED_SMALL_EXPERTS, "BF16", each=(1.0, None)),
)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Judge every goal that has at least one of its ratios among the rows."""
    verdicts = []
    for goal in GOALS:
        found, needed = _ratios(goal, rows)
        if not found:
            continue
        worst = min(found, key=found.__getitem__)
        mean, is_complete = geometric_mean(found.values()), len(found) == needed
        floor, aim = (_all_met([(goal.mean[i], mean), (goal.each[i], found[worst])], is_complete) for i in (0, 1))
        verdicts.append(Verdict(goal, len(found), needed, mean, found[worst], worst, floor, aim))
    return verdicts


def _ratios(goal: Goal, rows: Sequence[Row]) -> tuple[dict[str, float], int]:
    """Return the ratios of a goal by case, and of how many cases there must be one.

    A peer that has no such GEMM, as of 2,880 columns, is not needed in a drawn case.
    """
    if isinstance(goal.cases, DrawnClass):
        drawn_rows = [row for row in rows if row.goal == goal.cases.name]
        compared = {row.case: row.against.ratio for row in drawn_rows if row.against and row.against.peer == goal.peer}
        left_out = goal.cases.number - len({row.case for row in drawn_rows})
        return compared, len(compared) + left_out
    ratios = {(row.case, row.what, row.against.peer): row.against.ratio for row in rows if row.against}
    needed = dict.fromkeys((case.name, case.what, goal.peer) for case in goal.cases)
    return {key[0]: ratios[key] for key in needed if key in ratios}, len(needed)


def gemm_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench gemm` in a line: mean, smallest ratio, bounds, and whether they are met."""
    lines = [_gemm_line(verdict) for verdict in judge(rows)]
    if host := {f"{row.case} {row.what}": row.value for row in rows if row.unit == HOST}:
        slowest = max(host, key=host.__getitem__)
        bounds = ", ".join(f"{name} ≤ {limit:g} {_met(host[slowest] <= limit)}" for name, limit in
                           (("floor", HOST_FLOOR), ("aim", HOST_AIM)))  # fmt: skip
        lines.append(f"host time of a warm call: at most {host[slowest]:.1f} µs ({slowest}): {bounds}")
    return "\n".join(lines)


def casts_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench casts` in a line. Operators that have a bound are judged by it."""
    lines = []
    compared = [(row, row.against) for row in rows if row.against]
    by_bound = {(row.what, row.case) for row, peer in compared if peer.peer in (BOUND_OF_BYTES, BOUND_OF_FLOPS)}
    judged = [(row, peer) for row, peer in compared if peer.peer != COPY or (row.what, row.case) not in by_bound]
    for goal, (title, floor, aim) in CASTS.items():
        ratios = {(row.what, row.case): peer.ratio for row, peer in judged if row.goal == goal}
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            bounds = [
                f"{n} each ≥ {b:.2f}× {_met(ratios[worst] >= b)}" for n, b in (("floor", floor), ("aim", aim)) if b
            ]
            peer = "their bound" if worst in by_bound else "a copy"
            lines.append(
                f"{title}, vs. {peer}: smallest {ratios[worst]:.3f}× ({', '.join(worst)}): {', '.join(bounds)}"
            )
    return "\n".join(lines)


def dispatch_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench dispatch` in a line, for the default number of SMs."""
    lines = []
    for goal, peer, floor, aim in DISPATCH:
        for row in rows:
            if row.goal == goal and row.against and row.against.peer == peer:
                ratio = row.against.ratio
                bounds = [f"{n} ≥ {b:.2f}× {_met(ratio >= b)}" for n, b in (("floor", floor), ("aim", aim)) if b]
                lines.append(f"{goal}, vs. {peer}: {ratio:.3f}× ({row.case}): {', '.join(bounds)}")
    return "\n".join(lines)


def slow_copies(rows: Sequence[Row]) -> str:
    """Name each copy that is below 0.9 of the fastest in a line, and the ratio to the fastest."""
    best = _fastest_copy(rows)
    return "\n".join(
        f"{row.case}: its copy, {row.against.value:,.4g} {row.unit}, is below {SLOW_COPY} of the fastest of this run, "
        f"{best:,.4g}; the ratio to the fastest is {row.value / best:.3f}"
        for row in rows
        if row.against and row.against.peer == COPY and row.against.value < SLOW_COPY * best
    )


def _fastest_copy(rows: Sequence[Row]) -> float:
    return max((row.against.value for row in rows if row.against and row.against.peer == COPY), default=0.0)


def attention_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench attention` in a line, for each format of the cache.

    Where a copy is slow, the ratio to the fastest copy is judged.
    """
    lines, best = [], _fastest_copy(rows)
    for heads, what, floor, aim in ATTENTION:
        for goal in (attention_goal(heads, cache_format) for cache_format in CACHE_FORMATS):
            values = {row.case: _judged(row, best) for row in rows if (row.goal, row.what) == (goal, what)}
            if values:
                worst = min(values, key=values.__getitem__)
                unit = "× of a copy" if what == BANDWIDTH else " TFLOP/s"
                bounds = [f"{n} ≥ {b:g} {_met(values[worst] >= b)}" for n, b in (("floor", floor), ("aim", aim))]
                lines.append(f"{goal}: smallest {values[worst]:.3g}{unit} ({worst}): {', '.join(bounds)}")
    return "\n".join(lines)


def flash_mla_verdicts(rows: Sequence[Row]) -> str:
    """Describe the goals of attention against FlashMLA in a line each, for the rows that were measured with it."""
    lines = []
    for goal, floor in FLASH_MLA_FLOORS.items():
        ratios = {r.case: r.against.ratio for r in rows if r.goal == goal and r.against and r.against.peer == FLASH_MLA}
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            met = f"floor ≥ {floor:.2f}× {_met(ratios[worst] >= floor)}"
            lines.append(f"{goal}, vs. {FLASH_MLA}: smallest {ratios[worst]:.3f}× ({worst}): {met}")
    return "\n".join(lines)


def _judged(row: Row, best: float) -> float:
    if row.against is None:
        return row.value
    return row.value / best if row.against.value < SLOW_COPY * best else row.against.ratio


def _all_met(bounds: list[tuple[float | None, float]], is_complete: bool) -> bool | None:
    bounded = [(bound, value) for bound, value in bounds if bound is not None]
    return is_complete and all(value >= bound for bound, value in bounded) if bounded else None


def _gemm_line(v: Verdict) -> str:
    bounds = [
        f"{name} {' and '.join(f'{what} ≥ {bound:.2f}×' for what, bound in bounds if bound)} {_met(met)}"
        for name, bounds, met in (
            ("floor", (("mean", v.goal.mean[0]), ("each", v.goal.each[0])), v.floor),
            ("aim", (("mean", v.goal.mean[1]), ("each", v.goal.each[1])), v.aim),
        )
        if met is not None
    ]
    measured = f"{v.measured} shapes" if v.measured == v.needed else f"only {v.measured} of {v.needed} shapes"
    found = f"mean {v.mean:.3f}×, smallest {v.smallest:.3f}× ({v.worst})"
    return f"{v.goal.title}, vs. {v.goal.peer}, {measured}: {found}{': ' if bounds else ''}{', '.join(bounds)}"


def _met(met: bool | None, missing: Sequence[str] = ()) -> str:
    """The verdict on a bound: met: of the peers that were measured; missing: those that were not."""
    if met and missing:
        return f"MISSED (not measured: {', '.join(missing)})"
    return "met" if met else "MISSED"


# octile bench step: cases and results by their names in committed results

DENSE, SLICE = "dense decoder", "V3 rank slice"
STEP, OPTIMIZED = "forward + backward", "forward + backward + AdamW"
BF16, EAGER = "compiled BF16", "BF16"
OUTSIDE, OUTSIDE_LAYERS = "outside the products, attention's among them", "outside the products of layers"
SAVED, SAVED_LESS = "saved, octile", "saved, octile, q k v recomputed"
OF_A_PARAMETER = "bytes of a parameter"  # id of the goal of their sum, without cached FP8 weights


@dataclass(frozen=True)
class Bound:
    """Floor and aim of one result.

    Attributes:
        title: how the verdict names it.
        case, what: as in a row.
        peers: the worst ratio to one of them is judged; (): the value itself.
        floor, aim: the bounds; None: no bound.
        higher_is_better: whether higher is better.
    """

    title: str
    case: str
    what: str
    peers: Sequence[str]
    floor: float | None
    aim: float | None
    higher_is_better: bool = True


TORCHAO = tuple(f"torchao {name}" for name in ("tensorwise", "blockwise", "rowwise"))
BOUNDS = (
    Bound("dense, speed vs. compiled BF16", DENSE, STEP, (BF16,), 1.25, 1.50),
    Bound("dense with AdamW, speed vs. compiled BF16", DENSE, OPTIMIZED, (BF16,), 1.25, 1.50),
    Bound("V3 rank slice, speed vs. BF16, compiled or not", SLICE, STEP, (BF16, EAGER), 1.25, 1.60),
    Bound("dense, speed vs. torchao blockwise", DENSE, STEP, ("torchao blockwise",), 1.0, None),
    Bound("dense, speed vs. the fastest of torchao", DENSE, STEP, TORCHAO, None, 1.0),
    Bound("dense, bytes saved vs. compiled BF16", DENSE, SAVED, (BF16,), 0.56, 0.50, higher_is_better=False),
    Bound("dense, bytes saved with q, k, v recomputed", DENSE, SAVED_LESS, (BF16,), None, 0.36, higher_is_better=False),
    Bound("dense, % outside GEMMs and attention", DENSE, OUTSIDE, (), 35.0, 25.0, higher_is_better=False),
    Bound("V3 rank slice, % outside GEMMs and attention", SLICE, OUTSIDE, (), 35.0, 25.0, higher_is_better=False),
    Bound("dense, % outside GEMMs", DENSE, OUTSIDE_LAYERS, (), None, None),
    Bound("V3 rank slice, % outside GEMMs", SLICE, OUTSIDE_LAYERS, (), None, None),
)


def step_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench step` that has a result in a line, and the bytes per parameter."""
    lines = [line for bound in BOUNDS if (line := _step_line(bound, rows))]
    if sizes := [row.value for row in rows if row.goal == OF_A_PARAMETER]:
        total = sum(sizes)
        lines.append(f"bytes per parameter, without cached FP8 weights: {total:.2f}: floor ≤ 12 {_met(total <= 12.01)}")
    return "\n".join(lines)


def _step_line(bound: Bound, rows: Sequence[Row]) -> str:
    found = [row for row in rows if (row.case, row.what) == (bound.case, bound.what)]
    if bound.peers:
        peers = [row.against for row in found if row.against]
        values = {against.peer: against.ratio for against in peers if against.peer in bound.peers}
    else:
        values = {row.what: row.value for row in found}
    if not values:
        return ""
    missing = [peer for peer in bound.peers if peer not in values]
    find_worst: Callable[..., str] = min if bound.higher_is_better else max
    worst = find_worst(values, key=values.__getitem__)
    value, sign = values[worst], "≥" if bound.higher_is_better else "≤"

    def is_met(limit: float) -> bool:
        return value >= limit if bound.higher_is_better else value <= limit

    bounds = ", ".join(
        f"{name} {sign} {limit:g} {_met(is_met(limit), missing)}"
        for name, limit in (("floor", bound.floor), ("aim", bound.aim))
        if limit is not None
    )
    peer = f" ({worst})" if len(bound.peers) > 1 else ""
    return f"{bound.title}: {value:.3f}{peer}{f': {bounds}' if bounds else ''}"


# octile bench train: trainers and results by their names in committed results

FP8_TRAINER, PLAIN_BF16 = "FP8", "BF16"
TITAN_BF16, TITAN_FP8, TITAN_OCTILE = "torchtitan BF16", "torchtitan FP8", "torchtitan octile"
WITHOUT_MTP = " without MTP"
MFU, IDLE = "MFU", "the GPU idles"


def _train_bounds(preset: str, shape: str) -> list[Bound]:
    """Return the bounds that every preset has."""
    fp8, bf16 = f"train {FP8_TRAINER}{shape}", f"train {PLAIN_BF16}{shape}"
    return [
        Bound(f"{preset}, BF16 vs. torchtitan", preset, bf16, (TITAN_BF16,), 1.0, None),
        Bound(f"{preset}, FP8 vs. torchtitan's FP8", preset, fp8, (TITAN_FP8,), 1.3, None),
    ]


TRAIN_BOUNDS = (
    Bound("small, FP8 vs. BF16", "small", f"train {FP8_TRAINER}", (PLAIN_BF16,), 1.10, None),
    Bound("small, % of a step in which the GPU idles", "small", f"{IDLE}, {FP8_TRAINER}", (), 5.0, None, False),
    *_train_bounds("small", WITHOUT_MTP),
    Bound("medium, FP8 vs. BF16", "medium", f"train {FP8_TRAINER}", (PLAIN_BF16,), 1.30, 1.45),
    Bound("medium, MFU, % of the BF16 peak", "medium", f"{MFU}, {FP8_TRAINER}", (), 35.0, 45.0),
    *_train_bounds("medium", WITHOUT_MTP),
    Bound(
        "medium, torchtitan in octile's FP8 vs. its BF16",
        "medium",
        f"train {TITAN_OCTILE}{WITHOUT_MTP}",
        (TITAN_BF16,),
        1.3,
        None,
    ),
)


def train_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench train` that has a result in a line."""
    return "\n".join(line for bound in TRAIN_BOUNDS if (line := _step_line(bound, rows)))


# octile bench transformers: models, what is measured, and results by their names in committed results

LLAMA, QWEN = "Llama 8B, 8 layers", "Qwen3 30B-A3B, 4 layers"
LLAMA_WITH_HEAD = "Llama 8B, 4 layers with head and loss"
OCTILE, COMPILED, WHOLE = "octile", "octile, compiled", "octile, compiled whole"
WHOLE_BF16 = "BF16, compiled whole"
PEAK, QUANTIZED_PARAMETERS = "peak memory", "quantized parameters"

TRANSFORMERS_BOUNDS = (
    Bound("Llama, compiled, vs. compiled BF16", LLAMA, f"{STEP}, {COMPILED}", (BF16,), 1.35, 1.45),
    Bound("Llama, peak memory vs. compiled BF16", LLAMA, f"{PEAK}, {COMPILED}", (BF16,), 0.85, 0.75, False),
    Bound("Qwen3, % of parameters that are quantized", QWEN, QUANTIZED_PARAMETERS, (), 95.0, None),
    Bound("Qwen3, compiled, vs. compiled BF16", QWEN, f"{STEP}, {COMPILED}", (BF16,), 1.3, None),
    Bound("Qwen3, peak memory vs. compiled BF16", QWEN, f"{PEAK}, {COMPILED}", (BF16,), 0.85, None, False),
    *(
        Bound(f"{name}, not compiled, vs. compiled", case, f"{STEP}, {OCTILE}", (COMPILED,), 0.95, None)
        for name, case in (("Llama", LLAMA), ("Qwen3", QWEN))
    ),
    Bound(
        "Llama with head, compiled whole, vs. not compiled", LLAMA_WITH_HEAD, f"{STEP}, {WHOLE}", (OCTILE,), 1.0, None
    ),
)


def transformers_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench transformers` that has a result in a line."""
    return "\n".join(line for bound in TRANSFORMERS_BOUNDS if (line := _step_line(bound, rows)))


# octile bench serve

THROUGHPUT = "throughput"
LONG_CLIENT, FASTEST_DRAFTS = "1 client, 256 tokens", "1 client, 256 tokens, fastest with drafts"
DECODE, OVERHEAD, ROOFLINE = "decode", "overhead of the engine", "share of the roofline"
PREFILL, SHARE_OF_PEAK = "prefill, 8 × 1,024 tokens", "share of the FP8 peak"
FP8_WEIGHTS, BF16_WEIGHTS = "decode, FP8 weights", "BF16 weights"
V2_LITE = "V2-Lite shape"


def decode_case(name: str, batch: int) -> str:
    """Return the case of a batch that decodes."""
    return f"{name}, decode, batch {batch}"


def expert_parallel_case(name: str, batch: int, n_ranks: int) -> str:
    """Return the case of a batch that decodes on each rank, expert parallel."""
    return f"{name}, decode, batch {batch} on each of {n_ranks} ranks"


def routed_case(name: str, batch: int, n_ranks: int) -> str:
    """Return the case of a batch that decodes on each rank, with shared experts routed like the others."""
    return f"{expert_parallel_case(name, batch, n_ranks)}, routed shared experts"


def group_case(name: str, batch: int, n_ranks: int) -> str:
    """Return the case of a batch that decodes on all ranks together, with heads and experts divided among them."""
    return f"{name}, decode, batch {batch} on {n_ranks} ranks together"


def one_rank(batch: int) -> str:
    """Return the peer of such a case: one rank alone."""
    return f"one, batch {batch}"


H200_BOUNDS = (
    Bound("drafts vs. none, tokens/s", FASTEST_DRAFTS, THROUGHPUT, (LONG_CLIENT,), 1.3, 1.7),
    Bound(
        "engine's overhead per step, batch 256, ms",
        decode_case(V2_LITE, 256),
        OVERHEAD,
        (),
        1.0,
        None,
        higher_is_better=False,
    ),
    *(
        Bound(f"decode, batch {batch}, % of the roofline", decode_case(V2_LITE, batch), ROOFLINE, (), 40.0, 75.0)
        for batch in (1, 32, 256)
    ),
    *(
        Bound(
            f"decode, batch {batch}, FP8 vs. BF16 weights",
            decode_case(V2_LITE, batch),
            FP8_WEIGHTS,
            (BF16_WEIGHTS,),
            1.3,
            1.7,
        )
        for batch in (1, 32)
    ),
    Bound("prefill, % of the FP8 peak", f"{V2_LITE}, {PREFILL}", SHARE_OF_PEAK, (), 30.0, 55.0),
    Bound("batch 256 on two GPUs vs. one", expert_parallel_case(V2_LITE, 128, 2), DECODE, (one_rank(256),), 1.5, None),
)


def serve_verdicts(rows: Sequence[Row], gpu: str | None) -> str:
    """Describe each goal of `octile bench serve` that has a result in a line. The goals are those on an H200.

    Args:
        rows: the results.
        gpu: the name of the GPU that they are of; None: of a CPU.
    """
    bounds = H200_BOUNDS if gpu is not None and "H200" in gpu else ()
    return "\n".join(line for bound in bounds if (line := _step_line(bound, rows)))


# octile bench serve --peer vllm

BETWEEN_P99 = "between tokens, p99"
FP8_FORMAT, BF16_FORMAT = "FP8", "BF16"
VLLM_SETTINGS = {FP8_FORMAT: ("triton", "deep_gemm"), BF16_FORMAT: ("triton",)}  # a goal needs at least these
HTTP_GAINS = {FP8_FORMAT: 1.1, BF16_FORMAT: 1.0}  # of tokens/s at equal times between tokens
EQUAL = 0.02  # two values that differ by less are equal


def weights_case(name: str, weights: str) -> str:
    """Return the name of a model with weights of a format."""
    return f"{name}, {weights} weights"


def prefill_case(name: str, requests: int, prompt: int) -> str:
    """Return the case of so many prompts of so many tokens that are prefilled."""
    return f"{name}, prefill, {requests} × {prompt:,} tokens"


def busy_case(name: str, streams: int) -> str:
    """Return the case of so many streams, each of which is followed by the next one at once."""
    return f"{name}, {streams} streams, always busy"


def arrivals_case(name: str, streams: int, share: int) -> str:
    """Return the case of requests that arrive as a Poisson process, at a share of octile's capacity in percent."""
    return f"{name}, {streams} streams, arrivals at {share}%"


def _vllm_bounds(weights: str, decode: Sequence[float], prefill: float) -> list[Bound]:
    """Return the bounds of the engine vs. vLLM's with weights of a format."""
    name, settings = weights_case(V2_LITE, weights), VLLM_SETTINGS[weights]
    cases = [(decode_case(name, batch), DECODE, floor) for batch, floor in zip((1, 32, 256), decode, strict=True)]
    cases += [(prefill_case(name, *prompts), THROUGHPUT, prefill) for prompts in ((8, 1024), (16, 4096))]
    return [Bound(_vllm_title(case), case, what, settings, floor, None) for case, what, floor in cases]


def _vllm_title(case: str) -> str:
    return f"{case.removeprefix(f'{V2_LITE}, ')}, vs. vLLM"


VLLM_BOUNDS = (*_vllm_bounds(FP8_FORMAT, (1.8, 1.25, 1.2), 1.4), *_vllm_bounds(BF16_FORMAT, (1.0, 1.0, 1.0), 1.0))


def vllm_verdicts(rows: Sequence[Row], gpu: str | None) -> str:
    """Describe each goal of `octile bench serve --peer vllm` that has a result in a line; they are for an H200.

    The setting of vLLM with the lowest ratio is judged, among those that were measured. A goal of the servers is met if
    octile has so many times the output tokens/s and its time between tokens, p99, is equal or lower, or if its tokens/s
    are equal or higher and that time is lower. Equal is within 2%.

    Args:
        rows: the results.
        gpu: the name of the GPU that they are of; None: of a CPU.
    """
    is_judged = gpu is not None and "H200" in gpu
    lines = []
    for bound in VLLM_BOUNDS:
        ratios = _ratios_by_peer(rows, bound.case, bound.what)
        peers = (*ratios, *_not_measured(ratios, bound.peers))
        lines.append(_step_line(replace(bound, peers=peers, floor=bound.floor if is_judged else None), rows))
    for weights, gain in HTTP_GAINS.items():
        for streams, share in product((64, 256), (50, 90)):
            case = arrivals_case(weights_case(V2_LITE, weights), streams, share)
            lines.append(_http_line(rows, case, VLLM_SETTINGS[weights], gain, is_judged))
    return "\n".join(filter(None, lines))


def _ratios_by_peer(rows: Sequence[Row], case: str, what: str) -> dict[str, float]:
    return {r.against.peer: r.against.ratio for r in rows if r.against and (r.case, r.what) == (case, what)}


def _not_measured(peers: Collection[str], settings: Sequence[str]) -> list[str]:
    """The settings that none of the peers names ("vLLM 0.26.0, triton") has."""
    return [setting for setting in settings if setting not in {peer.partition(", ")[2] for peer in peers}]


def _http_line(rows: Sequence[Row], case: str, settings: Sequence[str], gain: float, is_judged: bool) -> str:
    speeds, times = (_ratios_by_peer(rows, case, what) for what in (THROUGHPUT, BETWEEN_P99))
    peers = [peer for peer in speeds if peer in times]  # the other has just been begun
    if not peers:
        return ""

    def is_met(peer: str) -> bool:
        speed, time = speeds[peer], times[peer]
        return (speed >= gain and time <= 1 + EQUAL) or (speed >= 1 - EQUAL and time < 1)

    worst = min(peers, key=lambda peer: (is_met(peer), speeds[peer]))
    found = f"{_vllm_title(case)}: {speeds[worst]:.3f} tokens/s, {times[worst]:.3f} p99 between tokens ({worst})"
    if not is_judged:
        return found
    verdict = _met(is_met(worst), _not_measured(peers, settings))
    return f"{found}: floor ≥ {gain:g} at equal p99, or lower p99 at equal tokens/s {verdict}"


# octile bench indexer

RECORDED = "DeepGEMM, recorded"


def indexer_case(heads: int, head_dim: int) -> str:
    """Return the name of a case."""
    return f"logits, {heads} heads of {head_dim}"


INDEXER_FIGURES = {  # TFLOP/s of DeepGEMM 2.6.1 in its own test on one H200, 20 November 2026: 2048 queries, 65536 keys
    indexer_case(64, 128): 1150.0,
    indexer_case(64, 64): 730.0,
    indexer_case(64, 32): 425.0,
    indexer_case(32, 128): 988.0,
    indexer_case(32, 64): 625.0,
    indexer_case(32, 32): 350.0,
}
INDEXER_BOUNDS = tuple(
    Bound(f"{case} vs. {peer}", case, "logits", (peer,), 0.95, 1.05)
    for peer in (DEEP_GEMM, RECORDED)
    for case in INDEXER_FIGURES
)


def indexer_verdicts(rows: Sequence[Row]) -> str:
    """Describe each goal of `octile bench indexer` that has a result in a line."""
    return "\n".join(line for bound in INDEXER_BOUNDS if (line := _step_line(bound, rows)))
