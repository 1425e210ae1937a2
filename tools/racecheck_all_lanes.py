"""The variant of the GEMM kernel that racecheck of compute-sanitizer can follow: every lane arrives for itself.

In the kernel the lanes of a warp synchronize (__syncwarp), and one of them arrives at the mbarrier for all: a consumer
warp that releases a stage, and the producer warp, whose lanes have written 128×128 scales. racecheck does not follow
this: it reports the lanes that read or wrote a scale, and the thread that accesses it next. In the variant every lane
arrives. Where racecheck reports nothing of it, the __syncwarp is all that it misses, if nothing else differs:

    -p tools.racecheck_all_lanes            pytest plugin, by which GPU tests run the variant (tools/sanitize.sh)
    python -m tools.racecheck_all_lanes     compares the machine code of both, for every kind of kernel; needs no GPU

The variant must take no more registers and spill nothing more. Accesses of shared memory, TMA copies and MMAs must be
the same in the same order; other memory accesses, waits, barriers and floating-point instructions the same in number.
What may differ are arrivals, NOPs (the __syncwarp), and the integer and branch instructions around them. The exit code
is 1 where more differs.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from octile.kernels.cuda.gemm.config import GemmConfig, Schedule
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.compiler import Cubin

CHANGES = {  # by file; each text must be found once
    "ptx.cuh": {
        """    // Arrives, and adds `bytes` to the bytes""": """    // Without a branch, which would change other code.
    __device__ __forceinline__ void arrive_unless(bool predicate) {
        asm volatile(
            "{\\n.reg .pred arrives;\\n"
            "setp.eq.u32 arrives, %1, 0;\\n"
            "@arrives mbarrier.arrive.shared::cta.b64 _, [%0];\\n}" ::"r"(shared_address(this)),
            "r"(static_cast<uint32_t>(predicate))
            : "memory");
    }

    // Arrives, and adds `bytes` to the bytes""",
    },
    "pipeline.cuh": {
        """        __syncwarp();
        if constexpr (cluster_size == 1) {
            if (ptx::lane_id() == 0) empty[which].arrive();
        } else {
            if (ptx::lane_id() <= rank) empty[which].arrive_cluster(ptx::lane_id() == 0 ? rank : 0);
        }
""": """        if constexpr (cluster_size == 1) {
            empty[which].arrive();
        } else {
            empty[which].arrive_cluster(rank);
            if (rank > 0) empty[which].arrive_cluster(0);
        }
""",
        "pipeline.empty[stage].init(4 * warpgroups_per_tile": "pipeline.empty[stage].init(32 * 4 * warpgroups_per_tile",
        "pipeline.full[stage].init(1)": "pipeline.full[stage].init(has_block_scales ? 32 : 1)",
    },
    "producer.cuh": {
        """            for (; k_block < ahead; ++k_block, pipeline.advance())
                if (elected) pipeline.producer_commit();
""": """            for (; k_block < ahead; ++k_block, pipeline.advance()) {
                if (elected) pipeline.producer_commit();
                pipeline.full[pipeline.stage].arrive_unless(elected);
            }
""",
        """                    pipeline.producer_commit();
                }
""": """                    pipeline.producer_commit();
                }
                pipeline.full[pipeline.stage].arrive_unless(elected);
""",
        "if (config::passes_tiles && ptx::lane_id() == 0) pipeline": "if (config::passes_tiles) pipeline",
    },
}
# Mnemonics of SASS, by their beginning. Constants are read by LDC or ULDC, as the compiler likes.
ORDERED = re.compile(r"LDS|ST[SM]|ATOMS|UTMA|UBLKCP|.?GMMA")
COUNTED = re.compile(
    r"LD(?!C)|ST|ATOM|RED|[FH]?(ADD|MUL|FMA)|F2F|SYNCS\.PHASECHK|BAR|UCGABAR|FENCE|MEMBAR|WARPGROUP|USETMAXREG|DEPBAR"
)

find = specialize._find


def pytest_configure() -> None:
    specialize._find = changed


def changed(name: str, headers: Mapping[str, str]) -> tuple[str, str]:
    """Return what `specialize._find` returns, with the changes of the variant."""
    shown, text = find(name, headers)
    for before, after in CHANGES.get(name, {}).items():
        if text.count(before) != 1:
            raise ValueError(f"{name} must contain this once, not {text.count(before)} times:\n{before}")
        text = text.replace(before, after)
    return shown, text


def instructions(config: GemmConfig) -> tuple[Cubin, list[str]]:
    """Compile a kernel, and return the mnemonics of its instructions in their order."""
    from triton import knobs

    cubin = specialize.compile("gemm", config.constants(), "sm_90a", config.headers())
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin.image)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return cubin, re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text)


def difference(kernel: tuple[Cubin, list[str]], variant: tuple[Cubin, list[str]]) -> str:
    """Say what differs between a kernel and its variant that must not; empty: nothing."""
    (cubin, ours), (other_cubin, others) = kernel, variant
    found = []
    for name in ("registers", "spill_bytes", "stack_bytes"):
        if (before := getattr(cubin, name)) < (after := getattr(other_cubin, name)):
            found.append(f"{name} {before} → {after}")
    if ordered(ours) != ordered(others):
        found.append("accesses of shared memory, TMA copies or MMAs, or their order")
    counts, other_counts = (Counter(filter(COUNTED.match, code)) for code in (ours, others))
    if counts != other_counts:
        found.append(f"{dict(counts - other_counts)} → {dict(other_counts - counts)}")
    return "; ".join(found)


def ordered(code: list[str]) -> list[str]:
    """Return the accesses of shared memory, TMA copies and MMAs among instructions."""
    return [mnemonic for mnemonic in code if ORDERED.match(mnemonic)]


def main() -> int:
    from tests.gpu.cuda.test_gemm import KERNELS, OF_GROUPS

    kernels = KERNELS | {f"{name}, groups": replace(c, schedule=Schedule.GROUPED) for name, c in OF_GROUPS.items()}
    compiled = []
    for specialize._find in (find, changed):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compiled.append(list(pool.map(instructions, kernels.values())))
    differing = 0
    print(f"{'kernel':45}{'ordered':>9}{'arrivals':>11}{'instructions':>15}   difference")
    for name, kernel, variant in zip(kernels, *compiled, strict=True):
        reason = difference(kernel, variant)
        differing += bool(reason)
        arrivals, everything = (
            " → ".join(str(sum(word in mnemonic for mnemonic in code)) for _, code in (kernel, variant))
            for word in ("SYNCS.ARRIVE", "")
        )
        print(f"{name:45}{len(ordered(kernel[1])):9}{arrivals:>11}{everything:>15}   {reason or 'none'}")
    print(f"{len(kernels)} kernels: {differing} differ in more than arrivals and the integer instructions around them")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
