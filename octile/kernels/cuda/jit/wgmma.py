"""Generator of the CUDA header with the wgmma instruction of one width, since PTX names every accumulator register.

Source: PTX ISA 8.5, section 9.7.15, "wgmma.mma_async": m64nNk32 for 8-bit floats, k16 for 16-bit, k8 for TF32.
"""

INSTRUCTION_K = {"e4m3": 32, "e5m2": 32, "f16": 16, "bf16": 16, "tf32": 8}  # elements in 32 bytes


def header(
    n: int,
    a: str = "e4m3",
    b: str = "e4m3",
    d: str = "f32",
    *,
    name: str = "wgmma",
    a_in_registers: bool = False,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> str:
    """Generate `ptx::NAME(d, a, b, accumulate)`: d = a · bᵀ, or d += a · bᵀ, of a[64, k] and b[n, k] in shared memory.

    Both tiles are K-major. Thread t of the warpgroup holds the accumulators d[4j + 2h + i] of row
    16·(t/32) + 8h + (t%32)/4 and column 8j + 2·(t%4) + i, for j up to n/8 and h and i of 0 and 1. FP16 accumulators are
    packed in pairs of i: d[2j + h].

    Args:
        n: columns, a multiple of 8 from 8 to 256.
        a, b: formats, "e4m3" or "e5m2" in any combination; or both "f16", both "bf16" or both "tf32".
        d: accumulator format, "f32"; or "f16", where a is an 8-bit format or "f16".
        name: name of the function.
        a_in_registers: a is four registers, `const uint32_t (&a)[4]`, as accumulators of 16 columns lie, packed in
            pairs of i: a[2j + h]. They may change only once the instruction has been waited for.
        a_transposed, b_transposed: the tile is stored as its transpose, [k, 64] or [k, n], so K is not its contiguous
            dimension; 16-bit formats only.

    Raises:
        ValueError: there is no such instruction.
    """
    if n not in range(8, 257, 8):
        raise ValueError(f"n must be a multiple of 8 from 8 to 256, not {n}")
    if a not in INSTRUCTION_K or b not in INSTRUCTION_K or (a != b and INSTRUCTION_K[a] + INSTRUCTION_K[b] != 64):
        raise ValueError(
            f"a and b must both be 'e4m3' or 'e5m2', or the same of 'f16', 'bf16', 'tf32', not {a!r}, {b!r}"
        )
    if d != "f32" and (d != "f16" or a in ("bf16", "tf32")):
        raise ValueError(f"d must be 'f32', or 'f16' where a is not {a!r}, not {d!r}")
    has_transposes = INSTRUCTION_K[a] == 16  # only 16-bit operands may be MN-major
    if (a_transposed or b_transposed) and not has_transposes:
        raise ValueError(f"only tiles of 'f16' or 'bf16' may be transposed, not of {a!r}, {b!r}")
    if a_in_registers and a_transposed:
        raise ValueError("a must be in shared memory to be transposed")
    count, kind, constraint = (n // 2, "float", "f") if d == "f32" else (n // 4, "uint32_t", "r")
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    parts = 4 if a_in_registers else 1
    left = ", ".join(f"%{count + i}" for i in range(parts))
    argument = "const uint32_t (&a)[4]" if a_in_registers else "uint64_t a"
    left, inputs = (f"{{{left}}}", '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])') if a_in_registers else (left, '"l"(a)')
    transposes = [f"{a_transposed:d}"] * (not a_in_registers) + [f"{b_transposed:d}"] if has_transposes else []
    modifiers = ", ".join(["1", "1", *transposes])
    return f"""\
#pragma once
namespace ptx {{
__device__ __forceinline__ void {name}(
    {kind} (&d)[{count}], {argument}, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + parts + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k{INSTRUCTION_K[a]}.{d}.{a}.{b} "
        "{{{registers}}}, {left}, %{count + parts}, add, {modifiers};\\n}}"
        : {operands}
        : {inputs}, "l"(b), "r"(int(accumulate)));
}}
}}  // namespace ptx
"""
