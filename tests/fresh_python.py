"""Programs in interpreters that have imported torch and nothing of octile: each is a fork of one that did so once."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SERVER = """
import gc, json, os, sys, torch
gc.freeze()
sys.path[0] = sys.argv.pop()
for line in sys.stdin:
    asked = json.loads(line)
    if (child := os.fork()) == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    raise SystemExit
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["environment"])
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for number in (1, 2):
    os.dup2(os.open(asked["printed"][number - 1], os.O_WRONLY), number)
sys.argv[1:] = asked["arguments"]
exec(asked["program"], {"__name__": "__main__"})
"""


def run_python(
    program: str, *arguments: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program as `python -c` does, but with torch imported.

    Args:
        program: its text.
        arguments: in `sys.argv`.
        folder: the working directory; None: that of this process.
        environment: the environment variables; None: those of this process.
    """
    server = _server()
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        asked = {
            "program": program,
            "arguments": arguments,
            "folder": str(folder or Path.cwd()),
            "environment": dict(os.environ if environment is None else environment),
            "printed": (out.name, err.name),
        }
        try:
            print(json.dumps(asked), file=server.stdin, flush=True)
            answer = server.stdout.readline()
        except BaseException:  # as at a test's timeout: its answer would be taken for that of the next program
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise
        assert answer, f"the process that is forked has ended:\n{err.read()}"
        return subprocess.CompletedProcess([program, *arguments], int(answer), out.read(), err.read())


@cache
def _server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parents[1])]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    atexit.register(server.communicate)  # the end of its input ends it
    return server
