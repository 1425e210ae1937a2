"""Tests of outliers: kinds of tokens, massive values, and the effect of their removal, by hand."""

import math

import pytest
import torch

from octile.lab.capture import Capture, CapturedGemm, load
from octile.lab.outliers import MASSIVE, SCHEMES, find_outliers, gemms_by_token, most_outlying, token_kinds
from octile.scaled import quantize
from tests.lab.captures import write_capture

KINDS = ["first token", "other tokens", ".", "newline", "other tokens", "other tokens"]


def layer(outlier=3000.0, seed=0) -> CapturedGemm:
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(6, 200, generator=generator), torch.randn(30, 200, generator=generator)
    x[0, 9] = outlier
    return CapturedGemm("layer", "fprop", x, w)


def by_kind(p, **options):
    return {row.kind: row for row in find_outliers(p, KINDS, 6, **options).without}


def test_kinds_of_tokens():
    texts = {0: "def", 1: ".", 2: "\n", 3: " \n  ", 4: " .", 5: "a.b", 6: " "}
    kinds = token_kinds(torch.tensor([[1, 1, 2, 3], [0, 4, 5, 6]]), texts.__getitem__)
    assert kinds == ["first token", ".", "newline", "newline", "first token", ".", "other tokens", "other tokens"]


def test_without_texts_only_the_first_token_is_known():
    assert token_kinds(torch.tensor([[1, 2]]), None) == ["first token", "other tokens"]


def test_a_value_is_massive_by_the_median():
    p = layer()
    median = p.a.abs().flatten().sort().values[(p.a.numel() - 1) // 2]
    row = by_kind(p)["first token"]
    assert row.massive == 1
    assert row.largest == pytest.approx(3000 / median.item())
    below = layer(0.99 * MASSIVE * median.item())
    assert by_kind(below)["first token"].massive == 0


def test_only_the_values_of_that_kind_are_zeroed():
    rows = by_kind(layer())
    assert {kind: row.massive for kind, row in rows.items()} == {
        "first token": 1,
        ".": 0,
        "newline": 0,
        "other tokens": 0,
        "all tokens": 1,
    }
    assert rows["."].output == 0
    assert set(rows["."].error.values()) == {1.0}


def test_the_values_equal_their_definitions():
    p = layer()
    row = by_kind(p, sample=30)["first token"]
    without = p.a.clone()
    without[0, 9] = 0
    y, moved = (t.double() @ p.b.double().T for t in (p.a, without))
    assert row.output == pytest.approx(((y - moved).norm() / y.norm()).item())
    w = quantize(p.b, (128, 128)).dequantize().double()
    for name, (fmt, block) in SCHEMES.items():
        before, after = (
            (quantize(t, block, fmt).dequantize().double() @ w.T - exact).square()
            for t, exact in ((p.a, y), (without, moved))
        )
        assert row.error[name] == pytest.approx((after.sum() / before.sum()).item())
        assert row.others[name] == pytest.approx((after[1:].sum() / before[1:].sum()).item())


def test_a_tile_scale_depends_on_its_own_token_only():
    others = by_kind(layer())["first token"].others
    assert others["E4M3, tiles of 1×128"] == 1.0
    assert others["INT8, one scale a tensor"] < 0.1


def test_if_all_tokens_have_massive_values_there_are_no_others():
    p = layer()
    p.a[:, 3] = 5000.0
    assert all(math.isnan(share) for share in by_kind(p)["all tokens"].others.values())


def test_the_most_outlying_input():
    assert most_outlying([layer(10.0), layer(3000.0), layer(100.0)]).a[0, 9] == 3000


def test_rows_are_tokens_outside_of_experts(tmp_path):
    capture = load(write_capture(tmp_path / "c.safetensors"))
    assert [p.layer for p in gemms_by_token(capture)] == ["first", "second"]
    assert most_outlying(gemms_by_token(capture)).layer == "first"


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (Capture((layer(),), 1, "r", "run", "0"), "the capture has no token ids"),
        (
            Capture((layer(),), 1, "r", "run", "0", torch.zeros(2, 2)),
            "no fprop outside experts, whose rows are the tokens",
        ),
    ],
)
def test_captures_without_tokens_are_refused(capture, message):
    with pytest.raises(ValueError, match=message):
        gemms_by_token(capture)
