"""`octile bench step`: what FP8 training costs and saves on this machine.

Speed is measured by turns, a step of each model after the other; bytes are counted where autograd saves them, and on a
GPU by its allocator, too. A model that does not run here is left out, which is told on stderr.
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

from octile.bench.rows import LEGEND, Row, compare, table
from octile.bench.step import goals as goals
from octile.bench.step import profile as profile
from octile.bench.step.goals import BF16, DENSE, EAGER, OPTIMIZED, OUTSIDE, OUTSIDE_LAYERS, SLICE, STEP
from octile.bench.step.memory import allocated_by, cache_weights, checkpoint_bytes, kept_for_backward, of_a_parameter
from octile.bench.step.models import Sizes, Work, captured, compiled, decoder, rank_slice, torchao
from octile.bench.timing import seconds
from octile.models.config import ModelConfig
from octile.nn.conversion import apply_recipe
from octile.optim import AdamW, param_groups
from octile.recipe import Recipe
from octile.train.config import preset
from octile.train.console import RunConsole
from octile.train.loop import pick_device, prepare_tokens
from octile.train.trainer import Trainer

ROUNDS = 9
TIME = 300.0  # seconds, after which no further peer is prepared
IN_A_GRAPH = ", in a CUDA graph"
OCTILE, COMPILED, MAIN_GRAD = "octile", "octile, compiled", "octile, main_grad"

V3 = Recipe.deepseek_v3()
SETTINGS = {
    OCTILE: V3,
    "octile, q k v again": replace(V3, attention_inputs="recomputed"),
    "octile, gate and up again": replace(V3, swiglu_inputs="recomputed"),
}
Candidates = dict[str, Work]


def rows() -> Iterator[Row]:
    """Speed of a training step, bytes kept for the backward pass, bytes of a checkpoint."""
    if torch.cuda.is_available():
        begin = time.monotonic()
        yield from mixture(ModelConfig(), 32, 4096, "cuda", begin)
        yield from dense(Sizes(), "cuda", begin)
    else:
        yield _speed()
        yield from _kept_bytes()
    yield checkpoint_bytes()


def show(rows: Sequence[Row]) -> str:
    """The table, and on a GPU how the goals are met."""
    return "\n\n".join(filter(None, (table(rows), LEGEND, goals.in_words(rows))))


def dense(sizes: Sizes, device: str, begin: float) -> Iterator[Row]:
    """The dense decoder; begin: when the benchmark did, by time.monotonic()."""
    case, tokens = DENSE, sizes.batch * sizes.sequence
    makers: dict[str, Callable[[], Work]] = {BF16: lambda: compiled(decoder(sizes, device))}
    makers |= {name: lambda recipe=recipe: _converted(decoder(sizes, device), recipe)  # type: ignore[misc]
               for name, recipe in SETTINGS.items()}  # fmt: skip
    makers[COMPILED] = lambda: compiled(_converted(decoder(sizes, device), V3))
    makers |= {f"torchao {name}": lambda name=name: _of_torchao(decoder(sizes, device), name)  # type: ignore[misc]
               for name in ("tensorwise", "rowwise", "blockwise")}  # the last takes minutes to compile  # fmt: skip
    works = _prepare(case, makers, begin)
    yield from _times(case, STEP, works, tokens, graphs=works)
    if OCTILE in works:
        yield from _profiled(case, works)
    yield from _activations(case, works, tokens * sizes.layers, of_torchao=True)

    for name, work in works.items():
        work.optimizer = _adamw(work.model) if name in (BF16, COMPILED) or name.startswith("torchao") else None
    masters = {
        OCTILE: lambda: _optimized(_converted(decoder(sizes, device, torch.float32), V3)),
        MAIN_GRAD: lambda: _optimized(_converted(decoder(sizes, device, torch.float32), V3), main_grad=True),
    }
    works = {name: work for name, work in works.items() if work.optimizer is not None and name != COMPILED}
    _clean()
    works |= _prepare(f"{case} + AdamW", masters, begin)
    yield from _times(case, OPTIMIZED, works, tokens, graphs=(BF16, OCTILE, MAIN_GRAD))
    if BF16 in works:  # without masters, moments in BF16: the fastest that there is, and not what keeps the loss
        works[BF16].optimizer = torch.optim.AdamW(works[BF16].model.parameters(), lr=1e-5, fused=True)
        both = {name: works[name] for name in (BF16, OCTILE) if name in works}
        yield from _times(case, f"{OPTIMIZED}, the peer's all in BF16", both, tokens, graphs=both)
    if MAIN_GRAD in works:
        for what, size in of_a_parameter(works[MAIN_GRAD]).items():
            yield Row(case, f"{what}, of a parameter", size, "bytes")
    del works
    _clean()


def mixture(config: ModelConfig, ranks: int, sequence: int, device: str, begin: float) -> Iterator[Row]:
    """The rank's share of a block with experts."""
    case = SLICE
    makers = {
        EAGER: lambda: rank_slice(config, ranks, sequence, device),
        BF16: lambda: compiled(rank_slice(config, ranks, sequence, device)),
        OCTILE: lambda: _converted(rank_slice(config, ranks, sequence, device), V3),
        "octile, gate and up again": lambda: _converted(
            rank_slice(config, ranks, sequence, device), SETTINGS["octile, gate and up again"]
        ),
        COMPILED: lambda: compiled(_converted(rank_slice(config, ranks, sequence, device), V3)),
    }
    works = _prepare(case, makers, begin)
    yield from _times(case, STEP, works, sequence, graphs=works)
    if OCTILE in works:
        yield from _profiled(case, works)
    yield from _activations(case, works, sequence, of_torchao=False)
    del works
    _clean()


def _converted(work: Work, recipe: Recipe) -> Work:
    apply_recipe(work.model, recipe)
    return work


def _of_torchao(work: Work, recipe: str) -> Work:
    torchao(recipe)(work.model)
    return compiled(work)


def _adamw(model: nn.Module) -> AdamW:
    """FP32 masters and moments in BF16, whatever the model's own dtype."""
    return AdamW(param_groups(model, 0.1), lr=1e-5)


def _optimized(work: Work, main_grad: bool = False) -> Work:
    work.optimizer = _adamw(work.model)
    for p in work.model.parameters():
        if main_grad and p.dim() > 1:
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
    return work


def _prepare(case: str, makers: dict[str, Callable[[], Work]], begin: float) -> Candidates:
    """Those of the models that run here, after a first step, which compiles."""
    works: Candidates = {}
    for name, make in makers.items():
        if time.monotonic() - begin > TIME:
            _left_out(case, name, f"{TIME:g} s are over")
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
    """Milliseconds of each model, and ours in tokens a second beside each peer, each in its fastest form.

    Args:
        graphs: which of the models are captured as well.
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
    """The models that a CUDA graph can hold: it takes the host out of a step."""
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
    """Of octile's step every call, and of all models' the shares of products, attention and the rest."""
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


def _activations(case: str, works: Candidates, tokens: int, of_torchao: bool) -> Iterator[Row]:
    """Bytes kept a token and layer, by what autograd is given and by what the allocator holds."""
    found: dict[str, dict[str, float]] = {}
    for name, work in works.items():
        if name.startswith("torchao") and not of_torchao:
            continue
        try:
            found[name] = _kept(work, name)
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


def _kept(work: Work, name: str) -> dict[str, float]:
    work.forget_gradients()
    for p in work.model.parameters():
        p.grad = None
    if name.startswith(OCTILE):
        cache_weights(work)
    else:
        work.forward()  # the first call of a form may allocate what stays
    work.pop_losses()
    found: dict[str, float] = {}
    if torch.cuda.is_available():
        found["allocated"] = allocated_by(work.forward)
        work.pop_losses()
    found["saved"] = kept_for_backward(work.model, work.forward)
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


def _kept_bytes() -> list[Row]:
    """2048 tokens through a stack of linear layers, before and after `convert`.

    A BF16 model keeps its inputs; under autocast FP32 weights are cast as well, and the copies are kept. FP8 stands
    beside the first with its inputs alone and beside the second with its cached weights, one byte each.
    """
    tokens, width, depth = 2048, 1024, 8
    plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
    bf16 = copy.deepcopy(plain).bfloat16()
    fp8 = apply_recipe(copy.deepcopy(plain), Recipe.deepseek_v3())
    torch.optim.SGD(fp8.parameters()).step()  # as in training: an optimizer holds the weights, so copies are cached
    x = torch.randn(tokens, width, dtype=torch.bfloat16)

    def autocast(model: nn.Module) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        return forward

    inputs, with_copies = kept_for_backward(bf16, lambda: bf16(x)), kept_for_backward(plain, autocast(plain))
    ours, weights = kept_for_backward(fp8, autocast(fp8)), sum(p.numel() for p in fp8.parameters())
    case, mib = f"{depth} Linear {width}", 2**20
    return [
        compare(case, "kept for backward", ours / mib, "MiB", "bf16", inputs / mib),
        compare(case, "kept, with weights", (ours + weights) / mib, "MiB", "autocast", with_copies / mib),
    ]
