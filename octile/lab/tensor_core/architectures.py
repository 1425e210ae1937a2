"""What each tensor core does with the bits that do not fit: one row an architecture and an instruction.

All NVIDIA tensor cores follow one algorithm (`octile.lab.tensor_core.reference` spells it out): a step aligns some
exact products
and the accumulator at the largest exponent among them, cuts every term to F fraction bits, adds what is left exactly,
and cuts the sum to the output's bits. They differ in the numbers of this table alone.

Sources:
    MMA-Sim: Xie et al., "Bit-Accurate Modeling of GPU Matrix Multiply-Accumulate Units" (arXiv 2511.10909), table 4,
        bit-exact on hardware by its authors' account; `floor` from its reference code, github.com/microsoft/MMA-Sim.
    Khattak and Mikaitis (arXiv 2512.07004) for the floor of the alignment.
    SASS: what ptxas 13.0 makes of `mma.sync.m16n8k32` with FP8 for sm_90, read from its disassembly.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from octile.formats import BF16, E4M3, E5M2, FP16, FP32, FloatFormat

FP8 = (E4M3, E5M2)


@dataclass(frozen=True)
class Instruction:
    """How one tensor core instruction sums.

    Attributes:
        name: what it is called in the GPU's assembly language.
        formats: of its operands; where there are two, each operand may have either. FP32 is read as TF32.
        terms: products that are added to the accumulator in one step.
        fraction_bits: F; a term keeps what lies above 2^(e_max − F).
        cut: toward zero as published, or toward −∞: DeepSeek-V3 (arXiv 2412.19437 §3.5.2) describes a shift that
            fills in the sign, and only hardware can tell.
        output_bits: fraction bits of the FP32 result, 23 or fewer.
        floor: no alignment exponent e_max is below this, even if every term is.
        fp16_floor: the same where the instruction has an FP16 accumulator and result; None where it has none.
        scaled: takes one UE8M0 scale for 32 operands along K.
        pairs: operands become FP16 first, and have its exponents; and K is not taken in order: of every four operands
            the first two go into the first step, the others into the second.
        promotes: the instruction itself starts from zero and adds its result to C in FP32, to nearest, every so many
            products; None where C is one of the aligned terms.
        evidence: "published": by the sources above; "H200": compared with one, bit for bit, by `octile.lab.probe`
            (benchmarks/results/h200_tensor_core.txt, and with sums in FP16 h200_tensor_core_40.txt): none of 3 · 10⁹
            outputs differed.
    """

    name: str
    formats: tuple[FloatFormat, ...]
    terms: int
    fraction_bits: int
    truncation: Literal["zero", "down"] = "zero"
    output_bits: int = FP32.mantissa_bits
    floor: int = -133
    fp16_floor: int | None = None
    scaled: bool = False
    via_fp16: bool = False
    promotes_every: int | None = None
    evidence: str = "published"


EVIDENCE = {  # in words
    "published": "as published, not checked on hardware",
    "H200": "checked on an H200 with all others of sm_90, 3 · 10⁹ outputs, and none differed",
}
NAN = 0x7FFFFFFF  # the one NaN that a tensor core writes; 0x7FFF in FP16

# sm_80 and sm_89 execute an instruction in two halves along K, each a step of its own
_SM_80 = (
    Instruction("mma.sync.m16n8k16", (FP16,), terms=8, fraction_bits=24, floor=-132, fp16_floor=-21),
    Instruction("mma.sync.m16n8k16", (BF16,), terms=8, fraction_bits=24, floor=-132),
    Instruction("mma.sync.m16n8k8", (FP32,), terms=4, fraction_bits=24, floor=-132),
)
ARCHITECTURES: dict[str, tuple[Instruction, ...]] = {
    "sm_80": _SM_80,
    "sm_89": (
        Instruction("mma.sync.m16n8k32", FP8, terms=16, fraction_bits=13, output_bits=13, floor=-132, fp16_floor=-21),
        *_SM_80,
    ),
    "sm_90": (
        Instruction(
            "wgmma.m64nNk32", FP8, terms=32, fraction_bits=13, output_bits=13, fp16_floor=-133, evidence="H200"
        ),
        Instruction("wgmma.m64nNk16", (FP16,), terms=16, fraction_bits=25, fp16_floor=-133, evidence="H200"),
        Instruction("wgmma.m64nNk16", (BF16,), terms=16, fraction_bits=25, evidence="H200"),
        Instruction("wgmma.m64nNk8", (FP32,), terms=8, fraction_bits=25, evidence="H200"),
    ),
    # Hopper's mma.sync has no FP8 unit: operands become FP16, two HMMA start from zero, an FADD adds C. What it gives
    # says nothing about wgmma.
    "sm_90_mma": (
        Instruction(
            "mma.sync.m16n8k32", FP8, terms=16, fraction_bits=25, via_fp16=True, promotes_every=32, evidence="H200"
        ),
        Instruction("mma.sync.m16n8k16", (FP16,), terms=16, fraction_bits=25, fp16_floor=-22, evidence="H200"),
        Instruction("mma.sync.m16n8k16", (BF16,), terms=16, fraction_bits=25, evidence="H200"),
        Instruction("mma.sync.m16n8k8", (FP32,), terms=8, fraction_bits=25, evidence="H200"),
    ),
    "sm_100": (
        Instruction("tcgen05.mma.kind::f8f6f4", FP8, terms=32, fraction_bits=25, fp16_floor=-133),
        Instruction("tcgen05.mma.kind::mxf8f6f4", FP8, terms=32, fraction_bits=25, scaled=True),
        Instruction("tcgen05.mma.kind::f16", (FP16,), terms=16, fraction_bits=25, fp16_floor=-133),
        Instruction("tcgen05.mma.kind::f16", (BF16,), terms=16, fraction_bits=25),
        Instruction("tcgen05.mma.kind::tf32", (FP32,), terms=8, fraction_bits=25),
    ),
}


def find_instruction(arch: str, a: torch.dtype, b: torch.dtype, scaled: bool = False) -> Instruction:
    """The instruction of an architecture that multiplies operands of these dtypes, UE8M0 scales with them or not.

    Raises:
        ValueError: the architecture is not in the table.
        TypeError: it has no such instruction.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    for row in ARCHITECTURES[arch]:
        dtypes = [f.dtype for f in row.formats]
        if a in dtypes and b in dtypes and row.scaled == scaled:
            return row
    scales = " with UE8M0 scales" if scaled else ""
    raise TypeError(f"{arch} has no instruction for a of {a} and b of {b}{scales}")
