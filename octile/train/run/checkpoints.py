"""The checkpoints of a run: one process writes a folder's between two steps; several ranks, and a store's, train on.

Both kinds are read alike, so that a run may go from one number of ranks to another.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from octile.checkpoint.step_folders import finished_steps
from octile.checkpoint.store import Store, as_os_error
from octile.checkpoint.training import find_latest, save_checkpoint
from octile.parallel.ranks import Ranks
from octile.train.config import TrainConfig
from octile.train.run.best_model import BestModel
from octile.train.run.machine import computed_on
from octile.train.trainer import Trainer

if TYPE_CHECKING:
    from octile.checkpoint.distributed import DistributedCheckpoints


T = TypeVar("T")


class RunCheckpoints:
    """The checkpoints of a run, which all its ranks make and call alike.

    Args:
        address: their folder, or its URL.
        ranks: the ranks of the run.
    """

    def __init__(self, address: str, ranks: Ranks):
        self.store = Store(address)
        self._sharded: DistributedCheckpoints | None = None
        if ranks.size > 1 or "://" in address:
            from octile.checkpoint.distributed import DistributedCheckpoints  # it takes a second to import

            self._sharded = DistributedCheckpoints(address, timeout=ranks.timeout)

    def latest(self) -> Store | None:
        """Find the newest checkpoint whose checksums are right, or None where there are none.

        Raises:
            ValueError: there are checkpoints, but all are damaged.
        """
        if self._sharded is None:
            return find_latest(self.store)
        found = self._sharded.latest()
        return None if found is None else Store(found)

    def can_continue(self) -> bool | None:
        """Whether there is a finished checkpoint; None if the store does not answer."""
        try:
            return bool(finished_steps(self.store))
        except Exception:  # of any package behind fsspec; it is asked while another error ends the run
            return None

    def has_completed(self, step: int, every: int) -> bool:
        """Whether a run that has measured a step had completed a checkpoint before, of those that it writes regularly.

        One process writes a checkpoint before its next step. The others complete it before they begin the next one.

        Args:
            step: the last step that was measured.
            every: the number of steps from one checkpoint to the next; 0 if only the last step is saved.
        """
        return every > 0 and step > (every if self._sharded is None else 2 * every)

    def save(self, trainer: Trainer, best: BestModel, config: TrainConfig) -> None:
        """Write the checkpoint of the last step; several ranks, or one to a URL, begin to, after the one before.

        Raises:
            OSError: the disk is full or not writable, for this checkpoint or, if it was only begun, the one before.
            RuntimeError: copies of parameters differ between two ranks of a pipeline.
        """
        tensors, state = trainer.state()
        best_tensors, best_state = best.state(trainer.steps_done)
        settings = {"config": config.to_values(), "computed_on": computed_on(trainer.device)}
        tensors, state = tensors | best_tensors, {**state, **best_state, **settings}
        if self._sharded is None:
            save_checkpoint(self.store.url, trainer.steps_done, tensors, state)
            return
        trainer.ranks.at(f"checkpoint of step {trainer.steps_done}")
        trainer.strategy.check_copies()
        self._sharded.save(trainer.steps_done, trainer.strategy.layout.chunks(tensors), state)

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Complete the last checkpoint if a loss or gradient that is not finite ends the run, as it does on all ranks.

        After another failure other ranks may be gone, and the checkpoint before remains.
        """
        try:
            yield
        except FloatingPointError:
            self.close()
            raise

    def close(self) -> None:
        """Wait until the last checkpoint is complete. Not to be called after a failure, which other ranks may not have.

        Raises:
            OSError: the disk of a rank is full or not writable.
        """
        if self._sharded is not None:
            self._sharded.close()


def check_address(address: str, resume: bool, ranks: Ranks) -> None:
    """Check that checkpoints can go to a folder or URL: all ranks write a file there, read another's, remove their own.

    Raises:
        ValueError: fsspec knows no such protocol or cannot write by it, or ranks do not see the same folder.
        ImportError: the package for the protocol is not installed.
        FileExistsError: there are checkpoints, and the run is new.
        OSError: a rank cannot reach, write, read or remove there; PermissionError, FileNotFoundError, … if that fits.
    """
    named = f"checkpoints {address!r}"
    ranks.from_all(lambda: _check_known(address))
    store = Store(address)
    names = ranks.gather(f"access-{uuid.uuid4().hex}", str)
    name, other = names[ranks.rank], names[ranks.rank - 1]

    def attempt(access: Callable[[], T], kind: Any = None) -> list[T]:
        def explained() -> T:
            try:
                return access()
            except NotImplementedError:
                raise ValueError(f"{named} cannot be used: nothing can be written by this protocol") from None
            except Exception as error:
                raise as_os_error(error, f"{named} cannot be used") from None

        return ranks.from_all(explained, kind)

    try:
        attempt(lambda: store.write(name, b"octile"))
        seen = attempt(lambda: other in store.names() and store.read(other) == b"octile", bool)
    except BaseException:
        with suppress(Exception):
            store.remove_file(name)
        raise
    attempt(lambda: store.remove_file(name))
    if not all(seen):
        rank = seen.index(False)
        raise ValueError(
            f"{named} must be the same for all ranks, but rank {rank} does not see there what rank "
            f"{(rank - 1) % ranks.size} has written: name a folder that all share, or a store"
        )
    if not resume and (there := ranks.from_first(lambda: list(finished_steps(store).values()), list[str])):
        raise FileExistsError(
            f"{named} holds checkpoints already ({there[-1]}): add --resume, or choose another address"
        )


def _check_known(address: str) -> None:
    named = f"checkpoints {address!r} cannot be used"
    try:
        Store(address).check_answers()
    except (ValueError, ImportError) as error:
        raise type(error)(f"{named}: {error}") from None
    except OSError as error:
        raise as_os_error(error, named) from None
