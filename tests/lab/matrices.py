"""Matrices for tests of the tensor core model, and its specification applied to whole GEMMs."""

import torch
from torch import Tensor

from octile.formats import FP16
from octile.lab.tensor_core import reference, tensor_core_scaled_matmul
from octile.lab.tensor_core.architectures import Instruction
from octile.lab.tensor_core.operand import FORMATS, decode
from octile.scaled import ScaledTensor


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int, finite: bool = False) -> Tensor:
    """Every bit pattern of the dtype with the same probability: subnormals, both ends of the range, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    x = codes.view(dtype).squeeze(-1)
    return torch.where(x.float().isfinite(), x.float(), 1.5).to(dtype) if finite else x


def normal(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(40).to(dtype)


def specified(a: Tensor, b: Tensor, c: Tensor, row: Instruction, fp16_accumulator: bool = False) -> Tensor:
    """`reference.step` chained along K for every output [M, N]."""
    formats = (FP16, FP16) if row.via_fp16 else (FORMATS[a.dtype], FORMATS[b.dtype])
    a_value, b_value = decode(a, row).value, decode(b, row).value
    out = c.float().clone()
    for m in range(len(a)):
        for n in range(len(b)):
            for k in range(0, a_value.shape[1], row.terms):
                terms = slice(k, k + row.terms)
                x = a_value[m, terms].tolist(), b_value[n, terms].tolist(), out[m, n].item()
                out[m, n] = reference.step(*x, *formats, row, fp16_accumulator)
    return out


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Whether the bits are equal; any NaN equals any other."""
    nan = actual.isnan() & expected.isnan()
    return bool((nan | (actual.view(torch.int32) == expected.view(torch.int32))).all())


def gemms_of_a_layer(operands: dict[str, ScaledTensor], promote_every: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """fprop, dgrad and wgrad by the model on the CPU, from what `observe_quantization` saw of a linear layer."""
    on_cpu = {name: q.cpu() for name, q in operands.items()}
    x, w, dy = on_cpu["x"], on_cpu["w"], on_cpu["dy"]
    of_wgrad = on_cpu.get("wgrad_dy", dy).mT, on_cpu.get("wgrad_x", x).mT
    pairs = (x, w), (dy, w.mT), of_wgrad
    return tuple(
        tensor_core_scaled_matmul(a.data, a.scale, a.block, b.data, b.scale, b.block, promote_every=promote_every)
        for a, b in pairs
    )
