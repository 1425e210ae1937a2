"""The checkpoints of a run: one process writes them between two steps, several ranks while they train on.

Both kinds are read alike, so that a run may go from one number of ranks to another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from octile.checkpoint.training import latest_checkpoint, save_checkpoint
from octile.parallel.ranks import Ranks
from octile.train.best_model import BestModel
from octile.train.config import TrainConfig
from octile.train.resume import computed_on
from octile.train.trainer import Trainer

if TYPE_CHECKING:
    from octile.checkpoint.distributed import DistributedCheckpoints


class RunCheckpoints:
    """The checkpoints of a run, which all its ranks make and call alike.

    Args:
        folder: the run's `checkpoints/`.
        ranks: the ranks of the run.
    """

    def __init__(self, folder: Path, ranks: Ranks):
        self._folder = folder
        self._sharded: DistributedCheckpoints | None = None
        if ranks.size > 1:
            from octile.checkpoint.distributed import DistributedCheckpoints  # it takes a second to import

            self._sharded = DistributedCheckpoints(folder, timeout=ranks.timeout)

    def latest(self) -> Path | None:
        """Find the newest checkpoint whose checksums are right, or None where there are none.

        Raises:
            ValueError: there are checkpoints, but all are damaged.
        """
        if self._sharded is None:
            return latest_checkpoint(self._folder)
        found = self._sharded.latest()
        return None if found is None else Path(found)

    def save(self, trainer: Trainer, best: BestModel, config: TrainConfig) -> None:
        """Write the checkpoint of the last step; several ranks begin to write it, after the one before is complete.

        Raises:
            OSError: the disk is full or not writable, for this checkpoint or, on several ranks, the one before.
            RuntimeError: copies of parameters differ between two ranks of a pipeline.
        """
        tensors, state = trainer.state()
        best_tensors, best_state = best.state(trainer.steps_done)
        settings = {"config": json.loads(config.to_json()), "computed_on": computed_on(trainer.device)}
        tensors, state = tensors | best_tensors, {**state, **best_state, **settings}
        if self._sharded is None:
            save_checkpoint(self._folder, trainer.steps_done, tensors, state)
            return
        trainer.ranks.at(f"checkpoint of step {trainer.steps_done}")
        trainer.check_copies()
        self._sharded.save(trainer.steps_done, trainer.layout.chunks(tensors), state)

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
