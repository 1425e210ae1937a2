"""The links between the GPUs of this machine, and what dispatch to experts on other ranks would use there.

torch says which GPUs can access each other's memory. NVML, the library behind nvidia-smi, says over what; its bindings
are those of cuda-bindings, which the extra `cuda` installs.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, NamedTuple

import torch

AUTO_RANKS = 2  # between which kernels on symmetric memory exchange rows by default; more were not measured

ALL_TO_ALL, PEER_KERNELS = "all_to_all_single", "kernels on symmetric memory"
NVSHMEM_EXCHANGE = "NVSHMEM's all_to_all_vdev"

NVLINK, OK = 2, 0  # NVML's P2P capability and status; their names differ between versions of the bindings
PCIE = {  # NVML's levels of the closest common ancestor of two GPUs
    0: "one board",
    10: "PCIe, one switch",
    20: "PCIe, several switches",
    30: "PCIe, one host bridge",
    40: "PCIe, one NUMA node",
    50: "PCIe, several NUMA nodes",
}


class Link(NamedTuple):
    """How two GPUs of this machine are connected.

    Attributes:
        first, second: numbers of the GPUs, as torch counts them.
        link: "NVLink", "PCIe, …" with what lies between, or "unknown: …" with the reason.
        can_access: whether each can read and write the other's memory.
    """

    first: int
    second: int
    link: str
    can_access: bool


def find_links() -> list[Link]:
    """Find the links between each two GPUs that this process can see."""
    if not torch.cuda.is_available():
        return []
    pairs = list(combinations(range(torch.cuda.device_count()), 2))
    names = _names(pairs) if pairs else []
    return [Link(*pair, name, can_access(*pair)) for pair, name in zip(pairs, names, strict=True)]


def can_access(first: int, second: int) -> bool:
    """Whether two GPUs can read and write each other's memory."""
    can = torch.cuda.can_device_access_peer
    return can(first, second) and can(second, first)


def describe_dispatch(n_gpus: int, links: list[Link]) -> str:
    """Say what sends rows to the experts of other GPUs of this machine in `octile train`, and why."""
    if not n_gpus:
        return f"{ALL_TO_ALL} over gloo, between processes on the CPU: there is no GPU"
    if n_gpus == 1:
        return f"{ALL_TO_ALL} over NCCL, to GPUs of other hosts: there is one GPU here"
    cut = [link for link in links if not link.can_access]
    if cut:
        pairs = ", ".join(f"{link.first} and {link.second}" for link in cut)
        return f"{ALL_TO_ALL} over NCCL: these GPUs cannot access each other's memory: {pairs}"
    text = f"{PEER_KERNELS} between {AUTO_RANKS} GPUs: all can access each other's memory"
    if n_gpus == AUTO_RANKS:
        return text
    return (
        f"{text}; between more, {ALL_TO_ALL} over NCCL, or with --parallel.exchange symmetric_memory the kernels, too"
    )


def describe_nodes() -> str:
    """Say what sends these rows across nodes, whose GPUs cannot access each other's memory, and why."""
    if not torch.cuda.is_available():
        return f"{ALL_TO_ALL} over gloo: there is no GPU"
    if not has_nvshmem():
        return f"{ALL_TO_ALL} over NCCL: this torch has no NVSHMEM"
    return (
        f"{ALL_TO_ALL} over NCCL, or with --parallel.exchange symmetric_memory {NVSHMEM_EXCHANGE}, "
        "for which the host does not wait"
    )


def has_nvshmem() -> bool:
    """Whether torch has NVSHMEM here, as a backend of its symmetric memory."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    return symmetric_memory.is_nvshmem_available()


def _names(pairs: list[tuple[int, int]]) -> list[str]:
    """Name the links of pairs of GPUs."""
    try:
        from cuda.bindings import nvml
    except ImportError:
        return ["unknown: cuda-bindings has no NVML, or is not installed"] * len(pairs)
    try:
        nvml.init_v2()
    except (nvml.NvmlError, RuntimeError) as error:  # NVML's, or the library is not found
        return [f"unknown: {error}"] * len(pairs)
    try:
        return [_name(nvml, *pair) for pair in pairs]
    except (nvml.NvmlError, AttributeError) as error:  # AttributeError: another version of the bindings
        return [f"unknown: {error}"] * len(pairs)
    finally:
        nvml.shutdown()


def _name(nvml: Any, *pair: int) -> str:
    """Name the link of two GPUs, whose numbers NVML does not share with torch: CUDA_VISIBLE_DEVICES changes torch's."""
    uuids = (str(torch.cuda.get_device_properties(gpu).uuid) for gpu in pair)
    handles = [nvml.device_get_handle_by_uuid(f"GPU-{uuid}") for uuid in uuids]
    if nvml.device_get_p2p_status(*handles, NVLINK) == OK:
        return "NVLink"
    level = int(nvml.device_get_topology_common_ancestor(*handles))
    return PCIE.get(level, f"PCIe, level {level} of NVML")
