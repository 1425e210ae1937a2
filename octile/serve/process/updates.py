"""Updates of an engine's weights between its steps, one at a time, as another process asks for them.

New weights are opened and checked in a thread, while the engine steps. Then, where requests in flight are to finish,
the engine steps until they have, and admits no others. The weights are written between two steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Output
from octile.serve.process.messages import UpdateWeights, WeightsRefused, WeightsUpdated
from octile.serve.weights.replaceable import NewWeights, ReplaceableWeights


class WeightsUpdates:
    """The updates of an engine's weights. All but `_open` runs in the thread that steps the engine.

    Args:
        engine: whose runner has the weights.
        weights: the weights.
    """

    def __init__(self, engine: Engine, weights: ReplaceableWeights):
        self._engine, self._weights = engine, weights
        self._asked: tuple[UpdateWeights, float] | None = None  # and since when
        self._new: NewWeights | None = None  # checked, and not written yet

    def begin(
        self,
        asked: UpdateWeights,
        command: Callable[[Callable[[], object]], None],
        send: Callable[[object], None],
    ) -> None:
        """Begin an update; none runs.

        Args:
            asked: which one.
            command: has the engine's thread carry out a command between two steps.
            send: answers.
        """
        assert self._asked is None  # the other process has waited for the answer to the one before
        self._asked, self._send = (asked, time.perf_counter()), send
        threading.Thread(target=self._open, args=(asked, command), name="new weights", daemon=True).start()

    def _open(self, asked: UpdateWeights, command: Callable[[Callable[[], object]], None]) -> None:
        try:
            new = self._weights.open(asked.source)
        except Exception as error:  # what a folder may hold is not known, and the old weights are in use
            is_refusal = isinstance(error, ValueError | OSError)
            why = str(error) if is_refusal else f"{type(error).__name__}: {error}"
            command(partial(self._failed, asked, why))
        else:
            command(partial(self._opened, asked, new))

    def _failed(self, asked: UpdateWeights, why: str) -> None:
        if self._runs(asked):
            self._refuse(why)

    def _opened(self, asked: UpdateWeights, new: NewWeights) -> None:
        if not self._runs(asked):
            new.close()
            return
        self._new = new
        if asked.in_flight == "finish":
            self._engine.admit_new(False)

    def _runs(self, asked: UpdateWeights) -> bool:
        """Whether an update was not canceled while its weights were opened; another one may run since."""
        return self._asked is not None and self._asked[0] is asked

    def cancel(self) -> None:
        """Cancel the update that writes nothing yet, if there is one; what still opens its weights is not awaited."""
        if self._asked is None:
            return
        if self._new is not None:
            new, self._new = self._new, None
            new.close()
            self._engine.admit_new(True)
        self._refuse("the update was canceled: its client has closed the connection, or its time was over")

    def _refuse(self, why: str) -> None:
        self._asked = None
        self._send(WeightsRefused(why))

    @property
    def is_due(self) -> bool:
        """Whether `write` is to be called instead of the engine's next step."""
        if self._new is None or self._asked is None:
            return False
        return self._asked[0].in_flight != "finish" or not self._engine.has_in_flight

    def write(self) -> tuple[list[Output], WeightsUpdated]:
        """Write the new weights, and return what that adds to requests, and the answer, which is sent after it."""
        assert self._new is not None
        assert self._asked is not None
        (asked, begun), new, started = self._asked, self._new, time.perf_counter()
        self._asked = self._new = None
        self._weights.new = new
        outputs = self._engine.update_weights(asked.in_flight)
        self._engine.admit_new(True)
        ended = time.perf_counter()
        updated = WeightsUpdated(self._engine.weights_version, ended - begun, ended - started, new.nbytes)
        return outputs, updated
