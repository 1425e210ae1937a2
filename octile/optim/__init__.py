"""Optimizers: AdamW and Muon with low-precision state, clipping, loss scaling, learning rate schedule, moving average.

adamw.py        AdamW and its parameter groups
muon.py         Muon for matrices, with AdamW for other parameters, and its parameter groups
state.py        the state of one parameter in the formats of a recipe
storage.py      a tensor in FP8 or FP16 with one scale
update.py       the arithmetic of a step of AdamW
muon_update.py  the arithmetic of a step of Muon
row_shards.py   whole matrices on some ranks, from rows on all, and back
gradient.py     access to gradients, and clipping
loss_scale.py   dynamic loss scaling
schedule.py     the learning rate and the batch size
ema.py          the moving average of the weights on the CPU
"""

from octile.optim.adamw import AdamW, param_groups
from octile.optim.ema import EMA
from octile.optim.gradient import clip_factor, clip_grad_norm_
from octile.optim.loss_scale import DynamicLossScale
from octile.optim.muon import Muon, muon_groups
from octile.optim.schedule import BatchRamp, WarmupConstantCosine

__all__ = [
    "EMA", "AdamW", "BatchRamp", "DynamicLossScale", "Muon", "WarmupConstantCosine", "clip_factor", "clip_grad_norm_",
    "muon_groups", "param_groups",
]  # fmt: skip
