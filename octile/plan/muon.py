"""What Muon takes in a step instead of AdamW: one moment of each matrix, temporaries, and the GEMMs of Newton–Schulz.

The exchange of rows between data-parallel ranks is not counted: each rank sends 4 bytes of a parameter that it updates,
where the sum of the gradients and the gathered weights take as much of every parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters, kind_of
from octile.plan.stages import Stage

MATRIX_MOMENT_BYTES = 2  # one in BF16
MATRIX_BYTES = 94  # of a matrix's element: read and written by the operators of octile/optim/muon_update.py but GEMMs


def held_projection(c: ModelConfig, stages: Sequence[Stage]) -> float:
    """The parameters of multi-token prediction's projection on a rank with these stages."""
    heads = sum(part.heads > 1 for stage in stages for part in stage.parts)
    return heads * count_parameters(c).mtp.get("MTP projection", 0)


def update_bytes(c: ModelConfig, stages: Sequence[Stage], ep: int, dp: int) -> int:
    """The temporary bytes of an update on a rank with these stages, at most."""
    from octile.optim.muon_update import temporary_bytes  # late: it loads torch

    parts = [part for stage in stages for part in stage.parts]
    layers, mixtures = sum(part.layers for part in parts), sum(part.mixtures for part in parts)
    modules = _modules(layers, mixtures, sum(part.heads > 1 for part in parts))
    whole, divided = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for kind, matrices_of_one in _matrices_of_modules(c).items():
        for shape, each in matrices_of_one.items():
            if kind == "routed experts":
                whole[shape] = modules[kind] * each // ep
            else:
                divided[shape] += modules[kind] * each
    return temporary_bytes(whole, divided, dp)


def _modules(layers: int, mixtures: int, predictions: int) -> dict[str, int]:
    """How many modules of each kind there are in so many layers, of which some are mixtures."""
    return {
        "attention projections": layers,
        "dense MLP": layers - mixtures,
        "shared experts": mixtures,
        "routed experts": mixtures,
        "MTP projection": predictions,
    }


@cache
def _matrices_of_modules(c: ModelConfig) -> dict[str, dict[tuple[int, int], int]]:
    """How many matrices [N, K] a module of each kind has, by N and K; modules of a kind have the same."""
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    mixtures = sum(c.is_moe(layer) for layer in range(layers))
    modules = _modules(layers, mixtures, c.num_nextn_predict_layers)
    return {
        kind: {shape: count // modules[kind] for shape, count in shapes.items()}
        for kind, shapes in matrices(c).items()
        if kind in modules
    }


@cache
def matrices(c: ModelConfig) -> dict[str, Counter[tuple[int, int]]]:
    """How many matrices [N, K] Muon updates, by kind (`octile.models.counts.kind_of`), and by N and K."""
    from octile.models.meta import meta_model  # late: they load torch
    from octile.optim import muon_groups

    model = meta_model(c)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, Counter[tuple[int, int]]] = {}
    for group in muon_groups(model, 0.0):
        for parameter in group["params"] if group["use_muon"] else ():
            n, k = parameter.shape[-2] // group["merged"], parameter.shape[-1]
            shapes = found.setdefault(kind_of(name_of[parameter]), Counter())
            shapes[n, k] += parameter.numel() // (n * k)
    return found


@cache
def newton_schulz_flops(c: ModelConfig) -> tuple[float, float]:
    """FLOPs of a parameter in BF16: of routed experts, and of the other matrices, on average."""
    from octile.optim.muon_update import DEFAULT_NS_STEPS  # late: they load torch
    from octile.optim.row_shards import matrix_flops

    flops, parameters = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for kind, shapes in matrices(c).items():
        for (n, k), count in shapes.items():
            flops[kind == "routed experts"] += count * DEFAULT_NS_STEPS * matrix_flops(n, k)
            parameters[kind == "routed experts"] += count * n * k
    return flops[True] / max(parameters[True], 1), flops[False] / max(parameters[False], 1)
