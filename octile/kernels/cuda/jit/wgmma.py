"""The text of one wgmma instruction as a C++ function: PTX wants every accumulator register named, for each width anew.

Source: PTX ISA 8.5, section 9.7.15, "wgmma.mma_async": m64nNk32 for 8-bit floats, k16 for 16-bit, k8 for TF32.
"""

STEP = {"e4m3": 32, "e5m2": 32, "f16": 16, "bf16": 16, "tf32": 8}  # K of one instruction: 32 bytes


def header(n: int, a: str = "e4m3", b: str = "e4m3", d: str = "f32") -> str:
    """`ptx::wgmma(d, a, b, accumulate)`: d (+)= a[64, k] · b[n, k]ᵀ, tiles in shared memory, both K-major.

    Thread t of the warpgroup holds, of d[64, n] and for each 8 columns j: d[4j + 2h + i] is row
    16·(t/32) + 8h + (t%32)/4, column 8j + 2·(t%4) + i. Sums in FP16 lie there in pairs of i: d[2j + h].

    Args:
        n: columns, a multiple of 8 from 8 to 256.
        a, b: "e4m3" or "e5m2", mixed as you like; or "f16", "bf16", "tf32", the same for both.
        d: "f32", or "f16" for 8-bit floats and "f16".

    Raises:
        ValueError: no such instruction.
    """
    if n not in range(8, 257, 8):
        raise ValueError(f"n must be a multiple of 8 from 8 to 256, not {n}")
    if a not in STEP or b not in STEP or (a != b and STEP[a] + STEP[b] != 64):
        raise ValueError(
            f"a and b must both be 'e4m3' or 'e5m2', or the same of 'f16', 'bf16', 'tf32', not {a!r}, {b!r}"
        )
    if d != "f32" and (d != "f16" or a in ("bf16", "tf32")):
        raise ValueError(f"d must be 'f32', or 'f16' where a is not {a!r}, not {d!r}")
    count, kind, constraint = (n // 2, "float", "f") if d == "f32" else (n // 4, "uint32_t", "r")
    registers = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    transposes = ", 0, 0" if STEP[a] == 16 else ""  # only 16-bit operands may be MN-major
    return f"""\
#pragma once
namespace ptx {{
__device__ __forceinline__ void wgmma({kind} (&d)[{count}], uint64_t a, uint64_t b, bool accumulate) {{
    asm volatile(
        "{{\\n.reg .pred add;\\nsetp.ne.b32 add, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k{STEP[a]}.{d}.{a}.{b} "
        "{{{registers}}}, %{count}, %{count + 1}, add, 1, 1{transposes};\\n}}"
        : {operands}
        : "l"(a), "l"(b), "r"(int(accumulate)));
}}
}}  // namespace ptx
"""
