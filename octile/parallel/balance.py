"""The biases of expert gates on many ranks, moved by the loads of all of them, so that they stay the same."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octile.nn.moe import MoE


@torch.no_grad()
def balance_gates(model: nn.Module, speed: float | Tensor, ranks: dist.ProcessGroup | None = None) -> None:
    """Move the bias of each gate as `octile.nn.Gate.balance` does, by the tokens of all ranks: call it after each step.

    DDP and FSDP2 sum gradients, but a bias has none: moved by a rank's own tokens, it would drift apart from that of
    the other ranks. All ranks must call this. The host does not wait for the device. Without `torch.distributed` the
    loads are this process's.

    Args:
        model: its `octile.nn.MoE` layers have run a forward pass in training mode; the loads are those of the last one.
        speed: γ, how far a bias moves; a number, or a tensor [] on the biases' device.
        ranks: those that train the model; None: all.

    Raises:
        ValueError: the model has no mixture.

    Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, which sums the load over the whole batch.
    """
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    if not mixtures:
        raise ValueError("model has no octile.nn.MoE")
    loads = [moe.last_load_E for moe in mixtures]
    if dist.is_available() and dist.is_initialized():
        # one message; a load that counts several ranks already leads to a multiple, with the same signs of differences
        total = torch.cat(loads)
        dist.all_reduce(total, group=ranks)
        loads = list(total.split([len(load_E) for load_E in loads]))
    for moe, load_E in zip(mixtures, loads, strict=True):
        moe.gate.balance(load_E, speed)
