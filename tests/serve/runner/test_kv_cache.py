"""Tests of the caches: what is written is read, and whole pages are copied as bytes."""

import torch

from octile.nn.indexer import quantize_index
from octile.ops.mqa_logits import paged_mqa_logits, paged_mqa_schedule
from octile.serve.runner.kv_cache import IndexCache, KVCache, PageBytes, bytes_per_key

N_PAGES, E, CPU = 3, 32, torch.device("cpu")


def keys(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_index(torch.randn(n, E, generator=torch.Generator().manual_seed(seed)))


def test_a_position_takes_132_bytes_with_the_published_channels():
    assert bytes_per_key(128) == 132


def test_keys_are_read_where_they_were_written():
    pages, slots = IndexCache(range(2), N_PAGES, E, CPU), torch.tensor([130, 0, 64, 63, 191])
    k, scale = keys(5)
    pages.write(1, slots, k, scale)
    read, scales = pages.read(1, slots)
    assert torch.equal(read.view(torch.uint8), k.view(torch.uint8))
    assert torch.equal(scales, scale)
    assert not pages.layers[0].any()


def test_keys_in_fp32_are_read_as_they_were_written():
    pages, slots = IndexCache(range(2), N_PAGES, E, CPU, "float32"), torch.tensor([130, 0, 64, 63, 191])
    k = torch.randn(5, E, generator=torch.Generator().manual_seed(0))
    pages.write(1, slots, k, torch.ones(5))
    read, scales = pages.read(1, slots)
    assert torch.equal(read, k)
    assert scales.tolist() == [1.0] * 5
    assert pages.layers[0].shape == (N_PAGES, 64 * bytes_per_key(E, "float32"))


def test_rows_without_a_slot_are_written_nowhere():
    pages = IndexCache(range(1), N_PAGES, E, CPU)
    pages.write(0, torch.tensor([-1, -1]), *keys(2))
    assert not pages.layers[0].any()


def test_logits_of_the_pages_are_those_of_the_keys():
    pages, n = IndexCache(range(1), N_PAGES, E, CPU), 100
    k, scale = keys(n)
    page_table = torch.tensor([[2, 0]], dtype=torch.int32)
    position = torch.arange(n)
    pages.write(0, page_table[0, position // 64].long() * 64 + position % 64, k, scale)
    q, q_scale = quantize_index(torch.randn(1, 4, E, generator=torch.Generator().manual_seed(1)))
    lengths = torch.tensor([[n]], dtype=torch.int32)
    schedule = paged_mqa_schedule(lengths, 1)
    found = paged_mqa_logits(q[None], pages.layers[0], q_scale, lengths, page_table, schedule, n, False, torch.float32)
    scores = (q[0].double() @ k.double().T).relu()
    torch.testing.assert_close(found[0].double(), scale * (q_scale[0] @ scores.float()).double(), check_dtype=False)


def stores(cache_format: str) -> tuple[KVCache, IndexCache]:
    latents, keys = KVCache(3, 7, 128, 16, cache_format, CPU), IndexCache(range(2), 7, 32, CPU)
    for store in (latents, keys):
        store.bytes_LPQ.copy_(torch.randint(0, 256, store.bytes_LPQ.shape, dtype=torch.uint8))
    return latents, keys


def pages_of(made: tuple[KVCache, IndexCache]) -> PageBytes:
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
