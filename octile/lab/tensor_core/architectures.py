"""Table of tensor core instructions: how many products each sums in a step, and to how many bits it truncates.

All NVIDIA tensor cores follow one algorithm, which `octile.lab.tensor_core.reference` specifies. A step aligns some
exact products and the accumulator at the largest exponent among them, truncates every term to F fraction bits, adds the
truncated terms exactly, and truncates the sum to the bits of the output. The architectures differ only in the
parameters in this table.

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
    """How one tensor core instruction sums products.

    Attributes:
        name: the instruction's name in PTX.
        formats: the formats of the operands. Where there are two, each operand has either. FP32 stands for TF32.
        terms: the number of products that one step adds to the accumulator.
        fraction_bits: F. Bits of a term below 2^(e_max − F) are truncated.
        truncation: the direction, toward "zero" as published, or "down", toward −∞. DeepSeek-V3 (arXiv 2412.19437
            §3.5.2) describes an arithmetic shift, which would truncate down; a probe of the hardware decides.
        output_bits: fraction bits of the FP32 result, at most 23.
        floor: the minimum of the alignment exponent e_max.
        fp16_floor: the minimum of e_max with an FP16 accumulator; None if the instruction has no FP16 accumulator.
        scaled: whether the instruction takes one UE8M0 scale for each 32 operands along K.
        via_fp16: whether operands are converted to FP16 first and have its exponents. Such an instruction does not
            take K in order: of every four operands the first two go into the first step, the others into the second.
        promotes_every: the number of products after which the instruction itself adds its result to C in FP32, rounded
            to nearest, and starts again from zero; None if C is one of the aligned terms.
        evidence: "published": stated by the sources above. "H200": compared bit for bit with an H200 by
            `octile.lab.probe`; none of 2.55 · 10⁹ outputs differed (benchmarks/results/h200_tensor_core.txt, with FP16
            accumulators h200_tensor_core_40.txt).
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


EVIDENCE = {  # as a phrase for pages and the terminal
    "published": "as published, not checked on hardware",
    "H200": "checked on an H200 with all other sm_90 instructions: none of 2.55 · 10⁹ outputs differed",
}
NAN = 0x7FFFFFFF  # the bits of the only NaN that a tensor core writes; 0x7FFF in FP16

# sm_80 and sm_89 execute an instruction as two steps along K
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
    # Hopper executes mma.sync without an FP8 unit: operands are converted to FP16, two HMMA instructions start from
    # zero, and an FADD adds C. Its results differ from those of wgmma.
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
    """Find the instruction of an architecture for operands of these dtypes.

    Args:
        arch: a key of `ARCHITECTURES`.
        a, b: dtypes of the operands.
        scaled: whether the instruction takes UE8M0 scales.

    Raises:
        ValueError: the architecture is not in the table.
        TypeError: the architecture has no such instruction.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch must be one of {', '.join(ARCHITECTURES)}, not {arch!r}")
    for instruction in ARCHITECTURES[arch]:
        dtypes = [f.dtype for f in instruction.formats]
        if a in dtypes and b in dtypes and instruction.scaled == scaled:
            return instruction
    scales = " with UE8M0 scales" if scaled else ""
    raise TypeError(f"{arch} has no instruction for a of {a} and b of {b}{scales}")
