"""Training of sparse attention's indexers: the warm-up, in which they alone are trained, and the sparse stage."""

from dataclasses import replace

import pytest
import torch

from octile.checkpoint.training import load_checkpoint, save_checkpoint
from octile.train.config import OptimConfig
from tests.train.conftest import MICRO

SPARSE = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=8)
SHARED = replace(SPARSE, indexer_rope_interleave=True, indexer_types=("full", "shared"))


def weights(trainer) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


@pytest.mark.one_case
@pytest.mark.parametrize("recipe", ["bf16", "deepseek_v3"])
def test_the_warm_up_changes_the_indexers_alone_and_no_bias_of_a_gate(new_trainer, recipe):
    trainer = new_trainer(model=SPARSE, indexer_stage="warm_up", recipe=recipe)
    before = weights(trainer)
    for _ in range(3):
        trainer.step()
    changed = {name for name, t in weights(trainer).items() if not torch.equal(t, before[name])}
    assert changed == {name for name in before if ".indexer." in name}


@pytest.mark.one_case
@pytest.mark.parametrize("model", [SPARSE, SHARED], ids=["indexer in each layer", "shared"])
def test_the_sparse_stage_changes_every_weight(new_trainer, model):
    trainer = new_trainer(model=model, indexer_stage="sparse")
    before = weights(trainer)
    trainer.step()
    assert [name for name, t in weights(trainer).items() if torch.equal(t, before[name])] == []


@pytest.mark.slow
def test_the_indexers_loss_falls_in_the_warm_up(new_trainer):
    optim = OptimConfig(lr=3e-2, warmup=0.0, decay=0.0)
    trainer = new_trainer(model=SPARSE, indexer_stage="warm_up", steps=30, optim=optim)
    losses = [trainer.step()["indexer_loss"] for _ in range(30)]
    assert 0 < sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
def test_a_stage_continues_from_its_saved_state_bit_for_bit(new_trainer, tmp_path, stage):
    straight = new_trainer(model=SPARSE, indexer_stage=stage)
    for _ in range(2):
        straight.step()
    tensors, state = straight.state()
    path = save_checkpoint(tmp_path, 2, tensors, state)
    expected = [straight.step()["loss"] for _ in range(2)]
    resumed = new_trainer(model=SPARSE, indexer_stage=stage)
    resumed.load(*load_checkpoint(path))
    assert [resumed.step()["loss"] for _ in range(2)] == expected
    assert all(torch.equal(t, weights(resumed)[name]) for name, t in weights(straight).items())


def test_micro_batches_have_the_loss_of_the_batch(new_trainer):
    whole, parts = (
        new_trainer(model=SPARSE, indexer_stage="sparse", recipe="float32", micro_batches=n).step() for n in (1, 2)
    )
    # sums in another order: some values are rounded to another number of FP8
    assert parts["indexer_loss"] == pytest.approx(whole["indexer_loss"], rel=1e-2)


def test_the_held_out_loss_of_the_warm_up_is_that_of_sparse_attention(new_trainer):
    losses = [
        new_trainer(model=SPARSE, indexer_stage=stage).evaluator.validate()["val_loss"]
        for stage in ("warm_up", "sparse")
    ]
    assert losses[0] == losses[1]
