"""Pages that one process fills and another reads."""

import pytest
import torch

from octile.serve.disaggregated.page_pool import FilledPages, PagePool, open_pool
from octile.serve.runner.kv_cache import KVCache, PageBytes
from tests.worlds import forked_context


def cache(cache_format: str = "bf16", n_pages: int = 7) -> KVCache:
    made = KVCache(3, n_pages, 128, 16, cache_format, torch.device("cpu"))
    for layer in made.layers:
        layer.copy_(torch.randint(0, 100, layer.shape, dtype=torch.uint8).to(layer.dtype))
    return made


def pages_of(made: KVCache) -> PageBytes:
    return PageBytes([made.bytes_LPQ])


@pytest.mark.parametrize("cache_format", ["float32", "bf16", "fp8"])
def test_pages_arrive_in_another_cache_bit_for_bit(cache_format):
    source, target = cache(cache_format), cache(cache_format)
    pool = PagePool(4, pages_of(source))
    filled = pool.fill([5, 0, 3])
    latents = FilledPages(pool.bytes_SQ, filled, pages_of(target))
    latents.write([6, 1, 2, 4], 0)
    for of_source, of_target in zip(source.layers, target.layers, strict=True):
        assert torch.equal(of_target[[6, 1, 2]].view(torch.uint8), of_source[[5, 0, 3]].view(torch.uint8))
    assert latents.is_free


def test_pages_that_the_other_cache_has_are_not_copied():
    source, target = cache(), cache()
    before = [layer.clone() for layer in target.layers]
    pool = PagePool(2, pages_of(source))
    FilledPages(pool.bytes_SQ, pool.fill([4, 5]), pages_of(target)).write([0, 1], 1)
    for of_source, of_target, was in zip(source.layers, target.layers, before, strict=True):
        assert torch.equal(of_target[0], was[0])
        assert torch.equal(of_target[1], of_source[5])


def test_a_full_pool_refuses_until_pages_come_back():
    pool = PagePool(2, pages_of(cache()))
    first = pool.fill([0])
    with pytest.raises(ValueError, match="at most the 1 free ones of the pool, not 2"):
        pool.fill([1, 2])
    pool.free(first)
    assert len(pool.fill([1, 2])) == 2


def test_pages_that_nobody_wants_are_free():
    target = cache()
    before = [layer.clone() for layer in target.layers]
    pool = PagePool(2, pages_of(target))
    latents = FilledPages(pool.bytes_SQ, pool.fill([0]), pages_of(target))
    assert not latents.is_free
    latents.release()
    assert latents.is_free
    assert all(torch.equal(a, b) for a, b in zip(target.layers, before, strict=True))


def read_row(shared: bytes, row: int, results) -> None:
    results.send(open_pool(shared)[row].tolist())


def test_another_process_reads_what_is_filled():
    source = cache()
    pool = PagePool(3, pages_of(source))
    row = pool.fill([6])[0]
    context = forked_context()
    here, there = context.Pipe()
    process = context.Process(target=read_row, args=(pool.share(), row, there))
    process.start()
    assert (
        here.recv() == torch.stack([layer[6].view(torch.uint8).flatten() for layer in source.layers]).flatten().tolist()
    )
    process.join()
