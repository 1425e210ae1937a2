"""Numerics lab: measures what FP8 does to the GEMMs of a model, with a bit-exact model of the tensor core.

The tensor core:

    tensor_core/    bit-exact model of NVIDIA tensor cores; a context runs a whole model on it
    probe/          comparison of the model with a Hopper GPU
    accumulate      the error of a long sum by its length
    promotion       the effect of promotion on a model's loss

During training:

    telemetry       statistics of quantization and accumulation for every GEMM (operand_stats, gemm_stats)
    guards          rules that act on telemetry
    capture         the operands of real GEMMs in a file
    run             telemetry, guards and captures together with `octile train`

Questions about a model or a capture:

    formats         properties of number formats; real_tensors collects activations and gradients for them
    what_if         GEMMs of a capture in other formats, blocks, scales and accumulators (variants)
    outliers        large values in a layer's input, and the effect of removing them
    hardware        error and traffic with other hardware
    preflight       layers of a model that would lose too much in 8 bits; preflight_check compares with a real step

`octile lab` has a command for most of these: `pages/` has a file for each, and `octile.lab_options` the table.
"""

from octile.lab.preflight import preflight
from octile.lab.preflight_check import observe_step
from octile.lab.telemetry import telemetry
from octile.lab.tensor_core import tensor_core, tensor_core_matmul, tensor_core_scaled_matmul

__all__ = ["observe_step", "preflight", "telemetry", "tensor_core", "tensor_core_matmul", "tensor_core_scaled_matmul"]
