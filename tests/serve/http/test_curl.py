"""The curl commands of the documents get their answers."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.http.config import Limits
from octile.serve.process.updates import WeightsUpdates
from octile.serve.weights.load import Folder
from tests.serve.http.certificates import make_certificate
from tests.serve.http.conftest import Served

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
    *sorted(ROOT.glob("deploy/**/*.md")),
]
COMMAND = re.compile(r"^ *(curl (?:.*\\\n)*.*)$", re.MULTILINE)
COMMANDS = [(page, found[1]) for page in PAGES for found in COMMAND.finditer(page.read_text(encoding="utf-8"))]
ADDRESS = "http://127.0.0.1:8000"


def curl(*arguments: str) -> tuple[int, str]:
    """The status and the body that curl gets."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl in PATH")
    command = ["curl", "--silent", "--show-error", "--write-out", "\n%{http_code}", *arguments]
    body, _, status = subprocess.run(command, check=True, capture_output=True, text=True).stdout.rpartition("\n")
    return int(status), body


@pytest.fixture
def documented(folder, tmp_path, monkeypatch):
    """The server of the documents: its model and the key of its trainer; the trainer's folder is in place."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folder, "runs/policy-2")
    opened = Folder.open(folder)
    engine, runner = opened.load(torch.device("cpu"), EngineConfig(), CacheConfig(gib=0.05))
    engine.tokenizer, engine.max_position = opened.tokenizer, runner.max_position
    updates = WeightsUpdates(engine, runner.updatable_weights)
    served = Served(engine, Limits(), (), None, weights_key="secret", updates=updates, name="tiny-deepseek_v3")
    yield served
    served.stop()


def test_the_readme_has_a_command():
    assert ROOT / "README.md" in {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[page.name for page, _ in COMMANDS])
def test_a_command_is_answered(documented, page, command):
    assert ADDRESS in command
    _, *arguments = shlex.split(command.replace("\\\n", "").replace(ADDRESS, documented.url))
    status, body = curl(*arguments)
    assert status == 200, body
    answer = json.loads(body)
    assert answer.get("choices") or answer.get("success"), body


def test_the_option_for_a_certificate_makes_curl_know_it(serve, tmp_path):
    assert "`curl --cacert server.crt`" in (ROOT / "docs" / "http_server.md").read_text(encoding="utf-8")
    files = make_certificate(tmp_path, "server")
    served = serve(tls=files)
    status, body = curl("--cacert", str(files.certfile), f"{served.url}/v1/models")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "micro")
