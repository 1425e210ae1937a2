import argparse
import inspect

import pytest
import torch

from octile.lab.promotion import accumulators, run
from octile.train.data.prepare import prepare
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, micro


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for part in range(8):
        (folder / f"part{part}.txt").write_text(inspect.getsource(argparse)[part * 4000 :][:4000], encoding="utf-8")
    return prepare(folder, MICRO.vocab_size, tmp_path_factory.mktemp("store"), 31, held_out_windows=4)


@pytest.mark.slow
def test_models_differ_only_in_accumulation(store):
    config = micro(recipe="per_tensor", steps=3)
    runs = [run(config, name, context, store) for name, context in accumulators("sm_90").items()]
    assert [trained.steps for trained in runs] == [(3,)] * 3
    losses = [trained.val_loss[0] for trained in runs]
    assert len(set(losses)) > 1
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2)


def test_outside_of_the_context_nothing_is_modeled(store):
    config = micro(recipe="per_tensor", steps=1)
    plain = Trainer(config, store, torch.device("cpu")).step()["main_loss"]
    name, context = "never promoted", accumulators("sm_90")["never promoted"]
    run(config, name, context, store)
    assert Trainer(config, store, torch.device("cpu")).step()["main_loss"] == plain
