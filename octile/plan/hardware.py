"""The description of a cluster: GPUs, links and what kernels reach of them, read from TOML files.

The files of `octile/plan/clusters` are known by their names; a user's own file is given by its path. A file says what
the data sheets say. What kernels reach of that was measured on one H200 (`efficiencies.toml`, with sources), unless the
cluster's file has values of its own.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

from octile.models.config import PRESETS
from octile.plan.layout import Layout
from octile.validation import Range, check_fields, from_json, read_text

CLUSTERS = Path(__file__).parent / "clusters"
EFFICIENCIES = Path(__file__).parent / "efficiencies.toml"

Count = Annotated[int, Range(at_least=1, at_most=10**7)]
Rate = Annotated[float, Range(above=0)]
Seconds = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(above=0, at_most=1)]


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        name: in print.
        multiprocessors: SMs.
        bf16_peak, fp8_peak: dense FLOP/s.
        memory: bytes.
        memory_bandwidth: bytes per second.
        device_name: the whole name as `torch.cuda.get_device_name` has it, by which `find_gpu` finds the data sheet.
    """

    name: str
    multiprocessors: Count
    bf16_peak: Rate
    fp8_peak: Rate
    memory: Rate
    memory_bandwidth: Rate
    device_name: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "gpu.")


@dataclass(frozen=True)
class Link:
    """A link of a GPU: bytes per second in one direction, and seconds until the first byte arrives."""

    bandwidth: Rate
    latency: Seconds

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Efficiencies:
    """What kernels reach of a data sheet; `efficiencies.toml` has each with its source.

    attention_keys are keys that a query costs in addition to those that it attends to, expert_deviation is the standard
    deviation of an expert's tokens, of the mean. Latencies are seconds, rates bytes per second. The others are shares:

        fp8_…                                             of the FP8 peak
        bf16_…, attention_…, latent_attention             of the BF16 peak
        nvlink, nvlink_collective, …network               of a link
        during_exchange, during_gemm                      of the speed without the other
        gemm_in_step                                      of the speed alone
        overlap                                           of an overlapped pair
        allocated                                         of the memory that torch reserves
        all others                                        of the memory bandwidth
    """

    fp8_gemm: Share
    fp8_gemm_unhidden: Share
    fp8_wgrad: Share
    fp8_wgrad_unhidden: Share
    gemm_latency: Seconds
    bf16_gemm: Share
    gemm_in_step: Share
    attention_forward: Share
    attention_backward: Share
    attention_keys: Annotated[float, Range(at_least=0)]
    latent_attention: Share
    latent_attention_bandwidth: Share
    copy: Share
    quantize: Share
    requantize: Share
    norm: Share
    norm_backward: Share
    swiglu: Share
    swiglu_backward: Share
    permute: Share
    unpermute: Share
    rotate: Share
    latent_keys: Share
    latent_keys_backward: Share
    cross_entropy: Share
    optimizer: Share
    operator_latency: Seconds
    dispatch_rate: Rate
    combine_rate: Rate
    nvlink: Share
    nvlink_collective: Share
    network: Share
    decoding_network: Share
    during_exchange: Share
    during_gemm: Share
    overlap: Share
    expert_deviation: Annotated[float, Range(at_least=0)]
    allocated: Share

    def __post_init__(self) -> None:
        check_fields(self, "efficiencies.")


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes.

    Attributes:
        name: in print.
        gpus, gpus_per_node: all GPUs, and those that NVLink connects.
        gpu: their data sheet.
        nvlink: within a node.
        network: between nodes, of one GPU; None if there is one node.
        exchange_multiprocessors: SMs that a GPU has for dispatch and combine while it computes.
        dollars_per_gpu_hour: the price; None: no cost is reported.
        efficiencies: what was measured on the cluster itself: fields of `Efficiencies` that replace those of Hopper.
        layouts: layouts of published runs by preset, as tables of `Layout`'s fields.

    Raises:
        ValueError: a field is out of range, nodes do not divide the GPUs, there is no network between nodes, an
            efficiency is unknown, or a table of layouts is not one of a preset's layout.
    """

    name: str
    gpus: Count
    gpus_per_node: Count
    gpu: Gpu
    nvlink: Link
    network: Link | None = None
    exchange_multiprocessors: Annotated[int, Range(at_least=0)] = 20
    dollars_per_gpu_hour: Rate | None = None
    efficiencies: dict[str, Any] = field(default_factory=dict, hash=False)
    layouts: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.gpus % min(self.gpus, self.gpus_per_node):
            raise ValueError(f"gpus must be a multiple of gpus_per_node, {self.gpus_per_node}, not {self.gpus}")
        if self.gpus > self.gpus_per_node and self.network is None:
            raise ValueError(
                f"network is missing: {self.gpus:,} GPUs are {self.gpus // self.gpus_per_node:,} nodes of "
                f"{self.gpus_per_node}"
            )
        if self.exchange_multiprocessors >= self.gpu.multiprocessors:
            raise ValueError(
                f"exchange_multiprocessors must be below the {self.gpu.multiprocessors} SMs of the GPU, not "
                f"{self.exchange_multiprocessors}"
            )
        _ = self.reached
        for preset in self.layouts:
            if preset not in PRESETS:
                raise ValueError(f"layouts.{preset} is unknown: there are {', '.join(PRESETS)}")
            self.published(preset)

    def published(self, preset: str) -> Layout | None:
        """The layout of a published run of a preset; None if there is none."""
        table = self.layouts.get(preset)
        return None if table is None else from_json(Layout, table, f"layouts.{preset}")

    @cached_property
    def reached(self) -> Efficiencies:
        """What kernels reach on this cluster."""
        return from_json(Efficiencies, asdict(read_efficiencies()) | self.efficiencies, "efficiencies")


def cluster_names() -> tuple[str, ...]:
    """The names of the clusters that come with octile."""
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.toml")))


def find_gpu(device_name: str) -> Gpu | None:
    """Return the data sheet of a GPU by its name, as `torch.cuda.get_device_name` has it; None: no cluster has it.

    The whole name counts: an H100 PCIe or a part of an H100 (MIG) has another data sheet than an H100 SXM.
    """
    gpus = (read_cluster(name).gpu for name in cluster_names())
    return next((gpu for gpu in gpus if gpu.device_name == device_name), None)


def read_cluster(name: str) -> Cluster:
    """Read a cluster: one of `cluster_names()`, or the path of a TOML file.

    Raises:
        ValueError: the name is unknown, or the file is damaged or lacks something; the message names the field.
        FileNotFoundError, IsADirectoryError: there is no such file, or it is a folder.
    """
    if name in cluster_names():
        return _read(Cluster, CLUSTERS / f"{name}.toml")
    path = Path(name)
    if name and path.is_dir():
        raise IsADirectoryError(f"cluster {name!r} is a folder: name a .toml file")
    if not path.is_file() and path.suffix.lower() != ".toml":
        known = ", ".join(cluster_names())
        raise ValueError(f"unknown cluster {name!r}; there are {known}, or give the path of a .toml file")
    if not path.is_file():
        raise FileNotFoundError(f"cluster file {name!r} does not exist")
    return _read(Cluster, path)


@cache
def read_efficiencies() -> Efficiencies:
    """Read what kernels reach on Hopper, as far as a cluster's file does not say otherwise."""
    return _read(Efficiencies, EFFICIENCIES)


def _read(cls: Any, path: Path) -> Any:
    text = read_text(path)
    try:
        return from_json(cls, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    except ValueError as error:  # of a field
        raise ValueError(f"{path}: {error}") from None
