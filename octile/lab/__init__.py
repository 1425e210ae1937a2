"""The numerics lab: what 8 bits do to a matrix product, bit for bit.

architectures   what is known of each tensor core, as a table
reference       one step of one in exact arithmetic: the specification
operand         operands as values and exponents
vectorized      whole products in plain torch
native          the same in C++
tensor_core     the three above as one function, and a context that trains a model through it
accumulate      the experiment: how the error of a long sum grows with K
promotion       and whether a model's loss sees it
probe           asks a Hopper GPU whether all of this is true

formats         what each number format can say
telemetry       what the products of a training run see, by operand_stats and product_stats
guards          rules that watch it and act
capture         the operands of real products in a file
what_if         these products in every format, block, scale, promotion and tensor core, by variants
outliers        which tokens and channels are large, and what would be without
hardware        what other hardware would bring them, by hardware_bytes
preflight       which layers of a model would suffer, and preflight_check, whether they do
run             all of these beside `octile train`
"""

from octile.lab.preflight import preflight
from octile.lab.telemetry import telemetry
from octile.lab.tensor_core import tensor_core, tensor_core_matmul, tensor_core_scaled_matmul

__all__ = ["preflight", "telemetry", "tensor_core", "tensor_core_matmul", "tensor_core_scaled_matmul"]
