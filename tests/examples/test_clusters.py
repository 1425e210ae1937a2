"""The jobs for Slurm and Kubernetes, as far as that can be tested without either: they start ranks that can train."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.examples.conftest import FOLDER
from tests.train_commands import config_of

SBATCH = FOLDER / "slurm" / "train.sbatch"
SERVICE, JOB = yaml.safe_load_all((FOLDER / "kubernetes" / "train.yaml").read_text(encoding="utf-8"))
POD = JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]
ENVIRONMENT = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
NODES, GPUS = 2, 8
PROGRAMS = {  # each writes its arguments into a file
    "torchrun": 'printf "%s\\n" "$@" >"$TRACE/torchrun-${SLURM_NODEID-0}"; sleep "${WAIT:-0}" & wait',
    "scontrol": 'echo "$@" >>"$TRACE/scontrol"; [[ $1 == show ]] && printf "first\\nsecond\\n" || true',
    "scancel": 'echo "$@" >"$TRACE/scancel"; kill "$(cat "$TRACE/srun")"',
    "srun": 'echo $$ >"$TRACE/srun"; while [[ $1 == -* ]]; do shift; done; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
}
OF_SLURM = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": f"{NODES}", "SLURM_NNODES": f"{NODES}"}
OF_SLURM |= {"SLURM_GPUS_ON_NODE": f"{GPUS}", "SLURM_JOB_NODELIST": "first,second"}


@pytest.fixture
def cluster(tmp_path):
    """The environment of a job: programs that write what they were given, and a folder for the run."""
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        program.chmod(0o755)
    (tmp_path / "bin" / "activate").touch()
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "TRACE": f"{tmp_path}", "VENV": f"{tmp_path}", "RUN": f"{tmp_path / 'run'}"}


def start(job: str, environment: dict[str, str]) -> subprocess.Popen:
    if job == "slurm":
        return subprocess.Popen(["bash", SBATCH], env={**environment, **OF_SLURM})
    given = {**ENVIRONMENT, "RUN": environment["RUN"], "JOB_COMPLETION_INDEX": "0"}
    return subprocess.Popen([*CONTAINER["command"], *CONTAINER["args"]], env={**environment, **given})


def torchrun_of(trace: Path, node: int = 0) -> tuple[dict[str, str], list[str]]:
    """The options that a node's torchrun was given, and the arguments of `octile train`."""
    words = (trace / f"torchrun-{node}").read_text(encoding="utf-8").splitlines()
    module = words.index("-m")
    assert words[module : module + 3] == ["-m", "octile", "train"]
    return dict(zip(words[:module:2], words[1:module:2], strict=True)), words[module + 3 :]


@pytest.mark.parametrize("job", ["slurm", "kubernetes"])
def test_the_ranks_of_a_job_can_train(job, cluster, tmp_path, monkeypatch):
    assert start(job, cluster).wait(timeout=60) == 0
    options, arguments = torchrun_of(tmp_path)
    assert (options["--nnodes"], options["--nproc-per-node"]) == (f"{NODES}", f"{GPUS}")
    config = config_of(arguments, NODES * GPUS, monkeypatch)
    assert config.out == tmp_path / "run"
    assert config.checkpoint_every > 0


@pytest.mark.parametrize("job", ["slurm", "kubernetes"])
def test_a_job_whose_run_exists_resumes_it(job, cluster, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    assert start(job, cluster).wait(timeout=60) == 0
    ranks = f"{NODES * GPUS}"
    assert torchrun_of(tmp_path)[1] == ["--resume", "--parallel.dp", ranks, "--out", f"{tmp_path / 'run'}"]


def test_each_node_of_slurm_has_its_rank_and_the_address_of_the_first(cluster, tmp_path):
    start("slurm", cluster).wait(timeout=60)
    nodes = [torchrun_of(tmp_path, node)[0] for node in range(NODES)]
    assert [options["--node-rank"] for options in nodes] == ["0", "1"]
    assert {(options["--master-addr"], options["--master-port"]) for options in nodes} == {("first", "24567")}


def test_a_job_of_slurm_that_is_near_its_time_limit_stops_the_ranks_and_is_queued_again(cluster, tmp_path):
    script = start("slurm", {**cluster, "WAIT": "60"})
    deadline = time.monotonic() + 60
    while not (tmp_path / "torchrun-0").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    script.send_signal(10)  # SIGUSR1
    script.wait(timeout=60)
    assert (tmp_path / "scancel").read_text() == "--signal=TERM 1234567\n"
    assert (tmp_path / "scontrol").read_text().splitlines()[-1] == "requeue 1234567"


def test_the_signal_of_slurm_comes_before_torchrun_would_kill_the_ranks(cluster, tmp_path):
    start("slurm", cluster).wait(timeout=60)
    (signal,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", SBATCH.read_text(), re.MULTILINE)
    assert int(torchrun_of(tmp_path)[0]["--shutdown-timeout"]) < int(signal)


def test_a_pod_has_longer_than_torchrun_waits_for_the_ranks(cluster, tmp_path):
    start("kubernetes", cluster).wait(timeout=60)
    assert int(torchrun_of(tmp_path)[0]["--shutdown-timeout"]) < POD["terminationGracePeriodSeconds"]


def test_the_pods_are_the_nodes():
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == int(ENVIRONMENT["NODES"]) == NODES
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(ENVIRONMENT["GPUS"]) == GPUS


def test_the_first_pod_has_the_address_that_the_others_ask(cluster, tmp_path):
    start("kubernetes", cluster).wait(timeout=60)
    name, service = JOB["metadata"]["name"], SERVICE["metadata"]["name"]
    assert torchrun_of(tmp_path)[0]["--master-addr"] == f"{name}-0.{service}"
    assert POD["subdomain"] == service
    assert SERVICE["spec"]["selector"] == {"job-name": name}
    assert SERVICE["spec"]["clusterIP"] == "None"


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_kubernetes_takes_the_file(version):
    pytest.importorskip("kubernetes_validate", reason="octile[clients] is not installed")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version]
    subprocess.run([*command, FOLDER / "kubernetes" / "train.yaml"], check=True)
