"""Tests of AdamW's operator: the formula in exact arithmetic, torch's own step, and the stored dtypes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.adamw import adamw

LR, BETA1, BETA2, EPS, DECAY = 3e-3, 0.9, 0.95, 1e-8, 0.1
SETTINGS = (BETA1, BETA2, EPS)
N = 1000


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Weight, gradient and moments."""
    torch.manual_seed(0)
    w, g, m, v = torch.randn(N), torch.randn(N) * 1e-2, torch.randn(N) * 1e-2, torch.rand(N) * 1e-4
    return [w, g, m.to(dtype), v.to(dtype)]


def update(w: Tensor, g: Tensor, m: Tensor, v: Tensor, corrections: Tensor, *others: Tensor | None) -> None:
    """Update one tensor."""
    adamw([w], [g], [m], [v], [], corrections, *SETTINGS, *others)


def corrections(t: int) -> Tensor:
    return torch.tensor([[LR / (1 - BETA1**t), math.sqrt(1 - BETA2**t), 1 - LR * DECAY]])


@pytest.mark.parametrize("t", [1, 7, 1000])
def test_it_equals_the_formula(t: int):
    w, g, m, v = (x.double() for x in tensors())
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    step = LR * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS)
    expected = [w * (1 - LR * DECAY) - step, m, v]
    w, g, *moments = tensors()
    update(w, g, *moments, corrections(t))
    for ours, theirs in zip([w, *moments], expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-8)


def test_it_equals_torchs_step():
    """Bit-for-bit equality where the processor has a fused multiply-add; elsewhere torch rounds once more."""
    (w, g, m, v), (w2, _, m2, v2) = tensors(), tensors()
    update(w, g, m, v, corrections(5))
    settings = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "weight_decay": DECAY, "eps": EPS}
    torch._fused_adamw_([w2], [g], [m2], [v2], [], [torch.tensor(5.0)], amsgrad=False, maximize=False, **settings)
    whole_vectors = N // 16 * 16  # torch computes the rest in FP64
    fused = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    for ours, theirs in ((w, w2), (m, m2), (v, v2)):
        torch.testing.assert_close(ours, theirs, rtol=4 * 2.0**-23, atol=1e-9)
        assert not fused or torch.equal(ours[:whole_vectors], theirs[:whole_vectors])


@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_moments_in_bf16_are_rounded_after_the_step(gradient_dtype: torch.dtype):
    w, g, m, v = tensors(torch.bfloat16)
    g = g.to(gradient_dtype)
    wide = [w.clone(), g.float(), m.float(), v.float()]
    update(*wide, corrections(5))
    update(w, g, m, v, corrections(5))
    assert torch.equal(w, wide[0])
    assert torch.equal(m, wide[2].bfloat16())
    assert torch.equal(v, wide[3].bfloat16())


@pytest.mark.parametrize("skip", [False, True])
def test_nothing_changes_if_and_only_if_the_flag_is_true(skip: bool):
    w, g, m, v = tensors(torch.bfloat16)
    before = [t.clone() for t in (w, m, v)]
    update(w, g, m, v, corrections(5), torch.tensor(skip))
    assert [torch.equal(t, old) for t, old in zip((w, m, v), before, strict=True)] == [skip] * 3


@given(
    seed=st.integers(0, 2**31),
    n=st.integers(0, 70),
    dtypes=st.sampled_from(["float32", "bfloat16", "float16"]),
    gradient_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.sampled_from([None, 0.3, 1.0]),
    t=st.sampled_from([1, 7, 1000]),
)
def test_the_kernel_of_the_cpu_gives_the_bits_of_the_reference(seed, n, dtypes, gradient_dtype, scale, t):
    generator = torch.Generator().manual_seed(seed)
    w, g, m, v = (torch.randn(n, generator=generator) * torch.exp2(torch.randint(-30, 9, (n,), generator=generator))
                  for _ in range(4))  # fmt: skip
    dtype = getattr(torch, dtypes)
    start = [w, m.to(dtype), v.abs().to(dtype), torch.zeros(n, dtype=torch.bfloat16)]
    results = []
    for step in (adamw, adamw.reference):
        weight, exp_avg, exp_avg_sq, copy = (x.clone() for x in start)
        factor = None if scale is None else torch.tensor(scale)
        lists = [weight], [g.to(gradient_dtype)], [exp_avg], [exp_avg_sq], [copy]
        step(*lists, corrections(t), *SETTINGS, None, factor)
        results.append((weight, exp_avg, exp_avg_sq, copy))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_written_tensors_get_a_new_version():
    w, g, m, v = tensors()
    before = [t._version for t in (w, g, m, v)]
    update(w, g, m, v, corrections(1))
    assert [t._version > old for t, old in zip((w, g, m, v), before, strict=True)] == [True, False, True, True]


def test_each_tensor_has_its_own_corrections():
    together, alone = (torch.full((3,), 1.0) for _ in range(2)), (torch.full((3,), 1.0) for _ in range(2))
    (a, b), (c, d) = together, alone
    g, both = torch.full((3,), 0.1), torch.cat([corrections(1), corrections(9)])
    adamw([a, b], [g, g], [g.clone(), g.clone()], [g.clone(), g.clone()], [], both, *SETTINGS)
    for w, t in ((c, 1), (d, 9)):
        update(w, g, g.clone(), g.clone(), corrections(t))
    assert torch.equal(a, c)
    assert torch.equal(b, d)
    assert not torch.equal(a, b)


def test_copies_are_the_rounded_weights():
    w, g, m, v = tensors()
    copy = torch.empty(N, dtype=torch.bfloat16)
    adamw([w], [g], [m], [v], [copy], corrections(5), *SETTINGS)
    assert torch.equal(copy, w.bfloat16())


def test_the_scale_multiplies_the_gradient_and_leaves_it_as_it_is():
    (w, g, m, v), (w2, g2, m2, v2) = tensors(), tensors()
    factor = torch.tensor(0.3)
    update(w, g, m, v, corrections(5), None, factor)
    update(w2, g2 * factor, m2, v2, corrections(5))
    for ours, theirs in ((w, w2), (m, m2), (v, v2), (g, g2)):
        assert torch.equal(ours, theirs)


def test_it_is_a_well_formed_operator():
    w, g, m, v = tensors(torch.bfloat16)
    lists = [w, w.clone()], [g, g.bfloat16()], [m, m.clone()], [v, v.clone()], [m.clone(), m.clone()]
    flags = torch.tensor(False), torch.tensor(0.5)
    torch.library.opcheck(adamw.overload, (*lists, torch.cat([corrections(3)] * 2), *SETTINGS, *flags))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w, g, m, v: ([w.bfloat16()], [g], [m], [v], []), TypeError, r"weights\[0\] must be float32, not .*16"),
        (
            lambda w, g, m, v: ([w], [g], [m.double()], [v], []),
            TypeError,
            r"exp_avgs\[0\] must be float32, bfloat16 or float16, not",
        ),
        (
            lambda w, g, m, v: ([w], [g[1:]], [m], [v], []),
            ValueError,
            r"gradients\[0\] must be \(1000,\) as weights\[0\], not \(999,\)",
        ),
        (lambda w, g, m, v: ([w], [g, g], [m], [v], []), ValueError, "gradients must have 1 tensors as weights, not 2"),
        (
            lambda w, g, m, v: ([w], [g], [m], [v[:1].expand(N)], []),
            ValueError,
            r"exp_avg_sqs\[0\] must be contiguous, .* \(0,\)",
        ),
        (
            lambda w, g, m, v: ([w], [g], [m], [v], [w[:1]]),
            ValueError,
            r"copies\[0\] must be \(1000,\) as weights\[0\], not \(1,\)",
        ),
        (lambda w, g, m, v: ([w], [0.5], [m], [v], []), TypeError, r"gradients\[0\] must be a tensor, not float"),
        (lambda w, g, m, v: (w, [g], [m], [v], []), TypeError, "weights must be a list of tensors, not Tensor"),
    ],
    ids=["weight", "moment", "shape", "length", "strides", "copy", "number", "no list"],
)
def test_tensors_that_do_not_fit_are_refused(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        adamw(*change(*tensors()), corrections(1), *SETTINGS)


@pytest.mark.parametrize(
    ("others", "error", "message"),
    [
        ((corrections(1)[0],), ValueError, r"corrections must be float32 \[1, 3\], contiguous, not"),
        ((corrections(1), torch.tensor(1)), TypeError, "skip must be bool, not torch.int64"),
        ((corrections(1), None, torch.ones(1)), ValueError, r"gradient_scale must be float32 \[\], not .* \[1\]"),
    ],
    ids=["corrections", "skip", "gradient_scale"],
)
def test_numbers_that_do_not_fit_are_refused(others: tuple[Tensor, ...], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        update(*tensors(), *others)
