"""What the compiler must not reorder in the GEMM kernel, read from its machine code."""

import struct

import pytest

from octile.kernels.cuda.gemm.config import GemmConfig, Scales
from octile.kernels.cuda.jit import specialize
from tools.compare_cubins import INSTRUCTION_BYTES, machine_code

ELECT, GLOBAL_LOAD, TMA_LOAD = 0x82F, 0x981, 0x5B4  # opcodes of ELECT, LDG and UTMALDG: the lower 12 bits
FEW_ROWS = GemmConfig(64, 32, stages=12, warpgroups=1, accumulators=2, staged_boxes=1)
SPLIT = GemmConfig(64, 64, stages=12, warpgroups=1, accumulators=2, split_k=2, staged_boxes=1)
TRANSPOSED = GemmConfig(
    64, 16, stages=12, warpgroups=1, accumulators=2, split_k=3, staged_boxes=1,
    a_scales=Scales.PER_BLOCK, b_scales=Scales.PER_ROW, transposed=True,
)  # fmt: skip


@pytest.mark.parametrize("config", [FEW_ROWS, SPLIT, TRANSPOSED], ids=["few rows", "split-K", "split-K, transposed"])
def test_the_producer_requests_scales_before_it_loads_tiles(config: GemmConfig):
    """Requested after them, they come a latency of memory late: the compiler once did so where K is split."""
    code = machine_code(specialize.compile("gemm", config.constants(), headers=config.headers()).image)
    opcodes = [struct.unpack_from("<Q", code, at)[0] & 0xFFF for at in range(0, len(code), INSTRUCTION_BYTES)]
    producer = opcodes[opcodes.index(ELECT) :]
    assert producer.index(GLOBAL_LOAD) < producer.index(TMA_LOAD)
