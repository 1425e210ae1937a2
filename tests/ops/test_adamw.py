"""Tests of AdamW's operator: the formula in exact arithmetic, torch's own step, and the stored dtypes."""

import math
from typing import Any

import pytest
import torch
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


def corrections(t: int) -> Tensor:
    return torch.tensor([LR / (1 - BETA1**t), math.sqrt(1 - BETA2**t), 1 - LR * DECAY])


@pytest.mark.parametrize("t", [1, 7, 1000])
def test_it_equals_the_formula(t: int):
    w, g, m, v = (x.double() for x in tensors())
    m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
    step = LR * (m / (1 - BETA1**t)) / ((v / (1 - BETA2**t)).sqrt() + EPS)
    expected = [w * (1 - LR * DECAY) - step, m, v]
    w, g, *moments = tensors()
    adamw(w, g, *moments, corrections(t), *SETTINGS)
    for ours, theirs in zip([w, *moments], expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-8)


def test_it_equals_torchs_step():
    """Bit-for-bit equality where the processor has a fused multiply-add; elsewhere torch rounds once more."""
    (w, g, m, v), (w2, _, m2, v2) = tensors(), tensors()
    adamw(w, g, m, v, corrections(5), *SETTINGS)
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
    adamw(*wide, corrections(5), *SETTINGS)
    adamw(w, g, m, v, corrections(5), *SETTINGS)
    assert torch.equal(w, wide[0])
    assert torch.equal(m, wide[2].bfloat16())
    assert torch.equal(v, wide[3].bfloat16())


@pytest.mark.parametrize("skip", [False, True])
def test_nothing_changes_if_and_only_if_the_flag_is_true(skip: bool):
    w, g, m, v = tensors(torch.bfloat16)
    before = [t.clone() for t in (w, m, v)]
    adamw(w, g, m, v, corrections(5), *SETTINGS, torch.tensor(skip))
    assert [torch.equal(t, old) for t, old in zip((w, m, v), before, strict=True)] == [skip] * 3


def test_written_tensors_get_a_new_version():
    w, g, m, v = tensors()
    before = [t._version for t in (w, g, m, v)]
    adamw(w, g, m, v, corrections(1), *SETTINGS)
    assert [t._version > old for t, old in zip((w, g, m, v), before, strict=True)] == [True, False, True, True]


def test_it_is_a_well_formed_operator():
    torch.library.opcheck(adamw.overload, (*tensors(torch.bfloat16), corrections(3), *SETTINGS))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda w, g, m, v, c: (w.bfloat16(), g, m, v, c), TypeError, "weight must be float32, not torch.bfloat16"),
        (
            lambda w, g, m, v, c: (w, g, m.double(), v, c),
            TypeError,
            "exp_avg must be float32, bfloat16 or float16, not",
        ),
        (lambda w, g, m, v, c: (w, g[1:], m, v, c), ValueError, r"gradient must be \(1000,\) as weight, not \(999,\)"),
        (lambda w, g, m, v, c: (w, g, m, v, c[:1]), ValueError, r"corrections must be float32 \[3\], not"),
        (lambda w, g, m, v, c: (w, g, m, v[:1].expand(N), c), ValueError, r"exp_avg_sq must be contiguous, .* \(0,\)"),
    ],
    ids=["weight", "moment", "shape", "corrections", "strides"],
)
def test_arguments_that_do_not_fit_are_refused(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        adamw(*change(*tensors(), corrections(1)), *SETTINGS)
