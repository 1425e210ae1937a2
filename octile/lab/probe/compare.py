"""Counts where a tensor core and its model differ, for the model of the table and for others that were thought of.

A hypothesis that fits as well as the table's says that the operands cannot tell them apart; one that fits better says
what the table should be.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from octile.lab.probe.tiles import KINDS, accumulator, operand
from octile.lab.tensor_core import sum_products
from octile.lab.tensor_core.architectures import Instruction, find_instruction
from octile.lab.tensor_core.operand import decode
from octile.lab.tensor_core.vectorized import Summation

Run = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # an instruction's name, a, b and c: what the hardware gives
ARCHITECTURE = {"wgmma": "sm_90", "mma": "sm_90_mma"}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.float16, torch.bfloat16, torch.float32)
SIDE = 4096  # of the matrices of a batch
EXAMPLES = 8  # mismatches that are kept


@dataclass(frozen=True)
class Case:
    """An instruction, the dtypes of its operands, how many of it are chained, and whether the sums are FP16."""

    name: str
    a: torch.dtype
    b: torch.dtype
    steps: int
    fp16_accumulator: bool = False

    @property
    def row(self) -> Instruction:
        return find_instruction(ARCHITECTURE[self.name], self.a, self.b)

    @property
    def k(self) -> int:
        return 32 * self.steps // self.a.itemsize

    def __str__(self) -> str:
        sums = ", sums in FP16" if self.fp16_accumulator else ""
        return f"{self.name} {self.a} × {self.b}{sums}, {self.steps} in a chain".replace("torch.", "")


@dataclass
class Found:
    """What came out of one case.

    Attributes:
        outputs: compared.
        mismatches: by hypothesis; the first is the table's. Others are counted on the first batch, and on those where
            the table's fails.
        tried: outputs that each hypothesis was compared on.
        examples: of the table's mismatches, in words.
    """

    outputs: int = 0
    mismatches: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


def cases() -> Iterable[Case]:
    """Both instructions, all pairs of dtypes, sums in FP32 and where the table has them in FP16, alone and in fours."""
    pairs = [*product(FP8, FP8), *((dtype, dtype) for dtype in OTHERS)]
    for fp16_accumulator, name, (a, b), steps in product((False, True), ARCHITECTURE, pairs, (1, 4)):
        case = Case(name, a, b, steps, fp16_accumulator)
        if not fp16_accumulator or case.row.fp16_floor is not None:
            yield case


def hypotheses(case: Case) -> dict[str, Instruction]:
    """The table's row, and what else it might have been."""
    row = case.row
    kept = row.fraction_bits
    others = {
        "as in the table": row,
        "negative terms cut toward −∞": replace(row, truncation="down"),
        f"F = {kept - 1}": replace(row, fraction_bits=kept - 1),
        f"F = {kept + 1}": replace(row, fraction_bits=kept + 1),
    }
    if case.fp16_accumulator:
        return others
    if row.output_bits < 23:
        others["a result of 23 fraction bits"] = replace(row, output_bits=23)
        others["F = 25, a result of 23 fraction bits"] = replace(row, fraction_bits=25, output_bits=23)
    if row.via_fp16:
        others["K in order"] = replace(row, via_fp16=False)
        others["C among the aligned terms"] = replace(row, promotes_every=None)
    return others


def compare(case: Case, outputs: int, run: Run, device: torch.device, seed: int = 0, side: int = SIDE) -> Found:
    """Compares at least so many outputs of the hardware with the models, bit for bit.

    The second of every eight batches has NaN and Inf among its operands.
    """
    found = Found()
    generator = torch.Generator(device).manual_seed(seed)
    models = hypotheses(case)
    while found.outputs < outputs:
        special = found.outputs // side**2 % 8 == 1
        a = operand(case.a, side, case.k, generator, opposite=False, special=special)
        b = operand(case.b, side, case.k, generator, opposite=True, special=special)
        c = accumulator(a, b, generator, special, case.fp16_accumulator)
        actual = bits(run(case.name, a, b, c))
        failed = False
        for name, row in models.items():
            if found.outputs and not failed and name != "as in the table":
                continue
            wrong = actual != bits(modeled(a, b, c, row))
            found.mismatches[name] = found.mismatches.get(name, 0) + int(wrong.sum())
            found.tried[name] = found.tried.get(name, 0) + side**2
            if name == "as in the table" and bool(wrong.any()):
                failed = True
                found.examples += _examples(a, b, c, actual, wrong, case)[: EXAMPLES - len(found.examples)]
        found.outputs += side**2
    return found


def modeled(a: Tensor, b: Tensor, c: Tensor, row: Instruction) -> Tensor:
    """c + a · bᵀ in c's dtype as a row of the table says; `tensor_core_matmul` for a row that is not in it."""
    x, y = decode(a, row), decode(b, row)
    fp16_accumulator = c.dtype == torch.float16
    how = Summation(
        row, row.promotes_every or x.value.shape[1], row.promotes_every is not None, fp16_accumulator=fp16_accumulator
    )
    return sum_products(x, y, c.float(), how).to(c.dtype)


def bits(x: Tensor) -> Tensor:
    """The codes of FP32 or FP16 numbers."""
    return x.view(torch.int16 if x.dtype == torch.float16 else torch.int32)


def _examples(a: Tensor, b: Tensor, c: Tensor, actual: Tensor, wrong: Tensor, case: Case) -> list[str]:
    expected = bits(modeled(a, b, c, case.row))
    return [
        f"{KINDS[m % len(KINDS)]} × {KINDS[n % len(KINDS)]}: a {_hex(a[m])}, b {_hex(b[n])}, c {_hex(c[m, n])}, "
        f"hardware {_hex(actual[m, n])}, model {_hex(expected[m, n])}"
        for m, n in wrong.nonzero()[:EXAMPLES].tolist()
    ]


def _hex(x: Tensor) -> str:
    """The bytes as they lie in memory."""
    return x.reshape(-1).view(torch.uint8).cpu().numpy().tobytes().hex()
