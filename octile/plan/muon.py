"""What Muon takes in a step instead of AdamW: one moment of each matrix, and the GEMMs of Newton–Schulz.

The exchange of rows between data-parallel ranks is not counted: each rank sends 4 bytes of a parameter that it updates,
where the sum of the gradients and the gathered weights take as much of every parameter.
"""

from __future__ import annotations

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


@cache
def newton_schulz_flops(c: ModelConfig) -> tuple[float, float]:
    """FLOPs of a parameter in BF16: of routed experts, and of the other matrices, on average."""
    from octile.models.meta import meta_model  # late: they load torch
    from octile.optim import muon_groups
    from octile.optim.muon_update import DEFAULT_NS_STEPS
    from octile.optim.row_shards import matrix_flops

    model = meta_model(c)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    flops, parameters = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for group in muon_groups(model, 0.0):
        for parameter in group["params"] if group["use_muon"] else ():
            n, k = parameter.shape[-2] // group["merged"], parameter.shape[-1]
            is_routed = kind_of(name_of[parameter]) == "routed experts"
            flops[is_routed] += parameter.numel() / (n * k) * DEFAULT_NS_STEPS * matrix_flops(n, k)
            parameters[is_routed] += parameter.numel()
    return flops[True] / max(parameters[True], 1), flops[False] / max(parameters[False], 1)
