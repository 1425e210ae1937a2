"""From gradients to weights: AdamW in few bytes, clipping, loss scaling, the schedule, the moving average."""

from octile.optim.adamw import AdamW
from octile.optim.clip import clip_grad_norm_
from octile.optim.ema import EMA
from octile.optim.groups import param_groups
from octile.optim.loss_scale import DynamicLossScale
from octile.optim.schedule import WarmupConstantCosine

__all__ = ["EMA", "AdamW", "DynamicLossScale", "WarmupConstantCosine", "clip_grad_norm_", "param_groups"]
