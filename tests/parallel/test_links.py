"""Tests of the links between GPUs that `octile doctor` prints, with faked GPUs and a faked NVML."""

import sys
from types import SimpleNamespace

import pytest
import torch

from octile.parallel import links as links_module
from octile.parallel.links import NVLINK, OK, Link, describe_dispatch, describe_nodes, find_links

NOT_SUPPORTED = 5


class NvmlError(Exception):
    pass


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n, cut): n GPUs of which the pairs in cut cannot access each other; torch counts them from the last."""

    def fake(n: int, cut: tuple[tuple[int, int], ...] = ()) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) not in cut)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=f"uuid-{n - 1 - gpu}"), raising=False
        )

    return fake


@pytest.fixture
def nvml(monkeypatch):
    """NVML's bindings: GPUs 0 and 1 of its own numbers have NVLink, all others are on several NUMA nodes."""
    fake = SimpleNamespace(
        NvmlError=NvmlError,
        init_v2=lambda: None,
        shutdown=lambda: None,
        device_get_handle_by_uuid=lambda uuid: int(uuid.removeprefix("GPU-uuid-")),
        device_get_p2p_status=lambda a, b, index: OK if index == NVLINK and {a, b} == {0, 1} else NOT_SUPPORTED,
        device_get_topology_common_ancestor=lambda a, b: 50,
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(nvml=fake))
    return fake


def test_a_pair_with_nvlink_is_found_by_the_gpus_identity(gpus, nvml):
    gpus(3)
    assert [(link.first, link.second, link.link) for link in find_links()] == [
        (0, 1, "PCIe, several NUMA nodes"),
        (0, 2, "PCIe, several NUMA nodes"),
        (1, 2, "NVLink"),  # torch counts from the other end
    ]


def test_access_is_needed_in_both_directions(gpus, nvml):
    gpus(3, cut=((2, 0),))
    assert [link.can_access for link in find_links()] == [True, False, True]


@pytest.mark.parametrize("n", [0, 1])
def test_without_two_gpus_there_is_no_link(gpus, n):
    gpus(n)
    assert find_links() == []


def test_without_nvmls_bindings_the_link_is_unknown_and_the_access_is_not(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace())
    (link,) = find_links()
    assert link == Link(0, 1, "unknown: cuda-bindings has no NVML, or is not installed", True)


@pytest.mark.parametrize("error", [NvmlError, RuntimeError], ids=["refused", "no library"])
def test_the_reason_for_which_nvml_does_not_answer_is_told(gpus, nvml, error):
    def fail() -> None:
        raise error("no driver")

    gpus(2)
    nvml.init_v2 = fail
    (link,) = find_links()
    assert (link.link, link.can_access) == ("unknown: no driver", True)


def test_bindings_that_lack_a_function_leave_the_link_unknown(gpus, nvml):
    gpus(2)
    del nvml.device_get_p2p_status
    assert "no attribute 'device_get_p2p_status'" in find_links()[0].link


def test_nvml_is_shut_down_after_an_error(gpus, nvml):
    def fail(uuid: str) -> None:
        raise NvmlError("not found")

    ended = []
    gpus(2)
    nvml.device_get_handle_by_uuid, nvml.shutdown = fail, lambda: ended.append(True)
    assert (find_links()[0].link, ended) == ("unknown: not found", [True])


def linked(n: int) -> list[Link]:
    return [Link(a, b, "NVLink", True) for a in range(n) for b in range(a + 1, n)]


@pytest.mark.parametrize(
    ("n", "links", "expected"),
    [
        (0, [], "all_to_all_single over gloo, between processes on the CPU: there is no GPU"),
        (1, [], "all_to_all_single over NCCL, to GPUs of other hosts: there is one GPU here"),
        (2, linked(2), "kernels on symmetric memory between 2 GPUs: all can access each other's memory"),
        (
            2,
            [Link(0, 1, "PCIe, one switch", False)],
            "all_to_all_single over NCCL: these GPUs cannot access each other's memory: 0 and 1",
        ),
    ],
)
def test_what_dispatch_would_use(n, links, expected):
    assert describe_dispatch(n, links) == expected


def test_between_more_than_two_gpus_the_option_for_the_kernels_is_named():
    text = describe_dispatch(8, linked(8))
    assert text.endswith(
        "between more, all_to_all_single over NCCL, or with --parallel.exchange symmetric_memory the kernels, too"
    )


@pytest.mark.parametrize(
    ("n", "has_nvshmem", "expected"),
    [
        (0, False, "all_to_all_single over gloo: there is no GPU"),
        (2, False, "all_to_all_single over NCCL: this torch has no NVSHMEM"),
        (
            2,
            True,
            "all_to_all_single over NCCL, or with --parallel.exchange symmetric_memory NVSHMEM's all_to_all_vdev, "
            "for which the host does not wait",
        ),
    ],
)
def test_what_dispatch_across_nodes_would_use(gpus, monkeypatch, n, has_nvshmem, expected):
    gpus(n)
    monkeypatch.setattr(links_module, "has_nvshmem", lambda: has_nvshmem)
    assert describe_nodes() == expected
