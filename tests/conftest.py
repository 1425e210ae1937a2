"""One thread and a fixed hypothesis profile: every run of the suite computes the same thing.

Without a GPU Triton's kernels run in its interpreter, which has to be chosen before Triton is imported by anyone.
"""

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
settings.register_profile(
    "octile", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("octile")
