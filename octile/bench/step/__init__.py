"""`octile bench step`: the speed and memory of FP8 training on this machine, vs. BF16 and torchao.

models.py     the models that are trained
memory.py     bytes saved for backward, bytes per parameter, bytes of a checkpoint
profile.py    where the time of a step goes

Steps of the models are interleaved. Bytes saved for backward are counted where autograd saves tensors, and on a GPU
also by its allocator. A model that does not run on this machine is left out, and stderr says why.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from octile.bench.goals import (
    BF16,
    DENSE,
    EAGER,
    OF_A_PARAMETER,
    OPTIMIZED,
    OUTSIDE,
    OUTSIDE_LAYERS,
    SLICE,
    STEP,
    step_verdicts,
)
from octile.bench.rows import LEGEND, Row, compare, table_with
from octile.bench.step import profile as profile
from octile.bench.step.memory import (
    CACHED_WEIGHTS,
    allocated_by,
    bytes_per_parameter,
    bytes_saved_for_backward,
    cache_weights,
    checkpoint_bytes,
)
from octile.bench.step.models import Sizes, Work, captured, compiled, decoder, rank_slice, torchao
from octile.bench.timing import seconds
from octile.models.config import ModelConfig
from octile.nn.conversion import apply_recipe
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.optim import AdamW, param_groups
from octile.parallel.device import pick_device
from octile.recipe import Recipe
from octile.train.config import preset
from octile.train.run.console import RunConsole
from octile.train.run.tokens import prepare_tokens
from octile.train.trainer import Trainer

ROUNDS = 9
STACK_SIZES = 2048, 1024, 8  # tokens, width and depth of the linear layers whose saved bytes are counted
MAX_SECONDS = 300.0  # after which no further model is prepared that may be compiled
IN_A_GRAPH = ", in a CUDA graph"
OCTILE, COMPILED, MAIN_GRAD = "octile", "octile, compiled", "octile, main_grad"

V3 = replace(Recipe.deepseek_v3(), transposed_weights="cached")  # as in octile train
SETTINGS = {  # names as in committed results
    OCTILE: V3,
    "octile, q k v recomputed": replace(V3, attention_inputs="recomputed"),
    "octile, gate and up recomputed": replace(V3, swiglu_inputs="recomputed"),
}
Candidates = dict[str, Work]


def rows() -> Iterator[Row]:
    """Measure the speed of a training step, the bytes saved for backward and the bytes of a checkpoint."""
    if torch.cuda.is_available():
        begin = time.monotonic()
        with without_reduced_precision_reduction():  # as in training
            yield from mixture(ModelConfig(), 32, 4096, "cuda", begin)
            yield from dense(Sizes(), "cuda", begin)
    else:
        yield _speed()
        yield from _saved_bytes()
    yield checkpoint_bytes()


def show(rows: Sequence[Row]) -> str:
    """Format the table, and on a GPU the verdicts on the goals."""
    return "\n\n".join(filter(None, (table_with(LEGEND, rows), step_verdicts(rows))))


def dense(sizes: Sizes, device: str, begin: float) -> Iterator[Row]:
    """Measure the dense decoder.

    Args:
        sizes: sizes of the decoder and its batch.
        device: "cuda" or "cpu".
        begin: when the benchmark began, by time.monotonic(): from MAX_SECONDS later on no model is prepared but those
            with AdamW, which take seconds.
    """
    case, tokens = DENSE, sizes.batch * sizes.sequence
    makers: dict[str, Callable[[], Work]] = {BF16: lambda: compiled(decoder(sizes, device))}
    makers |= {name: lambda recipe=recipe: _convert(decoder(sizes, device), recipe)  # type: ignore[misc]
               for name, recipe in SETTINGS.items()}  # fmt: skip
    makers[COMPILED] = lambda: compiled(_convert(decoder(sizes, device), V3))
    makers |= {f"torchao {name}": lambda name=name: _convert_with_torchao(decoder(sizes, device), name)  # type: ignore[misc]
               for name in ("tensorwise", "rowwise", "blockwise")}  # the last takes minutes to compile  # fmt: skip
    works = _prepare(case, makers, begin)
    yield from _times(case, STEP, works, tokens, graphs=works)
    if OCTILE in works:
        yield from _profiled(case, works)
    yield from _activations(case, works, tokens * sizes.layers, with_torchao=True)

    for name, work in works.items():
        work.optimizer = _adamw(work.model) if name in (BF16, COMPILED) or name.startswith("torchao") else None
    masters = {
        OCTILE: lambda: _optimized(_convert(decoder(sizes, device, torch.float32), V3)),
        MAIN_GRAD: lambda: _optimized(_convert(decoder(sizes, device, torch.float32), V3), main_grad=True),
    }
    works = {name: work for name, work in works.items() if work.optimizer is not None and name != COMPILED}
    _clean()
    works |= _prepare(f"{case} + AdamW", masters, time.monotonic())
    yield from _times(case, OPTIMIZED, works, tokens, graphs=(BF16, OCTILE, MAIN_GRAD))
    if BF16 in works:  # no masters, moments in BF16: the fastest optimizer, but it does not preserve the loss
        works[BF16].optimizer = torch.optim.AdamW(works[BF16].model.parameters(), lr=1e-5, fused=True)
        both = {name: works[name] for name in (BF16, OCTILE) if name in works}
        yield from _times(case, f"{OPTIMIZED}, the peer's all in BF16", both, tokens, graphs=both)
    if MAIN_GRAD in works:
        for what, size in bytes_per_parameter(works[MAIN_GRAD]).items():
            goal = None if what == CACHED_WEIGHTS else OF_A_PARAMETER
            yield Row(case, f"{what}, of a parameter", size, "bytes", goal=goal)
    del works
    _clean()


def mixture(config: ModelConfig, ranks: int, sequence: int, device: str, begin: float) -> Iterator[Row]:
    """Measure one rank's share of a block with experts. Arguments as in `rank_slice` and `dense`."""
    case = SLICE
    makers = {
        EAGER: lambda: rank_slice(config, ranks, sequence, device),
        BF16: lambda: compiled(rank_slice(config, ranks, sequence, device)),
        OCTILE: lambda: _convert(rank_slice(config, ranks, sequence, device), V3),
        "octile, gate and up recomputed": lambda: _convert(
            rank_slice(config, ranks, sequence, device), SETTINGS["octile, gate and up recomputed"]
        ),
        COMPILED: lambda: compiled(_convert(rank_slice(config, ranks, sequence, device), V3)),
    }
    works = _prepare(case, makers, begin)
    yield from _times(case, STEP, works, sequence, graphs=works)
    if OCTILE in works:
        yield from _profiled(case, works)
    yield from _activations(case, works, sequence, with_torchao=False)
    del works
    _clean()


def _convert(work: Work, recipe: Recipe) -> Work:
    apply_recipe(work.model, recipe)
    return work


def _convert_with_torchao(work: Work, recipe: str) -> Work:
    torchao(recipe)(work.model)
    return compiled(work)


def _adamw(model: nn.Module) -> AdamW:
    """Make octile's AdamW: FP32 masters and BF16 moments, whatever the model's dtype."""
    return AdamW(param_groups(model, 0.1), lr=1e-5)


def _optimized(work: Work, main_grad: bool = False) -> Work:
    work.optimizer = _adamw(work.model)
    for p in work.model.parameters():
        if main_grad and p.dim() > 1:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
    return work


def _prepare(case: str, makers: dict[str, Callable[[], Work]], begin: float) -> Candidates:
    """Make the models and run a first step of each, which compiles. Models that fail are left out."""
    works: Candidates = {}
    for name, make in makers.items():
        if time.monotonic() - begin > MAX_SECONDS:
            _left_out(case, name, f"{MAX_SECONDS:g} s are over")
            continue
        start = time.monotonic()
        try:
            with torch._dynamo.config.patch(recompile_limit=64):
                work = make()
                work.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            _left_out(case, name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
            _clean()
            continue
        works[name] = work
        print(f"{case}: {name} ready after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return works


def _left_out(case: str, name: str, why: str) -> None:
    print(f"{case}: left out: {name}: {why}", file=sys.stderr, flush=True)


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _times(case: str, what: str, works: Candidates, tokens: int, graphs: Container[str] = ()) -> Iterator[Row]:
    """Measure milliseconds of each model, and tokens per second of octile vs. each peer, each in its fastest form.

    Args:
        case, what: the first two fields of the rows.
        works: name → model.
        tokens: tokens of a step.
        graphs: names of the models that are also captured in a CUDA graph.
    """
    forms = works | _graphs(case, {name: work for name, work in works.items() if name in graphs})
    with torch._dynamo.config.patch(recompile_limit=64):
        times = seconds({name: work.step for name, work in forms.items()}, ROUNDS)
    for name, took in times.items():
        yield Row(case, f"{what}, {name}", took * 1e3, "ms")
    best = {name: min(times[name], times.get(f"{name}{IN_A_GRAPH}", times[name])) for name in works}
    ours = min((best[name] for name in (OCTILE, COMPILED) if name in best), default=None)
    if ours is not None:
        for name, took in best.items():
            if not name.startswith(OCTILE):
                yield compare(case, what, tokens / ours, "tokens/s", name, tokens / took)


def _graphs(case: str, works: Candidates) -> Candidates:
    """Capture the models in CUDA graphs, so that the host takes no part in a step. Models that fail are left out."""
    if not torch.cuda.is_available():
        return {}
    pool, found = torch.cuda.graph_pool_handle(), {}
    for name, work in works.items():
        try:
            found[f"{name}{IN_A_GRAPH}"] = captured(work, pool)
        except Exception as error:
            _left_out(case, f"{name}{IN_A_GRAPH}", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return found


def _profiled(case: str, works: Candidates) -> Iterator[Row]:
    """Measure every call of octile's step, and the shares of GEMMs, attention and the rest in each model's step."""
    try:
        peak = profile.measured_peak()
        yield Row(case, "peak, FP8 product with a scale a tensor", peak.fp8 / 1e12, "TFLOP/s")
        yield Row(case, "peak, BF16 product", peak.bf16 / 1e12, "TFLOP/s")
        yield Row(case, "peak, copy", peak.copy / 1e9, "GB/s")
        found = profile.calls(works[OCTILE].step)
        yield from profile.table(f"{case}: calls", found, peak)
        took, called = seconds({OCTILE: works[OCTILE].step}, ROUNDS)[OCTILE], sum(call.seconds for call in found)
        yield compare(f"{case}: calls", "the whole step", took * 1e3, "ms", "its calls", called * 1e3)
        for kind, share in profile.shares(found).items():
            yield Row(case, f"calls, {kind}", 100 * share, "% of a step")
    except Exception as error:
        _left_out(case, "profile of calls", f"{type(error).__name__}: {error}")
    for name in (OCTILE, COMPILED, BF16):
        if name not in works:
            continue
        try:
            idle, parts = profile.timeline(works[name].step)
        except Exception as error:
            _left_out(case, f"timeline of {name}", f"{type(error).__name__}: {error}")
            continue
        yield Row(case, f"{name}: the GPU idles", 100 * idle, "% of a step")
        for kind, share in parts.items():
            yield Row(case, f"{name}: kernels, {kind}", 100 * share, "% of a step")
        if name == OCTILE:
            outside = parts.get("other", 0.0)
            yield Row(case, OUTSIDE, 100 * outside, "% of a step")
            outside += parts.get("attention", 0.0)
            yield Row(case, OUTSIDE_LAYERS, 100 * outside, "% of a step")


def _activations(case: str, works: Candidates, tokens: int, with_torchao: bool) -> Iterator[Row]:
    """Measure the bytes saved for backward per token and layer, by autograd's tensors and by the allocator."""
    found: dict[str, dict[str, float]] = {}
    for name, work in works.items():
        if name.startswith("torchao") and not with_torchao:
            continue
        try:
            found[name] = _saved(work, name)
        except Exception as error:
            _left_out(case, f"bytes of {name}", f"{type(error).__name__}: {error}")
    base = BF16 if BF16 in found else EAGER
    for name, sizes in found.items():
        for what, size in sizes.items():
            peer = found.get(base, {}).get(what)
            if name == base or not peer:
                yield Row(case, f"{what}, {name}", size / tokens, "bytes a token and layer")
            else:
                yield compare(case, f"{what}, {name}", size / tokens, "bytes a token and layer", base, peer / tokens)


def _saved(work: Work, name: str) -> dict[str, float]:
    """Return the bytes of a forward pass that backward needs: "saved" by autograd, and on a GPU "allocated"."""
    work.forget_gradients()
    for p in work.model.parameters():
        p.grad = None
    if name.startswith(OCTILE):
        cache_weights(work)
    else:
        work.forward()  # the first call may allocate memory that stays
    work.pop_losses()
    found: dict[str, float] = {}
    if torch.cuda.is_available():
        found["allocated"] = allocated_by(work.forward)
        work.pop_losses()
    found["saved"] = bytes_saved_for_backward(work.model, work.forward)
    work.pop_losses()
    return found


# On a CPU


def _speed() -> Row:
    device = pick_device("auto")
    config, baseline = preset("tiny"), "float32"
    with tempfile.TemporaryDirectory() as folder:
        store = prepare_tokens(config, Path(folder), RunConsole())
        names = (baseline, "deepseek_v3")
        trainers = {name: Trainer(replace(config, recipe=name), store, device) for name in names}
        times = seconds({name: trainer.step for name, trainer in trainers.items()}, ROUNDS)
    tokens = config.batch_size * config.sequence_length
    speeds = {name: tokens / time for name, time in times.items()}
    return compare(config.preset, "train deepseek_v3", speeds["deepseek_v3"], "tokens/s", baseline, speeds[baseline])


def _saved_bytes() -> list[Row]:
    """Measure the bytes that a stack of linear layers saves for backward, before and after conversion to FP8.

    A BF16 model saves its inputs. Under autocast an FP32 model also saves BF16 copies of its weights. FP8 is compared
    with the first without its cached weights, and with the second with them, one byte each.
    """
    tokens, width, depth = STACK_SIZES
    fp32 = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    bf16 = copy.deepcopy(fp32).bfloat16()
    fp8 = apply_recipe(copy.deepcopy(fp32), Recipe.deepseek_v3())
    torch.optim.SGD(fp8.parameters()).step()  # FP8 weights are cached if an optimizer holds the parameters
    x = torch.randn(tokens, width, dtype=torch.bfloat16)

    def autocast(model: nn.Module) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return forward

    inputs = bytes_saved_for_backward(bf16, lambda: bf16(x))
    with_copies = bytes_saved_for_backward(fp32, autocast(fp32))
    ours, weights = bytes_saved_for_backward(fp8, autocast(fp8)), sum(p.numel() for p in fp8.parameters())
    case, mib = f"{depth} Linear {width}", 2**20
    return [
        compare(case, "saved for backward", ours / mib, "MiB", "bf16", inputs / mib),
        compare(case, "saved, with weights", (ours + weights) / mib, "MiB", "autocast", with_copies / mib),
    ]
