"""The Dockerfile, as far as that can be tested without building it."""

import json
import re
import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from tests.deploy.commands import DEPLOY, ROOT, options_of
from tests.serve.conftest import tokenizer  # noqa: F401
from tests.serve.http.conftest import serve  # noqa: F401

TEXT = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
INSTRUCTIONS = [tuple(line.split(None, 1)) for line in re.sub(r"\\\n\s*", "", TEXT).splitlines() if line]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def arguments(instruction: str) -> list[str]:
    return [given for name, given in INSTRUCTIONS if name == instruction]


def test_its_instructions_are_docker_s():
    known = {"FROM", "RUN", "ENV", "COPY", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}
    assert {name for name, _ in INSTRUCTIONS} <= known
    assert INSTRUCTIONS[0][0] == "FROM"


@pytest.mark.parametrize("source", [source for copied in arguments("COPY") for source in copied.split()[:-1]])
def test_what_it_copies_exists(source):
    assert (ROOT / source).exists()


def test_it_copies_all_that_the_package_is_built_of():
    copied = {source for each in arguments("COPY") for source in each.split()[:-1]}
    assert copied >= {"pyproject.toml", *PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]}


def test_the_extras_that_it_installs_exist():
    (extras,) = re.findall(r'pip install --no-cache-dir "/src\[([^]]*)\]"', TEXT)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])


def test_its_cuda_is_that_of_the_compiler():
    (image,) = arguments("FROM")
    (version,) = re.findall(r"cuda:(\d+\.\d+)", image)
    assert any(f"nvrtc>={version}," in need for need in PROJECT["project"]["optional-dependencies"]["cuda"])


def test_its_command_is_one_of_octile_and_serves_the_volume_to_others():
    options = options_of(json.loads(arguments("ENTRYPOINT")[0]))
    assert str(options.run) in json.loads(arguments("VOLUME")[0])
    assert options.host == "0.0.0.0"
    assert arguments("EXPOSE") == [str(options.port)]


def test_options_may_follow_its_command():
    entry = json.loads(arguments("ENTRYPOINT")[0])
    assert options_of([*entry, "--model-name", "micro", "--api-key", "a"]).model_name == "micro"


def test_the_server_is_not_root():
    names = [name for name, _ in INSTRUCTIONS]
    (user,) = arguments("USER")
    assert re.findall(r"useradd [^&]*?(\w+) &&", TEXT) == [user]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert "RUN" not in names[names.index("USER") :]


def test_its_cache_is_in_a_volume():
    volumes = json.loads(arguments("VOLUME")[0])
    folders = re.findall(r"(?:OCTILE|TRITON)_CACHE_DIR=(\S+)", TEXT)
    assert len(folders) == 2
    assert all(any(folder.startswith(f"{volume}/") for volume in volumes) for folder in folders)


@pytest.mark.parametrize("is_healthy", [True, False], ids=["healthy", "hangs"])
def test_its_check_asks_whether_the_server_is_healthy(serve, monkeypatch, is_healthy):  # noqa: F811
    served = serve()
    monkeypatch.setattr(served.service, "why_hung", lambda: None if is_healthy else "the engine hangs")
    _, option, program = json.loads(arguments("HEALTHCHECK")[0].partition("CMD ")[2])
    options = options_of(json.loads(arguments("ENTRYPOINT")[0]))
    url = f"http://127.0.0.1:{options.port}"
    assert url in program
    ended = subprocess.run([sys.executable, option, program.replace(url, served.url)], capture_output=True, check=False)
    assert (ended.returncode == 0) == is_healthy
