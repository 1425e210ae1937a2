"""The unit of systemd."""

import configparser
import shlex
import shutil
import subprocess
import sys

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile import exit_codes
from tests.deploy.commands import DEPLOY, options_of

UNIT = DEPLOY / "octile.service"


@pytest.fixture
def service():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(UNIT, encoding="utf-8")
    return parser["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze in PATH")
def test_systemd_accepts_it(service, tmp_path):
    program = service["ExecStart"].split()[0]
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace(program, sys.executable), encoding="utf-8")
    verified = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_its_command_is_one_of_octile(service):
    assert options_of(shlex.split(service["ExecStart"])).host == "127.0.0.1"


def test_it_stops_later_than_the_server_has_drained(service):
    options = options_of(shlex.split(service["ExecStart"]))
    assert float(service["TimeoutStopSec"]) > options.limits.drain + 10


def test_exit_codes_are_octile_s(service):
    assert service["SuccessExitStatus"] == str(exit_codes.TERMINATED)
    assert service["RestartPreventExitStatus"] == str(exit_codes.USER_ERROR)


def test_its_caches_are_in_its_folder(service):
    folders = dict(variable.split("=") for variable in service["Environment"].split())
    assert set(folders) == {"OCTILE_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert all(folder.startswith(f"/var/cache/{service['CacheDirectory']}/") for folder in folders.values())
