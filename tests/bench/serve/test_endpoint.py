"""What `octile bench serve` measures, on a miniature model."""

import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.bench import goals, serve
from octile.bench.goals import FASTEST_DRAFTS, LONG_CLIENT
from octile.bench.rows import compare
from octile.bench.serve import endpoint
from octile.checkpoint.hugging_face import save
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.http.stress import Stress
from octile.tokenizer import Tokenizer
from tests.forked_command import ForkedCommand
from tests.train.conftest import MICRO


@pytest.fixture(autouse=True)
def forked(monkeypatch) -> None:
    """Fork the servers, so that torch is imported once."""

    def popen(command, **options) -> ForkedCommand:
        assert command[:3] == [sys.executable, "-m", "octile"]
        return ForkedCommand(command[3:])

    monkeypatch.setattr(endpoint, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([inspect.getsource(inspect)], MICRO.vocab_size)


@pytest.mark.slow
def test_rows_of_a_miniature_model(tokenizer, tmp_path, monkeypatch):
    save(DeepseekV3(MICRO), tmp_path, weights="fp8")
    tokenizer.save(tmp_path)
    for name, clients in (("WARM_UP", 1), ("ONE", 1), ("MANY", 4), ("CROWD", 20), ("LONG", 1)):
        monkeypatch.setattr(endpoint, name, Stress(clients=clients, requests=clients, prompt_words=2, new_tokens=4))
    monkeypatch.setattr(endpoint, "DRAFTS", (1, 3))
    torch.manual_seed(0)
    rows = {(row.case, row.what): row for row in serve.rows(tmp_path)}
    assert rows["64 clients", "throughput"].against.peer == "1 client"
    assert rows["1,000 clients at once", "answered"].value == 20
    for drafts in ("1 draft", "3 drafts"):
        assert 0 <= rows[f"1 client, 256 tokens, {drafts}", "drafts accepted"].value <= 100
        assert 0 < rows[f"1 client, 256 tokens, {drafts}", "drafts per step"].value <= int(drafts[0])
    fastest = rows["1 client, 256 tokens, fastest with drafts", "throughput"]
    assert fastest.against.peer == "1 client, 256 tokens"
    assert fastest.value == max(
        row.value for (case, _), row in rows.items() if case.endswith(("draft", "drafts")) and row.unit == "tokens/s"
    )
    assert rows["1 client", "between tokens, p99"].value > 0
    *_, ratio, refused = serve.show(list(rows.values())).splitlines()
    assert ratio.endswith("lower is better for times and bytes.")
    assert "--limits.in-flight" in refused


def test_a_run_without_a_model_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        next(serve.rows(tmp_path))


@pytest.mark.slow
def test_a_server_that_does_not_start_is_reported(tokenizer, tmp_path):
    save(DeepseekV3(MICRO), tmp_path, weights="fp8")
    with pytest.raises(RuntimeError, match="ended with exit code 2 before it served: octile: tokenizer"):
        next(serve.rows(tmp_path))


def test_a_missing_package_is_named_before_a_server_is_started(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setattr(endpoint, "subprocess", None)
    with pytest.raises(ImportError, match=r'octile\'s server needs uvicorn: pip install "octile\[serve\]"'):
        next(serve.rows(tmp_path))


@pytest.mark.parametrize(
    ("gpu", "verdict"),
    [
        (None, ""),
        ("NVIDIA H200", "drafts vs. none, tokens/s: 1.200: floor ≥ 1.3 MISSED, aim ≥ 1.7 MISSED"),
        ("NVIDIA L4", ""),
    ],
    ids=["CPU", "H200", "another GPU"],
)
def test_a_goal_is_shown_on_its_machine_only(gpu, verdict):
    rows = [compare(FASTEST_DRAFTS, "throughput", 36.0, "tokens/s", LONG_CLIENT, 30.0)]
    assert goals.serve_verdicts(rows, gpu) == verdict
