"""Layers with autograd: what a model is built of."""

from octile.nn.attention import MLA
from octile.nn.convert import convert
from octile.nn.delayed import end_step
from octile.nn.functional import grouped_linear, linear
from octile.nn.gate import Gate
from octile.nn.linear import Linear
from octile.nn.mlp import MLP
from octile.nn.moe import Experts, MoE
from octile.nn.norm import RMSNorm

__all__ = [
    "MLA",
    "MLP",
    "Experts",
    "Gate",
    "Linear",
    "MoE",
    "RMSNorm",
    "convert",
    "end_step",
    "grouped_linear",
    "linear",
]
