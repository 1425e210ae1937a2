"""How long work takes on a GPU, by its data sheet and what kernels reach of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from octile.plan.hardware import Cluster
from octile.plan.work import Work


def seconds(work: Work, cluster: Cluster, multiprocessors: int | None = None) -> float:
    """The time that a piece of work takes.

    Args:
        work: calls of one kind of kernel.
        cluster: whose GPU computes it.
        multiprocessors: how many SMs it has, the others being busy with exchanges; all if not given. GEMMs and
            attention slow down with fewer; operators that are bound by memory do not.
    """
    e, gpu = cluster.reached, cluster.gpu
    share = 1 if multiprocessors is None else multiprocessors / gpu.multiprocessors
    in_step = share * e.gemm_in_step
    copy = work.bytes / (gpu.memory_bandwidth * e.copy)
    if work.unit == "fp8_gemm":
        compute, unhidden = work.flops / (gpu.fp8_peak * e.fp8_gemm * in_step), e.fp8_gemm_unhidden
    elif work.unit == "fp8_wgrad":
        compute, unhidden = work.flops / (gpu.fp8_peak * e.fp8_wgrad * in_step), e.fp8_wgrad_unhidden
    elif work.unit == "bf16_gemm":
        compute, unhidden = work.flops / (gpu.bf16_peak * e.bf16_gemm * in_step), 0.0
    elif work.unit in ("attention_forward", "attention_backward"):
        flops = work.flops * (1 + e.attention_keys / work.keys)
        return flops / (gpu.bf16_peak * getattr(e, work.unit) * share)
    elif work.unit == "latent_attention":
        read = work.bytes / (gpu.memory_bandwidth * e.latent_attention_bandwidth)
        return max(work.flops / (gpu.bf16_peak * e.latent_attention * share), read)
    else:
        rate = gpu.memory_bandwidth * getattr(e, work.unit)
        return work.calls * e.operator_latency + work.bytes / rate
    return work.calls * e.gemm_latency + max(compute, copy) + unhidden * min(compute, copy)


def by_kind(work: Iterable[Work], cluster: Cluster) -> Counter[str]:
    """Seconds by the kind under which a report counts them."""
    total: Counter[str] = Counter()
    for piece in work:
        total[piece.kind] += seconds(piece, cluster)  # type: ignore[assignment]
    return total
