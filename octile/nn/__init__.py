"""Modules that a model is built of, trained in FP8; `functional` has the linear layers as functions."""

from octile.nn import functional
from octile.nn.conversion import convert
from octile.nn.delayed_scaling import end_step
from octile.nn.fused.pre_norm import pre_norm
from octile.nn.gate import Gate
from octile.nn.linear import Linear
from octile.nn.mha import MHA
from octile.nn.mla import MLA
from octile.nn.mlp import MLP
from octile.nn.moe import Experts, MoE
from octile.nn.norm import RMSNorm
from octile.nn.weight_cache import frozen_weights

__all__ = [
    "MHA",
    "MLA",
    "MLP",
    "Experts",
    "Gate",
    "Linear",
    "MoE",
    "RMSNorm",
    "convert",
    "end_step",
    "frozen_weights",
    "functional",
    "pre_norm",
]
