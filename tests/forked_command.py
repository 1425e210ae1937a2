"""`octile` in a process forked from the server of `tests.worlds`, where not the start of an interpreter is tested."""

import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from octile.cli import main
from tests.worlds import forked_context, print_to, send_children


class ForkedCommand:
    """A command of octile, used as a `subprocess.Popen` of `python -m octile` whose output is read as text.

    The processes that it starts are forked, too, and their output goes where its own goes.

    Args:
        arguments: of `octile`.
    """

    def __init__(self, arguments: Sequence[str]):
        context = forked_context()
        (out, own_out), (err, own_err), (self._begun, begun) = (context.Pipe(duplex=False) for _ in range(3))
        self._process: BaseProcess = context.Process(target=_run, args=((own_out, own_err), begun, [*arguments]))
        self._process.start()
        for end in (own_out, own_err, begun):
            end.close()
        self.pid, self._children = self._process.pid, list[int]()
        self.stdout, self.stderr = os.fdopen(os.dup(out.fileno())), os.fdopen(os.dup(err.fileno()))

    @property
    def children(self) -> list[int]:
        """The numbers of the processes that it has started."""
        while self._begun.poll():
            self._children.append(self._begun.recv())
        return self._children

    @property
    def returncode(self) -> int | None:
        """The exit status, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit status."""
        self._process.join(timeout)
        assert self.returncode is not None, f"it has not ended within {timeout} s"
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end, and return what it has printed that was not read."""
        self.wait(timeout)
        return tuple("" if stream.closed else stream.read() for stream in (self.stdout, self.stderr))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(output: tuple[Connection, Connection], begun: Connection, arguments: list[str]) -> None:
    print_to(*output)
    send_children(begun)
    torch.set_num_threads(1)
    main(arguments)
