"""How a command ends: an exception becomes one line and an exit code.

0      success
2      an error that the user can correct, with one line that says how
1      any other failure
130    ended by Ctrl-C
141    octile train or compare was ended because the reader of its output has ended
143    ended by SIGTERM
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

from octile.checkpoint.files import DISK_ERRORS
from octile.gpu_failure import gpu_failure, is_gpu_failure
from octile.signals import Terminated, terminable, termination_ignored
from octile.text import escape_control_characters
from octile.torchrun import count_ranks, own_rank
from octile.validation import OctileWarning

USER_ERROR, FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143

# torch's warning of an autograd thread whose first kernel is a GEMM, as in a stage's backward pass; it sets the context
NO_CONTEXT = "Attempting to run cuBLAS, but there was no current CUDA context"


def run_and_exit(command: Callable[[], object]) -> None:
    """Run a command; an exception becomes one line, and the process exits. OCTILE_TRACEBACK=1 shows the traceback."""
    raised: list[type[KeyboardInterrupt]] = []
    try:
        with warnings.catch_warnings(), terminable() as raised:
            warnings.showwarning = partial(_warn, set())
            warnings.filterwarnings("ignore", NO_CONTEXT)
            command()
    except BrokenPipeError:  # the reader of the output, such as head, has ended
        _discard(sys.stdout)
    except KeyboardInterrupt as interrupt:
        _fail(*_explain_interrupt(type(interrupt)))
    except Exception as error:
        if os.environ.get("OCTILE_TRACEBACK"):
            raise
        fail = partial(_fail, at_once=True) if is_gpu_failure(error) else _fail
        fail(*explain(error, raised))


def _warn(
    shown: set[str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning: one of octile as a line like an error, once, wherever it comes from; others in Python's form."""
    is_octile = issubclass(category, OctileWarning) or Path(filename).is_relative_to(Path(__file__).parent)
    if is_octile and (own_rank() or str(message) in shown):  # rank 0 says the same
        return
    shown.add(str(message))
    text = f"octile: {message}\n" if is_octile else warnings.formatwarning(message, category, filename, lineno, line)
    sys.stderr.write(text)


def explain(error: Exception, raised: Sequence[type[KeyboardInterrupt]] = ()) -> tuple[str, int]:
    """The line and the exit code for an exception, before which signals were raised."""
    if (code := getattr(error, "exit_code", None)) is not None:  # of Stopped and RanksError
        return str(error), code
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        message = f"{error.strerror}: {error.filename or 'while writing'}; what was complete is still there"
        return _with_notes(message, error), FAILURE
    if is_gpu_failure(error):
        return _with_notes(gpu_failure(error), error), FAILURE
    if isinstance(error, FloatingPointError) or (isinstance(error, MemoryError) and _raised_by_octile(error)):
        return str(error), FAILURE
    if isinstance(error, OSError) and error.filename is not None:  # the system's message without its number
        return _with_notes(f"{str(error.filename)!r}: {error.strerror}", error), USER_ERROR
    if raised:  # a library has taken it for an import that has failed
        return _explain_interrupt(raised[-1])
    if isinstance(error, OSError) or (isinstance(error, ValueError | ImportError) and _raised_by_octile(error)):
        return str(error), USER_ERROR
    return f"{type(error).__name__}: {error} (OCTILE_TRACEBACK=1 shows where)", FAILURE


def _with_notes(message: str, error: Exception) -> str:
    return "; ".join((message, *getattr(error, "__notes__", ())))


def _explain_interrupt(kind: type[KeyboardInterrupt]) -> tuple[str, int]:
    return (_terminated(), TERMINATED) if kind is Terminated else ("interrupted", INTERRUPTED)


def _raised_by_octile(error: BaseException) -> bool:
    """Whether octile or the script itself raised an exception: a check that tells what to correct, not a defect."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return False
    file, script = frames[-1].f_code.co_filename, getattr(sys.modules["__main__"], "__file__", None)
    return file == script or Path(file).is_relative_to(Path(__file__).parent)


def _fail(message: str, code: int, at_once: bool = False) -> NoReturn:
    """Print a failure and end the process, `at_once` without destructors: those of tensors abort on a failed GPU."""
    line = " ".join(message.split())
    if sys.stderr.isatty():  # a message quotes files and their names
        line = escape_control_characters(line)
    if count_ranks() == 1:
        try:
            print(f"octile: {line}", file=sys.stderr, flush=True)
        except BrokenPipeError:  # it has the reader of the output, which has ended
            _discard(sys.stdout)
            _discard(sys.stderr)
        if at_once:
            with suppress(OSError):  # the reader of the output may have ended
                sys.stdout.flush()
            os._exit(code)
        sys.exit(code)
    from octile.parallel.ranks import fail

    with termination_ignored():  # torchrun sends SIGTERM when another rank has ended, while this one waits to report
        fail(line, code)


def _discard(stream: TextIO) -> None:
    """Discard what is written to a stream, including what the interpreter flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _terminated() -> str:
    """What to say of SIGTERM, which torchrun sends to the other ranks when one has ended."""
    if count_ranks() == 1 or "octile.parallel.ranks" not in sys.modules:
        return "terminated"
    from octile.parallel.ranks import where_ranks_are

    return f"terminated{where_ranks_are()}"
