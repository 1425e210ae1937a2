"""Hopper's backward pass of sparse latent attention in the emulator: the reference's gradients, whatever the lists."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import sparse_mla_backward
from octile.kernels.cuda.gemm import request
from octile.ops.sparse_attention import sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
T, SCALE, SMS = 320, 0.05, 3


class Operands(dict[str, Any]):
    """Arguments of the operator, by their names."""

    def rows(self, part: slice) -> "Operands":
        """The same of some queries."""
        return Operands({name: t[part] if name != "latents" else t for name, t in self.items()})


def operands(rows: int, n_heads: int, k: int) -> Operands:
    """Queries, rows, lists of different positions, every third of them absent, and the results of the forward pass."""
    generator = torch.Generator().manual_seed(n_heads)
    q, latents, do = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((rows, n_heads, 576), (T, 576), (rows, n_heads, 512))
    )
    positions = torch.stack([torch.randperm(T, generator=generator)[:k] for _ in range(rows)]).int()
    positions[:, ::3] = -1
    return with_results(Operands(do=do, q=q, latents=latents, positions=positions))


def with_results(given: Operands) -> Operands:
    """Compute o, in BF16, and lse of q, latents and positions."""
    q, latents, positions = given["q"], given["latents"], given["positions"]
    o, lse = sparse_attention_with_lse.reference(q.float(), latents.float(), positions, 512, SCALE)
    return Operands(given | {"o": o.bfloat16(), "lse": lse})


def gradients(given: Operands, at_once: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Run the kernels on an emulated GPU of few SMs, on blocks of `at_once` queries."""
    latents, (rows, n_heads, _), k = given["latents"], given["q"].shape, given["positions"].shape[1]
    head_blocks = -(-n_heads // 64)
    dq = torch.full_like(given["q"], math.nan)
    dlatents = torch.zeros(len(latents), 576)
    for first in range(0, rows, at_once or rows):
        part = slice(first, first + (at_once or rows))
        block = given.rows(part)
        n, positions, step = len(block["q"]), block["positions"], block["positions"].stride(0)
        made = sparse_mla_backward.plan()
        partials = torch.full((n, k, head_blocks, 576), math.nan, dtype=torch.bfloat16)
        entries = torch.full((len(latents), n), -1, dtype=torch.int16)
        emulator.run(
            "sparse_entries",
            {},
            grid=-(-k // sparse_mla_backward.ENTRY_THREADS) * n,
            threads=sparse_mla_backward.ENTRY_THREADS,
            shared_bytes=0,
            arguments=[positions, entries, n, k, step, len(latents)],
        )
        emulator.run(
            "sparse_mla_backward",
            made.constants,
            grid=min(n * head_blocks, SMS),
            threads=sparse_mla_backward.THREADS,
            shared_bytes=sparse_mla_backward.SHARED,
            arguments=[
                latents, block["q"], block["o"], block["do"], block["lse"], positions, dq[part], partials, SCALE,
                n_heads, n, k, step, len(latents),
            ],
            headers=made.headers,
            seed=seed,
        )  # fmt: skip
        emulator.run(
            "sparse_latent_gradient",
            made.sum_constants,
            grid=len(latents),
            threads=sparse_mla_backward.SUM_THREADS,
            shared_bytes=int(made.sum_constants["shared_bytes"]),
            arguments=[partials, entries, dlatents, n, k, head_blocks],
        )
    return dq, dlatents


def expected(given: Operands) -> tuple[Tensor, Tensor]:
    wide = {name: t.float() if t.is_floating_point() else t for name, t in given.items()}
    return sparse_attention_backward.reference(**wide, latent_dim=512, scale=SCALE)


def assert_as_reference(found: tuple[Tensor, Tensor], given: Operands) -> None:
    # BF16 rounds p, ds, what a query adds to a row, and dq, by 2⁻⁹ of themselves each
    for ours, exact in zip(found, expected(given), strict=True):
        assert not ours.isnan().any()
        rounding = 1e-4  # of FP32, where all cancels: the only position of a list
        assert (ours.float() - exact).norm() <= 2**-8 * exact.norm() + rounding
        assert ((ours.float() - exact).abs() <= 2**-6 * exact.abs() + 2**-7 * exact.abs().max() + rounding).all()


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@pytest.mark.parametrize("at_once", [None, 2], ids=["one block", "blocks of 2"])
@pytest.mark.parametrize(("rows", "n_heads", "k"), [(5, 3, 300), (3, 65, 130), (3, 64, 64)])
def test_gradients_are_the_references(rows: int, n_heads: int, k: int, at_once: int | None):
    given = operands(rows, n_heads, k)
    assert_as_reference(gradients(given, at_once), given)


@pytest.mark.slow
@emulated
def test_lists_of_any_length_with_absent_entries_anywhere():
    given = operands(7, 2, 300)
    positions = given["positions"]
    positions[0], positions[1, 1:], positions[2, :-1], positions[3, :200] = -1, -1, -1, -1
    positions[4, 64:128], positions[5, 130:], positions[6, 64:] = -1, -1, -1
    given = with_results(given)
    found = gradients(given)
    assert_as_reference(found, given)
    assert not found[0][0].any()


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("k", [1, 63, 65, 128, 129])
def test_lists_of_few_entries(k: int):
    given = operands(2, 2, 130)
    given["positions"] = given["positions"][:, 1 : k + 1]  # of a stride that is not their length
    given = with_results(given)
    assert_as_reference(gradients(given), given)


@pytest.mark.slow
@emulated
def test_positions_outside_of_the_latents_are_absent():
    given = operands(3, 2, 140)
    before = gradients(given)
    outside = given["positions"].clone()
    outside[0, ::3], outside[1, ::3], outside[2, ::3] = -(2**31), T, 2**31 - 1
    found = gradients(Operands(given | {"positions": outside}))
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))


@pytest.mark.slow
@emulated
def test_rows_outside_the_top_k_have_no_gradient_and_are_not_read():
    given = operands(2, 2, 200)
    before = gradients(given)
    others = torch.ones(T, dtype=torch.bool)
    others[given["positions"][given["positions"] >= 0].long()] = False
    given["latents"][others] = math.nan
    found = gradients(given)
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    assert not found[1][others].any()


@pytest.mark.slow
@emulated
def test_a_nan_reaches_its_own_head_and_rows_alone():
    given = operands(3, 2, 200)
    before = gradients(given)
    given["do"][1, 1] = math.nan
    dq, dlatents = gradients(given)
    top_k = torch.zeros(T, dtype=torch.bool)
    top_k[given["positions"][1][given["positions"][1] >= 0].long()] = True
    assert dq.isnan().any(-1).nonzero().tolist() == [[1, 1]]
    assert torch.equal(dlatents.isnan().any(-1), top_k)
    assert torch.equal(dlatents[~top_k], before[1][~top_k])


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_bits_do_not_depend_on_the_order_in_which_threads_run(seed: int):
    given = operands(3, 65, 130)
    for ours, theirs in zip(gradients(given, seed=seed), gradients(given), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("rows", "head_blocks", "k", "queries"),
    [
        (8192, 2, 2048, 198),
        (8192, 1, 2048, 396),
        (100, 2, 2048, 100),
        (8192, 2, 60000, 7),
        (3, 2, 64, 3),
        (65536, 1, 16, 792),
    ],
)
def test_blocks_of_queries_fill_all_sms_and_fit(rows: int, head_blocks: int, k: int, queries: int):
    assert sparse_mla_backward.queries_at_once(rows, head_blocks, k, 132) == queries
    assert queries * head_blocks * k * 576 * 2 <= sparse_mla_backward.MAX_PARTIAL_BYTES


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latents": lambda t: t.float()}, "the latents are torch.float32, not bfloat16"),
        ({"do": lambda t: t.float()}, "do is not contiguous bfloat16"),
        ({"o": lambda t: t.transpose(0, 1)}, "o is not contiguous bfloat16"),
        ({"positions": lambda t: t[:, :1].expand(-1, 65536)}, "lists have 65536 entries, more than 65535"),
        ({"q": lambda t: t.float()}, "q is torch.float32"),
    ],
)
def test_calls_that_are_not_supported_say_why(change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    given = {name: t for name, t in operands(2, 2, 64).items() if name != "lse"}
    assert sparse_mla_backward.why_unsupported(**given, latent_dim=512) is None
    changed = {name: change.get(name, lambda t: t)(t) for name, t in given.items()}
    assert reason in str(sparse_mla_backward.why_unsupported(**changed, latent_dim=512))
