"""Commands of documents and examples that train, read as octile reads them."""

from collections.abc import Sequence

import pytest

from octile import cli
from octile.train.config import TrainConfig
from octile.train.pipeline_layout import make_pipeline_schedule
from octile.train.run.rank_checks import check_world


def config_of(arguments: Sequence[str], n_ranks: int, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Return the configuration of `octile train` with these arguments, which n_ranks of torchrun can train."""
    configs: list[TrainConfig] = []
    monkeypatch.setenv("WORLD_SIZE", str(n_ranks))
    monkeypatch.setattr("octile.train.loop.train", lambda config, *_: configs.append(config))
    cli.main(["train", *arguments])
    check_world(configs[0])
    make_pipeline_schedule(configs[0])
    return configs[0]
