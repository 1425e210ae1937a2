"""Tests of what needs no GPU in the measurement of sparse attention."""

import pytest
import torch

from octile.bench import sparse
from octile.bench.rows import Row
from octile.bench.sparse import Shape, flops
from octile.ops.sparse_attention import sparse_attention


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "PREFILL", {"cpu": (Shape(2, 64, 2, 8),)})
        patch.setattr(sparse, "TRAINING", {"cpu": (Shape(2, 64, 2, 8),)})
        patch.setattr(sparse, "DECODING", {"cpu": (Shape(1, 64, 2, 8),)})
        patch.setattr(sparse, "ROUNDS", 1)
        patch.setattr("torch.cuda.is_available", lambda: False)
        return list(sparse.rows())


def test_prefill_training_and_both_forms_of_decoding_are_measured(rows: list[Row]):
    queries, decoding = "2 queries, 2 heads, 8 of 64", "decoding, 1 text, 2 heads, 8 of 64"
    expected = [(f"prefill, {queries}", what) for what in ("FLOPs", "gathered")]
    expected += [(f"training, {name}, {queries}", "FLOPs") for name in ("forward", "backward", "weights")]
    expected += [(f"{decoding}, {form}", what) for form in ("BF16", "FP8") for what in ("FLOPs", "gathered")]
    assert [(row.case, row.what) for row in rows] == expected
    assert all(row.value > 0 for row in rows)


def test_rows_in_bf16_are_compared_with_torch(rows: list[Row]):
    compared = [row.case for row in rows if row.against and row.against.peer == "torch, not compiled"]
    assert compared == [
        "prefill, 2 queries, 2 heads, 8 of 64",
        "training, backward, 2 queries, 2 heads, 8 of 64",
        "decoding, 1 text, 2 heads, 8 of 64, BF16",
    ]


def test_flops_are_those_of_scores_and_weighted_values():
    assert flops(4096, Shape(4096, 8192, 128, 2048)) == 2 * 4096 * 128 * 2048 * (576 + 512)


def test_torch_computes_the_same():
    generator = torch.Generator().manual_seed(0)
    q, latents = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((3, 2, 576), (40, 576)))
    positions = torch.stack([torch.randperm(40, generator=generator)[:9] for _ in range(3)]).int()
    expected = sparse_attention(q, latents, positions, 512, sparse.SCALE)
    found = sparse._gather_and_attend(q, latents, positions)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
