"""Descriptions of clusters, and what kernels reach of them."""

import tomllib
from dataclasses import fields

import pytest

from octile.plan.hardware import CLUSTERS, Cluster, cluster_names, find_gpu, read_cluster, read_efficiencies

FILE = (CLUSTERS / "h200_8.toml").read_text(encoding="utf-8")


def written(tmp_path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_can_be_read_by_its_name(name):
    assert read_cluster(name).name == name


def test_a_users_file_is_read_by_its_path(tmp_path):
    assert read_cluster(written(tmp_path, FILE.replace('"h200_8"', '"mine"'))).name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus = 8\n", "", "gpus is missing"),
        ("gpus = 8\n", "gpus = 0\n", "gpus must be at least 1, not 0"),
        ("gpus = 8\n", "gpus = 12\n", "gpus must be a multiple of gpus_per_node, 8, not 12"),
        ("gpus = 8\n", "gpus = 16\n", "network is missing: 16 GPUs are 2 nodes of 8"),
        ("bandwidth = 450e9", 'bandwidth = "fast"', "bandwidth must be a number, not 'fast'"),
        ("bandwidth = 450e9", "width = 450e9", "nvlink.width is unknown: there are bandwidth, latency"),
        ("multiprocessors = 132", "multiprocessors = 32", "exchange_multiprocessors must be below the 32 SMs"),
        ("[gpu]", "[gpu", "mine.toml: not TOML: "),
        ("latency = 5e-6", "latency = inf", "nvlink.latency must be finite, not inf"),
        ("[gpu]", "layouts.v9.pp = 2\n[gpu]", "layouts.v9 is unknown: there are tiny, "),
        ("[gpu]", "layouts.tiny = 2\n[gpu]", "layouts.tiny must be an object, not 2"),
        ("[gpu]", 'layouts.tiny.schedule = "foo"\n[gpu]', "layouts.tiny.schedule must be gpipe or 1f1b"),
        ("[gpu]", 'layouts.tiny.pp = "16"\n[gpu]', "layouts.tiny.pp must be a whole number, not '16'"),
        ("[gpu]", "layouts.tiny.foo = 3\n[gpu]", "layouts.tiny.foo is unknown: there are pp, ep"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=r"mine\.toml: ") as error:
        read_cluster(written(tmp_path, FILE.replace(old, new, 1)))
    assert message in str(error.value)


def test_an_unknown_name_is_refused_with_those_that_there_are():
    known = "h100_8, h200_2048, h200_8, h800_2048"
    with pytest.raises(ValueError, match=f"unknown cluster 'h900'; there are {known}, or give the"):
        read_cluster("h900")


def test_a_file_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.toml"):
        read_cluster(str(tmp_path / "missing.toml"))


@pytest.mark.parametrize("name", ["mine", "mine.TOML"])
def test_a_file_that_exists_is_read_whatever_its_suffix(tmp_path, name):
    (tmp_path / name).write_text(FILE, encoding="utf-8")
    assert read_cluster(str(tmp_path / name)).name == "h200_8"


def test_a_folder_is_no_cluster(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder: name a"):
        read_cluster(str(tmp_path))


def test_a_gpu_is_found_by_the_name_that_the_driver_has():
    names = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA H800": "H800"}
    gpus = {name: find_gpu(name) for name in names}
    assert {name: gpu.name for name, gpu in gpus.items() if gpu} == names
    assert [gpu.memory_bandwidth for gpu in gpus.values() if gpu] == [3.35e12, 4.8e12, 3.35e12]


@pytest.mark.parametrize(
    "device_name",
    [
        *("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H800 PCIe"),
        *("NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_a_gpu_with_another_data_sheet_is_not_found(device_name):
    assert find_gpu(device_name) is None


def test_every_efficiency_has_a_value():
    assert all(getattr(read_efficiencies(), field.name) > 0 for field in fields(read_efficiencies()))


def test_a_cluster_may_have_efficiencies_of_its_own(tmp_path):
    cluster = read_cluster(written(tmp_path, f"{FILE}\n[efficiencies]\nfp8_gemm = 0.5\n"))
    assert (cluster.reached.fp8_gemm, cluster.reached.copy) == (0.5, read_efficiencies().copy)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fp9_gemm = 0.5", "efficiencies.fp9_gemm is unknown: there are fp8_gemm"),
        ("fp8_gemm = 1.5", "efficiencies.fp8_gemm must be at most 1"),
    ],
)
def test_an_efficiency_that_is_unknown_or_above_1_is_refused(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_cluster(written(tmp_path, f"{FILE}\n[efficiencies]\n{line}\n"))


def test_a_cluster_can_be_a_key():
    assert len({read_cluster("h200_8"), read_cluster("h200_8")}) == 1


def test_the_published_cluster_has_the_papers_links():
    cluster = read_cluster("h800_2048")
    assert isinstance(cluster, Cluster)
    assert (cluster.nvlink.bandwidth, cluster.network.bandwidth) == (160e9, 50e9)
    assert tomllib.loads((CLUSTERS / "h800_2048.toml").read_text(encoding="utf-8"))["gpus"] == 2048
