"""Replay results of real tensor cores, recorded by `python -m octile.lab.probe --golden FILE`."""

from pathlib import Path

import torch

from octile.lab.probe.compare import bits, cases, modeled
from octile.lab.tensor_core import vectorized
from octile.lab.tensor_core.operand import decode
from octile.lab.tensor_core.vectorized import Summation
from tests.lab.recorded_results import replay

FILE = Path(__file__).parent / "golden" / "sm_90.safetensors"  # of an H200: what `tools/hopper.sh probe` left


def test_the_model_equals_the_recorded_hardware():
    outputs = 0
    for case, a, b, c, d in replay(FILE):
        assert torch.equal(bits(modeled(a, b, c, case.instruction)), bits(d)), case
        outputs += d.numel()
    assert outputs >= 20_000


def test_the_vectorized_form_equals_the_recorded_hardware():
    for case, a, b, c, d in replay(FILE):
        x, y = decode(a, case.instruction), decode(b, case.instruction)
        how = Summation(
            case.instruction,
            case.instruction.promotes_every or x.value.shape[1],
            case.instruction.promotes_every is not None,
            fp16_accumulator=case.fp16_accumulator,
        )
        assert torch.equal(bits(vectorized.sum_products(x, y, c.float(), how).to(d.dtype)), bits(d)), case


def test_every_instruction_was_recorded():
    assert {case for case, *_ in replay(FILE)} >= set(cases())
