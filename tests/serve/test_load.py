"""How large the cache of a served model is."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octile.serve.load import FREE_SHARE, Folder
from octile.serve.model_runner import ModelRunner
from tests.serve.models import CONFIG

FREE = 2**30


def n_pages(monkeypatch, max_batch: int, n_drafts: int, free: int = FREE) -> int:
    """The pages of a cache on a GPU with so many bytes free, for texts that are longer than it."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    model = SimpleNamespace(vocab_size=CONFIG.vocab_size, max_position_embeddings=2**40)
    weights = SimpleNamespace(config=CONFIG, device=torch.device("cuda"))
    return Folder(Path(), model, None)._n_pages(weights, "bf16", max_batch, n_drafts, None)


@pytest.mark.parametrize(("max_batch", "n_drafts"), [(1, 0), (4096, 0), (4096, 2)])
def test_graphs_have_their_logits_before_the_cache_has_its_share(monkeypatch, max_batch, n_drafts):
    weights = SimpleNamespace(config=CONFIG)
    places = FREE_SHARE * (FREE - ModelRunner.bytes_of_graphs(weights, max_batch, n_drafts))
    assert n_pages(monkeypatch, max_batch, n_drafts) == int(places) // ModelRunner.bytes_per_page(weights, "bf16")


def test_the_logits_of_graphs():
    weights = SimpleNamespace(config=CONFIG)
    rows = 2 * CONFIG.vocab_size * 256  # two sets of graphs
    assert ModelRunner.bytes_of_graphs(weights, 256, 0) == 10 * rows
    assert (
        ModelRunner.bytes_of_graphs(weights, 256, 3) == 10 * rows * 4 * 3 // 2
    )  # four rows of each request, three sets


def test_a_gpu_without_room_for_the_graphs_is_named(monkeypatch):
    with pytest.raises(MemoryError, match="the cache has 0 GiB, but one page takes"):
        n_pages(monkeypatch, 4096, 2, free=2**20)
