"""Random weights of a published shape, for engines and for folders."""

import torch
from torch import Tensor

from octile.checkpoint.fp8_layout import is_stored_in_fp8
from octile.formats import BLOCK, E4M3
from octile.models.config import ModelConfig
from octile.models.meta import checkpoint_shapes
from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import Weight
from octile.serve.weights.head_share import HeadShare
from octile.serve.weights.weights import ALL_HEADS, ServedWeights, assemble

DEVIATION = 0.024
DEVIATION_OF_OTHERS = 0.02  # of embeddings, heads and gates


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw a tensor of a published checkpoint on the generator's device: zeros for a bias, ones for a norm."""
    device = generator.device
    if name.endswith("bias"):
        return torch.zeros(shape, device=device)
    if len(shape) == 1:
        return torch.ones(shape, device=device, dtype=torch.bfloat16)
    deviation = DEVIATION if is_stored_in_fp8(name, shape) else DEVIATION_OF_OTHERS
    return torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16) * deviation


def random_weights(
    config: ModelConfig, device: torch.device, fp8: bool = True, heads: HeadShare = ALL_HEADS
) -> ServedWeights:
    """Make weights as a published FP8 checkpoint has them, with random values, without a copy in high precision.

    Args:
        config: configuration of the model.
        device: device of the weights.
        fp8: whether they stay in FP8; otherwise the same values are converted to BF16.
        heads: which heads of attention to make.
    """
    shapes = checkpoint_shapes(config)
    generator = torch.Generator(device).manual_seed(0)

    def read(name: str) -> Weight:
        shape = shapes[name]
        values = random_tensor(name, shape, generator)
        if not is_stored_in_fp8(name, shape):
            return values
        scale = torch.full([-(-n // side) for n, side in zip(shape, BLOCK, strict=True)], 2.0**-12, device=device)
        values = (values * 2.0**12).clamp_(-E4M3.max, E4M3.max)  # torch casts larger ones to NaN
        weight = ScaledTensor(values.to(torch.float8_e4m3fn), scale, BLOCK)
        return heads.take(name, weight if fp8 else weight.dequantize(torch.bfloat16))

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return assemble(config, dtype, True, read, heads=heads)
