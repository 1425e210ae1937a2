"""Count the outputs in which a tensor core differs from its model and from alternative hypotheses.

If a hypothesis fits as well as the table, the operands cannot distinguish them. If one fits better, it shows what the
table should be.
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

Run = Callable[[str, Tensor, Tensor, Tensor], Tensor]  # (instruction name, a, b, c) → the hardware's result
ARCHITECTURE = {"wgmma": "sm_90", "mma": "sm_90_mma"}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.float16, torch.bfloat16, torch.float32)
SIDE = 4096  # M and N of a batch
EXAMPLES = 8  # mismatches to report


@dataclass(frozen=True)
class InstructionChain:
    """An instruction, the dtypes of its operands, the length of its chain, and whether its accumulator is FP16."""

    name: str
    a: torch.dtype
    b: torch.dtype
    steps: int
    fp16_accumulator: bool = False

    @property
    def instruction(self) -> Instruction:
        """The model of the instruction."""
        return find_instruction(ARCHITECTURE[self.name], self.a, self.b)

    @property
    def k(self) -> int:
        """The number of products of an output: 32 bytes of an operand for each step of the chain."""
        return 32 * self.steps // self.a.itemsize

    def __str__(self) -> str:
        sums = ", sums in FP16" if self.fp16_accumulator else ""
        return f"{self.name} {self.a} × {self.b}{sums}, {self.steps} in a chain".replace("torch.", "")


@dataclass
class ChainResult:
    """The result of one case.

    Attributes:
        outputs: the number of outputs compared.
        mismatches: hypothesis → mismatches; the table's hypothesis is first. The others are tested on the first batch,
            and on batches in which the table's fails.
        tried: hypothesis → outputs on which it was tested.
        examples: descriptions of some of the table's mismatches.
    """

    outputs: int = 0
    mismatches: dict[str, int] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


def cases() -> Iterable[InstructionChain]:
    """Yield both instructions with all pairs of dtypes, FP32 and FP16 accumulators, and chains of 1 and 4."""
    pairs = [*product(FP8, FP8), *((dtype, dtype) for dtype in OTHERS)]
    for fp16_accumulator, name, (a, b), steps in product((False, True), ARCHITECTURE, pairs, (1, 4)):
        case = InstructionChain(name, a, b, steps, fp16_accumulator)
        if not fp16_accumulator or case.instruction.fp16_floor is not None:
            yield case


def hypotheses(case: InstructionChain) -> dict[str, Instruction]:
    """Return the table's instruction and plausible alternatives, by name."""
    instruction = case.instruction
    fraction_bits = instruction.fraction_bits
    others = {
        "as in the table": instruction,
        "negative terms cut toward −∞": replace(instruction, truncation="down"),
        f"F = {fraction_bits - 1}": replace(instruction, fraction_bits=fraction_bits - 1),
        f"F = {fraction_bits + 1}": replace(instruction, fraction_bits=fraction_bits + 1),
    }
    if case.fp16_accumulator:
        return others
    if instruction.output_bits < 23:
        others["a result of 23 fraction bits"] = replace(instruction, output_bits=23)
        others["F = 25, a result of 23 fraction bits"] = replace(instruction, fraction_bits=25, output_bits=23)
    if instruction.via_fp16:
        others["K in order"] = replace(instruction, via_fp16=False)
        others["C among the aligned terms"] = replace(instruction, promotes_every=None)
    return others


def compare(
    case: InstructionChain, outputs: int, run: Run, device: torch.device, seed: int = 0, side: int = SIDE
) -> ChainResult:
    """Compare at least `outputs` outputs of the hardware with the models, bit for bit.

    The second of every eight batches has NaN and Inf among its operands.
    """
    found = ChainResult()
    generator = torch.Generator(device).manual_seed(seed)
    models = hypotheses(case)
    while found.outputs < outputs:
        special = found.outputs // side**2 % 8 == 1
        a = operand(case.a, side, case.k, generator, opposite=False, special=special)
        b = operand(case.b, side, case.k, generator, opposite=True, special=special)
        c = accumulator(a, b, generator, special, case.fp16_accumulator)
        actual = bits(run(case.name, a, b, c))
        failed = False
        for name, instruction in models.items():
            if found.outputs and not failed and name != "as in the table":
                continue
            wrong = actual != bits(modeled(a, b, c, instruction))
            found.mismatches[name] = found.mismatches.get(name, 0) + int(wrong.sum())
            found.tried[name] = found.tried.get(name, 0) + side**2
            if name == "as in the table" and bool(wrong.any()):
                failed = True
                found.examples += _examples(a, b, c, actual, wrong, case)[: EXAMPLES - len(found.examples)]
        found.outputs += side**2
    return found


def modeled(a: Tensor, b: Tensor, c: Tensor, instruction: Instruction) -> Tensor:
    """Compute c + a · bᵀ in c's dtype with any instruction, in the table or not."""
    x, y = decode(a, instruction), decode(b, instruction)
    fp16_accumulator = c.dtype == torch.float16
    how = Summation(
        instruction,
        instruction.promotes_every or x.value.shape[1],
        instruction.promotes_every is not None,
        fp16_accumulator=fp16_accumulator,
    )
    return sum_products(x, y, c.float(), how).to(c.dtype)


def bits(x: Tensor) -> Tensor:
    """Return the bits of FP32 or FP16 numbers as integers."""
    return x.view(torch.int16 if x.dtype == torch.float16 else torch.int32)


def _examples(a: Tensor, b: Tensor, c: Tensor, actual: Tensor, wrong: Tensor, case: InstructionChain) -> list[str]:
    expected = bits(modeled(a, b, c, case.instruction))
    return [
        f"{KINDS[m % len(KINDS)]} × {KINDS[n % len(KINDS)]}: a {_hex(a[m])}, b {_hex(b[n])}, c {_hex(c[m, n])}, "
        f"hardware {_hex(actual[m, n])}, model {_hex(expected[m, n])}"
        for m, n in wrong.nonzero()[:EXAMPLES].tolist()
    ]


def _hex(x: Tensor) -> str:
    """Return the bytes in memory order as hexadecimal digits."""
    return x.reshape(-1).view(torch.uint8).cpu().numpy().tobytes().hex()
