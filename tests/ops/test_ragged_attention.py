"""Tests of causal attention of several texts: equal to torch's attention of each text alone."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.attention import ragged_attention
from tests.ops.operators import assert_well_formed

SCALE = 0.3
HEADS, WIDTH, VALUES = 3, 24, 16
TEXTS = ((7, 7), (1, 5), (3, 3), (4, 70))  # rows and keys of each


def inputs(texts=TEXTS, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
    """The queries, keys and values of all texts, where each text begins, and the most rows and keys of one."""
    generator = torch.Generator().manual_seed(0)
    (rows, keys), most = map(sum, zip(*texts, strict=True)), tuple(map(max, zip(*texts, strict=True)))
    shapes = (rows, HEADS, WIDTH), (keys, HEADS, WIDTH), (keys, HEADS, VALUES)
    qkv = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    starts = [torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in zip(*texts, strict=True)]
    return qkv, starts, most


def attend(qkv: list[Tensor], starts: list[Tensor], most: tuple[int, int], function=ragged_attention) -> Tensor:
    out = qkv[0].new_full((len(qkv[0]), HEADS, VALUES), 7.0)
    function(out, *qkv, *starts, *most, SCALE)
    return out


def torchs(qkv: list[Tensor], starts: list[Tensor]) -> Tensor:
    """torch's attention in FP64, a text after the other."""
    results, (q, k, v) = [], (t.double() for t in qkv)
    for i in range(len(starts[0]) - 1):
        (a, b), (c, d) = (of[i : i + 2].tolist() for of in starts)
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        operands = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        results.append(F.scaled_dot_product_attention(*operands, mask, scale=SCALE)[0].transpose(0, 1))
    return torch.cat(results)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=5))
def test_each_text_has_torchs_attention(sizes):
    qkv, starts, most = inputs(tuple((rows, rows + before) for rows, before in sizes))
    expected = torchs(qkv, starts)
    for function in (ragged_attention, ragged_attention.reference):
        torch.testing.assert_close(attend(qkv, starts, most, function).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_are_rounded_once(dtype):
    qkv, starts, most = inputs(dtype=dtype)
    found = attend(qkv, starts, most, ragged_attention.reference)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), torchs(qkv, starts), rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(attend(qkv, starts, most), found, rtol=2**-7, atol=2**-7)


def test_operands_and_result_may_be_parts_of_others():
    qkv, starts, most = inputs()
    wide = [torch.cat((t.flatten(1), torch.ones(len(t), 5)), dim=1) for t in qkv]
    parts = [t[:, :-5].unflatten(1, (HEADS, -1)) for t in wide]
    out = torch.zeros(len(wide[0]), HEADS * VALUES + 3)
    ragged_attention(out[:, : HEADS * VALUES].unflatten(1, (HEADS, -1)), *parts, *starts, *most, SCALE)
    found = out[:, : HEADS * VALUES].unflatten(1, (HEADS, -1))
    assert torch.equal(found, attend(parts, starts, most))
    torch.testing.assert_close(found.double(), torchs(qkv, starts), rtol=1e-5, atol=1e-5)
    assert not out[:, HEADS * VALUES :].any()


def test_a_nan_stays_in_its_text_and_after_its_position():
    qkv, starts, most = inputs(((4, 4), (3, 3)))
    clean = attend(qkv, starts, most)
    qkv[1][2] = torch.nan
    found = attend(qkv, starts, most)
    assert found[2:4].isnan().all()
    assert torch.equal(found[[0, 1, 4, 5, 6]], clean[[0, 1, 4, 5, 6]])


def test_the_operator_is_well_formed():
    qkv, starts, most = inputs()
    assert_well_formed(ragged_attention, (torch.zeros(len(qkv[0]), HEADS, VALUES), *qkv, *starts, *most, SCALE))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": torch.zeros(85, HEADS, WIDTH).bfloat16()}, TypeError, "k must be torch.float32 as q"),
        ({"q": torch.zeros(15, HEADS, WIDTH, dtype=torch.int32)}, TypeError, "q must be"),
        ({"v": torch.zeros(84, HEADS, VALUES)}, ValueError, r"k must be \(84, 3, 24\), not \(85, 3, 24\)"),
        ({"out": torch.zeros(15, HEADS, 3)}, ValueError, r"out must be \(15, 3, 16\)"),
        ({"q": torch.zeros(15, WIDTH)}, ValueError, r"q must be \[rows, H, channels\]"),
        ({"row_starts": torch.zeros(5)}, TypeError, "row_starts must be int32"),
        ({"key_starts": torch.zeros(2, dtype=torch.int32)}, ValueError, "key_starts must have the first of each text"),
        (
            {"row_starts": torch.tensor([0, 7, 8, 11, 14]).int()},
            ValueError,
            "row_starts must be nondecreasing from 0 to 15",
        ),
        ({"row_starts": torch.tensor([0, 7, 7, 11, 15]).int()}, ValueError, "text 1 must have a row"),
        (
            {"key_starts": torch.tensor([0, 6, 12, 15, 85]).int()},
            ValueError,
            "text 0 must have .* not 7 rows and 6 keys",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changed, error, message):
    (q, k, v), (row_starts, key_starts), (max_rows, max_keys) = inputs()
    arguments = {"out": torch.zeros(15, HEADS, VALUES), "q": q, "k": k, "v": v}
    arguments |= {"row_starts": row_starts, "key_starts": key_starts, **changed}
    with pytest.raises(error, match=message):
        ragged_attention(*arguments.values(), max_rows, max_keys, SCALE)
