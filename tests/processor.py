"""What tests ask of the processor that they run on."""

import pytest

from octile.kernels import cpu

needs_bf16 = pytest.mark.skipif(not cpu.can_multiply(), reason="the processor does not multiply BF16")
