"""octile and a peer on a miniature model: the peer's engine is a stand-in, and its server a second `octile serve`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.bench import goals, run
from octile.bench.goals import BETWEEN_P99
from octile.bench.rows import Row
from octile.bench.serve import endpoint, peer
from octile.bench.serve.peer import Compared, Peer, compared_rows
from octile.bench.serve.peer.engine_speed import EngineCase, Work
from octile.bench.serve.peer.random_folder import write_random_folder
from octile.bench.serve.peer.streams import Traffic
from octile.bench.serve.peer.vllm import SETTINGS, Setting
from octile.signals import Terminated, terminable
from tests.forked_command import ForkedCommand
from tests.train.conftest import MICRO

TRITON, DEEP_GEMM = SETTINGS[:2]
WORK = Work([EngineCase(1, 12, True), EngineCase(2, 12, True), EngineCase(2, 16, False)], 320, 4, 64)


def compared(folder, rows_folder, settings=(TRITON,)) -> Compared:
    traffic = Traffic(((2, 4),), prompt=6, new_tokens=5)
    rows_file = rows_folder / "rows.json"
    return Compared(folder, "micro, FP8 weights", settings, torch.device("cpu"), WORK, rows_file, traffic)


def by_peer(rows: list[Row], what: str | None = None) -> list[tuple[str, str | None]]:
    return [(row.case, row.against and row.against.peer) for row in rows if what in (None, row.what)]


@pytest.mark.slow
def test_the_engine_is_compared_with_each_setting_and_one_that_fails_is_left_out(vllm, micro_folder, tmp_path, capsys):
    rows = list(compared_rows(compared(micro_folder, tmp_path, (DEEP_GEMM, TRITON)), vllm, "engine"))
    cases = [
        "micro, FP8 weights, decode, batch 1",
        "micro, FP8 weights, decode, batch 2",
        "micro, FP8 weights, prefill, 2 × 16 tokens",
    ]
    assert by_peer(rows) == [(case, who) for who in (None, "vLLM 0.0, triton") for case in cases]
    assert [row.value for row in rows[:3]] == [row.value for row in rows[3:]]
    assert all(row.against.ratio == row.value / row.against.value for row in rows[3:])
    assert "left out: vLLM 0.0, deep_gemm: it ended with exit code 1" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_peer_has_finished_is_written_and_printed_after_sigterm(
    vllm, micro_folder, tmp_path, monkeypatch, capsys
):
    path, hanging = tmp_path / "rows.json", Setting("stuck", {"moe_backend": "hangs at batch 2"})
    compared_with_it = compared(micro_folder, tmp_path, (hanging,))
    monkeypatch.setattr(peer, "rows", lambda *_: compared_rows(compared_with_it, vllm, "engine"))

    def written() -> list[dict]:
        return json.loads(path.read_text())["rows"] if path.exists() else []

    def terminate_when_compared() -> None:
        while not any(row["against"] for row in written()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate_when_compared)
    thread.start()
    with terminable(), pytest.raises(Terminated):
        run("serve.peer", path, micro_folder, peer=Peer(path))
    thread.join()
    assert [row["against"] is not None for row in written()] == [False] * len(WORK.cases) + [True]
    lines = capsys.readouterr().out.splitlines()
    assert sum("micro, FP8 weights, decode, batch 1" in line for line in lines) == 2
    assert lines[-1] == f"written to {path}"
    assert "INFO starting" in (tmp_path / "rows-micro-stuck-engine.log").read_text()


@pytest.mark.slow
def test_a_setting_of_the_server_alone_has_no_engine(vllm, micro_folder, tmp_path):
    rows = compared_rows(compared(micro_folder, tmp_path, (SETTINGS[3],)), vllm, "engine")
    assert {who for _, who in by_peer(list(rows))} == {None}


@pytest.mark.exhaustive  # two servers start
def test_servers_get_the_same_traffic(vllm, micro_folder, tmp_path, monkeypatch):
    def popen(command, **options) -> ForkedCommand:
        assert command[:3] == [sys.executable, "-m", "octile"]
        return ForkedCommand([*command[3:], "--cache.gib", "0.05"])

    monkeypatch.setattr(endpoint, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
    rows = list(compared_rows(compared(micro_folder, tmp_path), vllm, "http"))
    cases = [f"micro, FP8 weights, 2 streams, {load}" for load in ("always busy", "arrivals at 50%", "arrivals at 90%")]
    for what in ("throughput", "first token, p50", "first token, p99", BETWEEN_P99, "tokens of an event"):
        assert by_peer(rows, what) == [(case, who) for who in (None, "vLLM 0.0, triton") for case in cases]
    half, most = (row.value for row in rows if row.what == "arrivals")
    assert most == pytest.approx(half * 90 / 50)
    assert all(row.value > 0 for row in rows)


def test_a_cpu_is_refused_before_any_work(monkeypatch, micro_folder):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peer, "Vllm", None)
    with pytest.raises(ValueError, match="peer vllm is measured on a GPU, and torch finds none here"):
        next(peer.rows(micro_folder, Peer(Path("rows.json"))))


@pytest.mark.parametrize(
    ("name", "why"), [("micro", "its intermediate_size is 96, and vLLM takes"), ("none", "no checkpoint at")]
)
def test_a_folder_that_vllm_does_not_load_is_refused_before_it_is_looked_for(monkeypatch, micro_folder, name, why):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peer, "Vllm", None)
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        next(peer.rows(micro_folder.with_name(name), Peer(Path("rows.json"))))


def test_a_setting_for_other_weights_is_refused(monkeypatch, tmp_path, vllm):
    write_random_folder(tmp_path, MICRO, "bf16")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(peer.Vllm, "find", lambda python: vllm)
    with pytest.raises(ValueError, match=f"peer_setting deep_gemm needs FP8 weights, which {tmp_path} has not"):
        next(peer.rows(tmp_path, Peer(tmp_path / "rows.json", settings=("deep_gemm",))))


def test_v2_lite_is_recognized_by_its_shape(monkeypatch, micro_folder):
    assert peer._compared(micro_folder, SETTINGS, torch.device("cpu"), Path("rows.json")).name == "micro, FP8 weights"
    monkeypatch.setattr(peer, "V2_LITE", peer.replace(peer.read_model_config(micro_folder), extra={}))
    assert (
        peer._compared(micro_folder, SETTINGS, torch.device("cpu"), Path("rows.json")).name
        == f"{goals.V2_LITE}, FP8 weights"
    )
