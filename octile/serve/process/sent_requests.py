"""The requests of an engine whose commands another process sends, by the numbers that they have there."""

from __future__ import annotations

from collections.abc import Iterable

from octile.serve.engine.request import Output, Request


class SentRequests:
    """The requests that an engine has, each with the number of the process that has sent it."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}
        self._numbers: dict[int, int] = {}  # by the engine's number

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._requests)

    def add(self, number: int, request: Request) -> None:
        """Add a request that the engine has."""
        self._requests[number], self._numbers[request.id] = request, number

    def get(self, number: int) -> Request | None:
        """Return a request by the other process's number; None if it has ended."""
        return self._requests.get(number)

    def pop(self, number: int) -> Request | None:
        """Return a request and forget it; None if it has ended."""
        request = self._requests.pop(number, None)
        if request is not None:
            del self._numbers[request.id]
        return request

    def renumber(self, outputs: Iterable[Output]) -> list[Output]:
        """Return the outputs of these requests with the other process's numbers, and forget those that have ended."""
        renumbered = []
        for output in outputs:
            number = self._numbers.get(output.request_id)
            if number is not None:  # otherwise it was canceled
                renumbered.append(output._replace(request_id=number))
                if output.finish_reason is not None:
                    self.pop(number)
        return renumbered
