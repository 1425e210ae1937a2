"""Operators of few rows compute what the operators do that they consist of, and refuse what does not fit."""

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.ops.few_rows import few_rows_nt, latent_attention
from octile.ops.latent_cache import read_latents
from octile.ops.quantize import dequantize
from octile.ops.rope import rotated
from tests.ops import few_rows
from tests.ops.operators import assert_well_formed


@pytest.mark.parametrize("norm", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 256, 5), (1, 128, 1), (3, 200, 130), (9, 384, 40)])
def test_products_of_normalized_rows(m: int, k: int, n: int, norm: torch.dtype | None):
    x, norm_weight, weight, scale, add = few_rows.product(m, k, n, norm, add=True)
    y = few_rows_nt(x, norm_weight, 1e-6, weight, scale, False, add)
    rows = x.float()
    if norm_weight is not None:
        rows = rows * (rows.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight.float()
    expected = rows @ dequantize(weight, scale, 128, 128, torch.float32).mT
    error = (y.float() - add.float() - expected).norm() / max(float(expected.norm()), 1.0)
    assert y.dtype == torch.bfloat16
    assert y.shape == (m, n)
    assert error < 0.05  # E4M3 has 3 bits after the first one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_the_rounded_product(dtype: torch.dtype):
    x, _, weight, scale, add = few_rows.product(2, 256, 32, None, add=True)
    product = few_rows_nt(x.to(dtype), None, 0.0, weight, scale, True)
    assert torch.equal(few_rows_nt(x.to(dtype), None, 0.0, weight, scale, True, add.to(dtype)), product + add.to(dtype))


def test_rows_are_normalized_rotated_and_written():
    arguments = few_rows.attention([70, 0, 64], 3, 32)
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, Tensor)}
    latent_attention(**arguments)
    assert all(torch.equal(arguments[name], t) for name, t in before.items() if name != "cache")
    kv, norm_weight, cos, sin, slots, cache = (
        arguments[name] for name in ("kv", "norm_weight", "cos", "sin", "slots", "cache")
    )
    latents = kv[:, :512].float()
    latents = latents * (latents.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm_weight
    keys = rotated(kv[:, None, 512:], cos, sin)[:, 0]
    written = slots >= 0
    found = read_latents(cache, slots[written], 512, torch.float32)
    torch.testing.assert_close(found, torch.cat((latents, keys), dim=1)[written], rtol=2**-7, atol=2**-9)
    assert int((cache != before["cache"]).any(-1).sum()) == 2


@pytest.mark.parametrize("lengths", [[130, 0, 64], [1], []])
def test_attention_in_latent_space_is_attention_to_keys_and_values(lengths: list[int]):
    arguments = few_rows.attention(lengths or [1], 2, 32)
    if not lengths:
        rows = ("q", "kv", "cos", "sin", "slots", "pages", "lengths")
        arguments |= {name: arguments[name][:0] for name in rows}
    found = latent_attention(**arguments)
    assert found.shape == (len(lengths), 2 * 128)
    q, cos, sin, pages, w_k, w_v = (arguments[name] for name in ("q", "cos", "sin", "pages", "w_k", "w_v"))
    heads = q.float().unflatten(-1, (2, 96))
    for row, length in enumerate(lengths):
        rows = arguments["cache"][pages[row].long()].flatten(0, 1)[:length].float()
        keys = torch.cat((rows[:, :512] @ w_k.float(), rows[:, 512:].expand(2, -1, -1)), dim=-1)
        query = torch.cat(
            (heads[row, :, :32], rotated(heads[row : row + 1, :, 32:], cos[row][None], sin[row][None])[0]), -1
        )
        p = torch.einsum("hx,hlx->hl", query, keys).mul(0.05).softmax(-1) if length else torch.zeros(2, 0)
        expected = torch.einsum("hl,lc,hvc->hv", p, rows[:, :512], w_v.float()).flatten()
        assert (found[row].float() - expected).norm() <= 0.02 * expected.norm()


def test_a_row_of_row_invariant_attention_has_the_bits_that_it_has_alone():
    arguments = few_rows.attention([70, 5, 64], 3, 32) | {"row_invariant": True}
    together = latent_attention(**arguments)
    of_rows = ("q", "kv", "cos", "sin", "slots", "pages", "lengths")
    for row in range(3):
        cache = few_rows.attention([70, 5, 64], 3, 32)["cache"]
        one = {name: arguments[name][row : row + 1] for name in of_rows}
        assert torch.equal(latent_attention(**arguments | one | {"cache": cache})[0], together[row])
        slot = int(arguments["slots"][row])
        assert torch.equal(cache.flatten(0, 1)[slot], arguments["cache"].flatten(0, 1)[slot])


@dataclass
class Refusal:
    change: dict[str, Any]
    error: type[Exception]
    message: str


def named(names: str, arguments: tuple[Any, ...], **others: object) -> dict[str, Any]:
    return dict(zip(names.split(), arguments, strict=True)) | others


OF_PRODUCT = few_rows.product(2, 256, 40, torch.float32, True)
PRODUCT = named("x norm_weight weight scale add", OF_PRODUCT, eps=1e-6, power_of_2=False)
ATTENTION = few_rows.attention([5, 70], 3, 32)


@pytest.mark.parametrize(
    "case",
    [
        Refusal({"x": PRODUCT["x"].half()}, TypeError, "x must be bfloat16 or float32, not torch.float16"),
        Refusal({"weight": PRODUCT["weight"].float()}, TypeError, "weight must be float8_e4m3fn"),
        Refusal({"x": PRODUCT["x"][:, :128]}, ValueError, r"x and weight must be \[M, K\] and \[N, K\]"),
        Refusal({"scale": torch.ones(2, 2)}, ValueError, "scale"),
        Refusal({"norm_weight": torch.ones(5)}, ValueError, r"weight must be \(256,\), not \(5,\)"),
        Refusal({"add": torch.ones(2, 40)}, TypeError, "add must be torch.bfloat16 as x, not torch.float32"),
        Refusal({"add": PRODUCT["add"][:1]}, ValueError, r"add must be \(2, 40\), not \(1, 40\)"),
    ],
    ids=lambda case: case.message,
)
def test_operands_that_do_not_fit_are_refused(case: Refusal):
    with pytest.raises(case.error, match=case.message):
        few_rows_nt(**PRODUCT | case.change)


@pytest.mark.parametrize(
    "case",
    [
        Refusal({"kv": ATTENTION["kv"].float()}, TypeError, "kv must be torch.bfloat16 as q, not torch.float32"),
        Refusal({"q": ATTENTION["q"][:, :-1]}, ValueError, r"q must have 3·\(32 \+ 64\) channels"),
        Refusal({"kv": ATTENTION["kv"][:1]}, ValueError, "q, kv and w_k must be"),
        Refusal({name: ATTENTION[name][:, :4] for name in ("cos", "sin")}, ValueError, r"cos must be \(2, 32\)"),
        Refusal({"slots": torch.tensor([1, 2], dtype=torch.int32)}, TypeError, "slots must be int64"),
        Refusal({"slots": torch.tensor([1, 2**20])}, IndexError, "slots must be below the cache's 256"),
        Refusal({"norm_weight": torch.ones(5)}, ValueError, r"weight must be \(512,\), not \(5,\)"),
        Refusal({"w_v": ATTENTION["w_v"].float()}, TypeError, "w_v must be torch.bfloat16 as q, not torch.float32"),
        Refusal({"w_v": ATTENTION["w_v"][:1]}, ValueError, r"w_v must be \(3, V, 512\) as w_k"),
        Refusal({"lengths": ATTENTION["lengths"].long()}, TypeError, "lengths must be int32"),
    ],
    ids=lambda case: case.message,
)
def test_attention_that_does_not_fit_is_refused(case: Refusal):
    with pytest.raises(case.error, match=case.message):
        latent_attention(**ATTENTION | case.change)


def test_a_product_of_few_rows_is_well_formed():
    x, norm_weight, weight, scale, add = few_rows.product(2, 256, 40, torch.float32, add=True)
    assert_well_formed(few_rows_nt, (x, norm_weight, 1e-6, weight, scale, False, add))


@pytest.mark.one_case
@pytest.mark.parametrize("row_invariant", [False, True])
def test_attention_of_few_rows_is_well_formed(row_invariant: bool):
    drawn = few_rows.attention([70, 0], 3, 32) | {"row_invariant": row_invariant}
    assert_well_formed(latent_attention, [drawn[name] for name in inspect.signature(latent_attention).parameters])
