"""GPUs for which launches are simulated, and marks of tests that need not run for each of them.

Kernels convert FP8 differently on GPUs without FP8; INT8, E5M6 and high precision are the same on all.
"""

from typing import NoReturn

import pytest
import torch

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.triton.device import DeviceProperties


class AnyGpu:
    """A GPU of one SM. A launch that reads what differs between GPUs fails: its test has to run for each of them."""

    num_sms = 1

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"the launch depends on the GPU's {name}: run the test without the mark any_gpu")


GPUS = {
    "sm_80": DeviceProperties(num_sms=1, shared_bytes=163 * 1024, fp8=False, dependent_launch=False),
    "sm_90": DeviceProperties(num_sms=1, shared_bytes=SHARED_BYTES, fp8=True, dependent_launch=True),
    "any": AnyGpu(),
}
EVERY_GPU = ["sm_80", "sm_90"]
any_gpu = pytest.mark.parametrize("gpu", ["any"], indirect=True)
hopper = pytest.mark.parametrize("gpu", ["sm_90"], indirect=True)
every_format = pytest.mark.parametrize(
    ("gpu", "fmt"), [*((gpu, fmt) for gpu in EVERY_GPU for fmt in ("e4m3", "e5m2")), ("any", "int8")], indirect=["gpu"]
)
every_cache = pytest.mark.parametrize(
    ("gpu", "cache_dtype"),
    [("any", torch.float32), ("any", torch.bfloat16), *((gpu, torch.uint8) for gpu in EVERY_GPU)],
    indirect=["gpu"],
)
