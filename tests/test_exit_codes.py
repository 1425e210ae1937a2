"""How a command ends: exit codes, errors in one line, and signals."""

import errno
import os
import signal
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import octile.cli
from octile.cli import main
from octile.validation import warn_caller
from tests.test_cli import call, started_as_a_program


def in_the_place_of_train(monkeypatch, run):
    """Have `octile train` call a function."""
    monkeypatch.setitem(octile.cli.COMMANDS, "train", SimpleNamespace(run=lambda *_: run()))


def failing(monkeypatch, error):
    def fail():
        raise error

    in_the_place_of_train(monkeypatch, fail)


def test_a_full_disk_is_one_line_and_exit_code_1(capsys, monkeypatch):
    failing(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/model"))
    code, _, err = call(capsys, "train")
    assert (code, err.count("\n")) == (1, 1)
    assert "No space left on device: run/model" in err


def test_a_note_of_a_full_disk_ends_its_line(capsys, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/model")
    full.add_note("to continue: octile train --resume --out run")
    failing(monkeypatch, full)
    assert call(capsys, "train")[2].endswith("; to continue: octile train --resume --out run\n")


def test_a_failed_gpu_is_one_line_after_which_no_destructor_runs(capsys, monkeypatch):
    error = torch.AcceleratorError("CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure' in …")
    error.add_note("to continue: octile train --resume --out run")
    failing(monkeypatch, error)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    _, out, err = call(capsys, "train")
    assert ended == [1]
    assert (out, err) == (
        "",
        "octile: the GPU has failed: unspecified launch failure; CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 writes a file "
        "that names the kernel; to continue: octile train --resume --out run\n",
    )


def test_no_destructor_runs_after_a_failed_gpu_when_the_reader_of_the_output_has_ended(monkeypatch):
    def refuse() -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    def fail() -> None:
        monkeypatch.setattr(sys.stdout, "flush", refuse)
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    in_the_place_of_train(monkeypatch, fail)
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(SystemExit):  # which os._exit would not have reached
        main(["train"])
    assert ended == [1]


def test_what_the_system_refuses_is_said_without_its_number(capsys, monkeypatch):
    failing(monkeypatch, PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run/model"))
    assert call(capsys, "train")[::2] == (2, "octile: 'run/model': Permission denied\n")


def test_a_note_of_what_the_system_refuses_ends_its_line(capsys, monkeypatch):
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run/checkpoints")
    refused.add_note("it failed on rank 1")
    failing(monkeypatch, refused)
    assert call(capsys, "train")[::2] == (2, "octile: 'run/checkpoints': Permission denied; it failed on rank 1\n")


def test_a_warning_of_torch_about_its_own_context_is_not_shown(capsys, monkeypatch):
    def warn() -> None:
        warnings.warn("Attempting to run cuBLAS, but there was no current CUDA context! Attempting…", stacklevel=1)

    in_the_place_of_train(monkeypatch, warn)
    assert call(capsys, "train") == (0, "", "")


def test_a_warning_from_two_places_is_shown_once(capsys, monkeypatch):
    def warn() -> None:
        for line in (1, 2):
            warnings.warn_explicit("no such layer", UserWarning, octile.cli.__file__, line)

    in_the_place_of_train(monkeypatch, warn)
    assert call(capsys, "train") == (0, "", "octile: no such layer\n")


def test_a_warning_about_what_the_caller_gave_is_one_line(capsys, monkeypatch):
    in_the_place_of_train(monkeypatch, lambda: warn_caller("no such layer"))
    assert call(capsys, "train") == (0, "", "octile: no such layer\n")


def test_a_nan_is_one_line_and_exit_code_1(capsys, monkeypatch):
    failing(monkeypatch, FloatingPointError("the loss is nan at step 4"))
    code, _, err = call(capsys, "train")
    assert (code, err) == (1, "octile: the loss is nan at step 4\n")


def test_an_internal_error_is_one_line_and_exit_code_1(capsys, monkeypatch):
    failing(monkeypatch, AssertionError("never"))
    code, _, err = call(capsys, "train")
    assert (code, err.count("\n")) == (1, 1)
    assert "OCTILE_TRACEBACK=1" in err


def test_a_value_error_that_is_not_one_of_our_checks_is_not_the_users_fault(capsys, monkeypatch):
    in_the_place_of_train(monkeypatch, lambda: torch.zeros(2).reshape(3) and int("x"))
    assert call(capsys, "train")[0] == 1


def test_a_traceback_is_shown_on_request(monkeypatch):
    failing(monkeypatch, AssertionError("never"))
    monkeypatch.setenv("OCTILE_TRACEBACK", "1")
    with pytest.raises(AssertionError):
        main(["train"])


def test_sigterm_ends_any_command_with_a_line_and_exit_code_143():
    code = (
        "import sys, time, types, octile.cli\n"
        "run = lambda *_: (print('ready', flush=True), time.sleep(60))\n"
        "octile.cli.COMMANDS['doctor'] = types.SimpleNamespace(run=run)\n"
        "octile.cli.main(['doctor'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert (process.communicate(timeout=60)[1], process.returncode) == ("octile: terminated\n", 143)


def test_an_exit_code_does_not_depend_on_who_reads_the_line():
    code = (
        "import types, octile.cli\n"
        "def run(*_):\n"
        "    raise OSError('wrong')\n"
        "octile.cli.COMMANDS['doctor'] = types.SimpleNamespace(run=run)\n"
        "octile.cli.main(['doctor'])"
    )
    read, write = os.pipe()
    os.close(read)
    assert subprocess.run([sys.executable, "-c", code], stdout=write, stderr=write, check=False).returncode == 2
    os.close(write)


ENDINGS = [(signal.SIGINT, "octile: interrupted\n", 130), (signal.SIGTERM, "octile: terminated\n", 143)]


@pytest.mark.parametrize(("number", "line", "status"), ENDINGS)
def test_a_signal_while_the_command_line_is_imported_ends_with_a_line(tmp_path, number, line, status):
    ended = started_as_a_program(tmp_path, "difflib", f"os.kill(os.getpid(), {number:d})\n", "train")
    assert (ended.stdout, ended.stderr, ended.returncode) == ("", line, status)


CATCHES = "try:\n    os.kill(os.getpid(), {:d})\nexcept BaseException:\n    os._exit(0)\n"


@pytest.mark.one_case
@pytest.mark.parametrize(("number", "line", "status"), ENDINGS)
@pytest.mark.parametrize("command", ["train", "compare", "generate", "serve"])
def test_a_signal_that_an_imported_library_catches_ends_a_command(tmp_path, command, number, line, status):
    run = [str(tmp_path)] if command in ("generate", "serve") else []
    ended = started_as_a_program(tmp_path, "torch", CATCHES.format(number), command, *run)
    assert (ended.stderr, ended.returncode) == (line, status)


@pytest.mark.one_case
@pytest.mark.parametrize("then", ["json.no_such_name", "octile.extras.require('no_such_package', extra='train')"])
@pytest.mark.parametrize(
    ("number", "line", "status"),
    [(signal.SIGINT, "octile: interrupted\n", 130), (signal.SIGTERM, "octile: terminated\n", 143)],
)
def test_a_signal_that_a_library_takes_for_a_failed_import_ends_a_command(number, line, status, then):
    code = (
        "import json, os, signal, types, octile.cli, octile.extras\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background process ignores it
        "def doctor(*_):\n"
        "    try:\n"
        f"        os.kill(os.getpid(), {number:d})\n"
        "    except BaseException:\n"
        f"        {then}\n"
        "octile.cli.COMMANDS['doctor'] = types.SimpleNamespace(run=doctor)\n"
        "octile.cli.main(['doctor'])"
    )
    process = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    assert (process.stderr, process.returncode) == (line, status)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("late", "status"),
    [
        ("atexit.register(wait)", 130),
        ("threading.Thread(target=lambda: (threading.main_thread().join(), wait())).start()", 130),
        ("sys.modules.update(late=type('Late', (), {'__del__': wait})())", 0),  # no Python code may run at Ctrl-C then
    ],
    ids=["exit handler", "thread", "destructor"],
)
def test_ctrl_c_while_the_interpreter_exits_prints_nothing(late, status):
    code = (
        "import atexit, signal, sys, threading, time, types, octile.cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background process ignores it
        "def wait(*_, write=sys.stdout.write, flush=sys.stdout.flush, sleep=time.sleep):\n"
        "    write('exits\\n'), flush(), sleep(1)\n"
        f"octile.cli.COMMANDS['doctor'] = types.SimpleNamespace(run=lambda *_: {late})\n"
        "sys.argv[1:] = ['doctor']\n"
        "octile.cli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.stdout.readline() not in ("exits\n", ""):
        pass
    process.send_signal(signal.SIGINT)
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", status)
