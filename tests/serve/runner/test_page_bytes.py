"""Whole pages of several stores, copied as bytes."""

import torch

from octile.serve.runner.index_pages import IndexPages
from octile.serve.runner.latent_pages import LatentPages
from octile.serve.runner.page_bytes import PageBytes

CPU = torch.device("cpu")


def stores(cache_format: str) -> tuple[LatentPages, IndexPages]:
    latents, keys = LatentPages(3, 7, 128, 16, cache_format, CPU), IndexPages(2, 7, 32, CPU)
    for store in (latents, keys):
        store.bytes_LPQ.copy_(torch.randint(0, 256, store.bytes_LPQ.shape, dtype=torch.uint8))
    return latents, keys


def pages_of(made: tuple[LatentPages, IndexPages]) -> PageBytes:
    return PageBytes([store.bytes_LPQ for store in made])


def test_a_page_has_the_bytes_of_all_stores_and_layers():
    assert pages_of(stores("fp8")).bytes_per_page == 64 * (3 * (128 + 4 + 2 * 16) + 2 * (32 + 4))


def test_latents_and_keys_arrive_in_the_wanted_pages_alone():
    source, target = stores("bf16"), stores("bf16")
    before = [store.bytes_LPQ.clone() for store in target]
    pages_of(target).write([6, 1], pages_of(source).read([2, 0]))
    for of_source, of_target, was in zip(source, target, before, strict=True):
        assert torch.equal(of_target.bytes_LPQ[:, [6, 1]], of_source.bytes_LPQ[:, [2, 0]])
        others = [0, 2, 3, 4, 5]
        assert torch.equal(of_target.bytes_LPQ[:, others], was[:, others])


def test_layers_are_views_of_the_bytes():
    latents, keys = stores("float32")
    pages = PageBytes([latents.bytes_LPQ, keys.bytes_LPQ])
    pages.write([3], torch.zeros_like(pages.read([3])))
    assert not latents.layers[1][3].any()
    assert not keys.layers[1][3].any()
