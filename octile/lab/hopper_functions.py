"""Operators of exact mode with a Hopper GPU's own exponential, reciprocals, orders of sums and tensor core.

A GPU approximates 2ˣ, 1 / x and 1 / √x by instructions of which nobody has published the bits. A table that was
recorded on one has how far each significand's result is from the correctly rounded one. With it, and with the order in
which Triton's reductions sum, norms, SwiGLU, the gate, the softmax of attention and cross-entropy are as there:

    sums      of a thread's elements one after the other, then over lanes and warps, farthest partner first (shfl.bfly)
    exp       2ˣ of the argument times log2(e), rounded
    a / b     a times the approximate 1 / b, where Triton emits div.full
    log       that of CUDA's library: a polynomial of fused multiply-adds

The layouts are those of Triton 3.6 for rows that fit into one warp, as the sizes of `tiny` and `small` do; other calls
are left to `octile.lab.hopper_sums`. Shapes: T rows, K columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import TILE
from octile.lab import hopper_sums
from octile.ops.cross_entropy import IGNORED, cross_entropy
from octile.ops.gate import gate, top_experts
from octile.ops.norm import normalized, rms_norm, rms_norm_quantize
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from octile.ops.quantize import quantize
from octile.ops.swiglu import swiglu_quantize_and_save
from octile.routing import EPS

SIGNIFICANDS = 1 << 23
FILES = ("exp2_-2_-1", "rsqrt_1_4", "rcp_1_2")  # arrays of a file of tables
LOG2E = torch.tensor(1.4426950408889634, dtype=torch.float32)
LANES = 32
COLUMNS, COLUMNS_PER_WARP, VECTOR = 4096, 1024, 4  # of cross-entropy's programs, and FP32 logits of a load
LOG_POLYNOMIAL = (0xBE055027, 0x3E1039F6, 0xBDF8CDCC, 0x3E0F2955, 0xBE2AD8B9, 0x3E4CED0B, 0xBE7FFF22, 0x3EAAAA78)


class HopperFunctions:
    """Approximate functions of a GPU, from tables, and the operators that are made of them.

    Args:
        tables: by the names in `FILES`, what to add to the bits of the correctly rounded result for each significand.
        rope: cosines and sines of positions, as that GPU computes them; None: they are this machine's.
    """

    def __init__(self, tables: Mapping[str, Tensor], rope: tuple[Tensor, Tensor] | None = None):
        self._tables, self._rope = {name: tables[name].to(torch.int32) for name in FILES}, rope

    @classmethod
    def load(cls, path: Path) -> HopperFunctions:
        """Read a file of tables, an .npz.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it lacks a table.
        """
        import numpy as np

        with np.load(path, allow_pickle=False) as found:
            if missing := [name for name in FILES if name not in found]:
                raise ValueError(f"functions {path} has no table {', '.join(missing)}")
            names = [name for name in found.files if name.startswith("rope_")]
            arrays = {name: torch.from_numpy(found[name]) for name in (*FILES, *names)}
        angles = [next(arrays[name] for name in names if what in name) for what in ("cos", "sin")] if names else None
        return cls(arrays, None if angles is None else (angles[0], angles[1]))

    def exp2(self, x: Tensor) -> Tensor:
        """Return 2ˣ as `ex2.approx` does; subnormal results are 0.

        The instruction truncates |x| to 23 fraction bits and negates the number by inverting its bits: an x above 0 has
        the result of 2⁻²³ more than its truncated value. An H100 has shown this; the manual of PTX does not say it.
        """
        steps = (x.abs().clamp(max=300).double() * SIGNIFICANDS).floor().long()
        steps = torch.where(x > 0, -steps - 1, steps)  # of 2⁻²³, of −x
        index = steps % SIGNIFICANDS
        base = _step(torch.exp2(-1 - index.double() / SIGNIFICANDS).float(), self._tables[FILES[0]][index])
        result = (base.double() * torch.exp2(1 - (steps // SIGNIFICANDS).double())).float()
        return torch.where(result < torch.finfo(torch.float32).tiny, 0.0, result)

    def exp(self, x: Tensor) -> Tensor:
        """Return eˣ as Triton computes it."""
        return self.exp2(x * LOG2E)

    def expf(self, x: Tensor) -> Tensor:
        """Return eˣ as CUDA's library computes it: 2ᶠ, f from −0.5 to 0.5, times a power of two."""
        share = fma(x, _float(0x3BBB989D), torch.tensor(0.5)).clamp(0, 1)
        shifted = (share.double() * 252 + 12582913).floor().float()  # rounded down
        f = fma(x, _float(0x3FB8AA3B), 12583039 - shifted)
        f = fma(x, _float(0x32A57060), f)
        power = (shifted.view(torch.int32) << 23).view(torch.float32)
        return self.exp2(f) * power

    def rsqrt(self, x: Tensor) -> Tensor:
        """Return 1 / √x as `rsqrt.approx` does, of positive normal numbers."""
        bits = x.view(torch.int32)
        is_odd = ((bits >> 23) & 1) == 0  # a biased exponent of 127 is 2⁰
        index = (bits & (SIGNIFICANDS - 1)) + is_odd * SIGNIFICANDS
        return _step(x.double().rsqrt().float(), self._tables["rsqrt_1_4"][index.long()])

    def reciprocal(self, x: Tensor) -> Tensor:
        """Return 1 / x as `rcp.approx` does, of normal numbers; 0 of Inf."""
        index = x.view(torch.int32) & (SIGNIFICANDS - 1)
        exact = x.double().reciprocal().float()
        return torch.where(x.isinf(), exact, _step(exact, self._tables["rcp_1_2"][index.long()]))

    def divide(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a / b as `div.full` does."""
        return a * self.reciprocal(b)

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Compute an operator as the GPU does where this module, or `hopper_sums`, models it; a `Compute`."""
        if func is rms_norm.overload and args[0].shape[1] <= 8 * LANES:
            return self._norm(args[0], args[1], args[2])
        has_values = len(args) > 5 and args[5]  # of which Hopper's own kernel normalizes wider rows
        if func is rms_norm_quantize.overload and args[0].shape[1] <= (8 if has_values else 16) * LANES:
            return self._norm_and_quantize(*args)
        if func is swiglu_quantize_and_save.overload:
            return self._swiglu(*args)
        if func is gate.overload and hopper_sums.is_row_invariant_gate(args) and args[7] == "sigmoid":
            return self._gate(*args[:10])
        if func is cross_entropy.overload and args[0].dtype == torch.float32:
            return self._cross_entropy(*args)
        if func in (paged_attention.overload, paged_attention_with_lse.overload) and hopper_sums.is_modeled(args):
            softmax = hopper_sums.Softmax(self.exp2, _sum_of_scores, self.divide)
            q, cache, pages, lengths, latent_dim, scale = args[:6]
            results = hopper_sums.attend(q, cache, pages, lengths, latent_dim, scale, softmax)
            return results if func is paged_attention_with_lse.overload else results[0]
        if self._rope is not None and str(func) in ("aten.cos.default", "aten.sin.default"):
            return self._angle(func, args[0])
        return hopper_sums.compute(func, args, kwargs)

    def _angle(self, func: Any, angles_SR: Tensor) -> Tensor:
        assert self._rope is not None
        table = self._rope["sin" in str(func)]
        fits = angles_SR.dim() == 2 and angles_SR.shape[1] == table.shape[1] and len(angles_SR) <= len(table)
        return table[: len(angles_SR)].clone() if fits else func(angles_SR)

    def _rstd(self, x_TK: Tensor, eps: float, per_thread: int) -> Tensor:
        k = x_TK.shape[1]
        squares = x_TK.float().square()
        squares = F.pad(squares, (0, -k % TILE[1]))
        squares = F.pad(squares, (0, (1 << (squares.shape[1] - 1).bit_length()) - squares.shape[1]))
        total = fold(chain(squares.unflatten(1, (-1, per_thread))))
        mean = self.divide(total, torch.full_like(total, k))
        return self.rsqrt(mean + torch.tensor(eps, dtype=torch.float32))

    def _norm(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rstd = self._rstd(x, eps, 8)
        return normalized(x, rstd, weight).to(x.dtype).contiguous(), rstd

    def _norm_and_quantize(
        self, x: Tensor, weight: Tensor, eps: float, fmt: str, power_of_2: bool, values: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rstd = self._rstd(x, eps, 16)
        y = normalized(x, rstd, weight)
        returned = y.to(x.dtype).contiguous() if values else x.new_empty(0, x.shape[1])
        return *quantize(y, *TILE, fmt, power_of_2), rstd, returned

    def _swiglu(
        self, gate: Tensor, up: Tensor, fmt: str, power_of_2: bool, saved_fmt: str, saved_power_of_2: bool,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        g = gate.float()
        h = g * self.reciprocal(1 + self.exp(-g)) * up.float()
        h = h if weight is None else h * weight[:, None]
        saved = quantize(torch.stack((gate, up)), *TILE, saved_fmt, saved_power_of_2)
        return *quantize(h, *TILE, fmt, power_of_2), *saved

    def _gate(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int,
        scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        logits = hopper_sums.gate_logits(x, weight)
        affinity = (1 + self.expf(-logits)).reciprocal()  # of a CUDA kernel, where lane k has the k-th expert
        experts = top_experts(affinity if bias is None else affinity + bias, n_chosen, n_group, topk_group, best)
        weights = affinity.gather(1, experts)
        if norm_topk_prob:
            padded = F.pad(weights, (0, (1 << (n_chosen - 1).bit_length()) - n_chosen))
            weights = weights / (fold(padded)[:, None] + EPS)
        return weights * routed_scaling_factor, experts, logits

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        m, v = logits.shape
        columns = min(max(1 << (v - 1).bit_length(), 128), COLUMNS)
        warps = max(columns // COLUMNS_PER_WARP, 1)
        padded = F.pad(logits, (0, -v % columns), value=float("-inf"))
        largest = torch.full((m,), float("-inf"))
        sums = torch.zeros(m, columns // VECTOR)
        for block in padded.split(columns, dim=1):
            before, largest = largest, torch.maximum(largest, block.amax(1))
            vectors = self.exp(block - largest[:, None]).unflatten(1, (-1, VECTOR))
            sums = sums * self.exp(before - largest)[:, None] + chain(vectors)
        threads = min(warps * LANES, columns // VECTOR)
        by_thread = chain(sums.unflatten(1, (-1, threads)).mT)
        by_warp = fold(by_thread.unflatten(1, (-1, min(LANES, threads))))
        lse = largest + log(fold(by_warp))
        losses = lse - logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        return torch.where(labels == IGNORED, 0.0, losses), lse


def chain(values: Tensor) -> Tensor:
    """Sum the last dimension one value after the other."""
    total = values[..., 0]
    for i in range(1, values.shape[-1]):
        total = total + values[..., i]
    return total


def fold(values: Tensor) -> Tensor:
    """Sum the last dimension, a power of two, as lanes do that add the value of the farthest partner first."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _sum_of_scores(values_RK: Tensor) -> Tensor:
    """Sum rows of 64 columns in the layout of wgmma's accumulator: a lane has two of each eight columns."""
    by_lane_R4E = values_RK.unflatten(1, (-1, 4, 2)).transpose(1, 2).flatten(2)
    return fold(chain(by_lane_R4E))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive normal numbers as CUDA's library computes it."""
    bits = x.view(torch.int32)
    exponent = (bits - 0x3F2AAAAB) & -0x800000
    f = (bits - exponent).view(torch.float32) - 1
    steps = fma(exponent.float(), torch.tensor(2.0**-23), torch.tensor(0.0))
    first, *others = map(_float, LOG_POLYNOMIAL)
    r = first.expand_as(f)
    for coefficient in (*others, torch.tensor(-0.5)):
        r = fma(r, f, coefficient)
    return fma(steps, _float(0x3F317218), fma(f * r, f, f))


def _float(bits: int) -> Tensor:
    """Return the FP32 number of these bits."""
    return torch.tensor(bits - (bits >> 31 << 32), dtype=torch.int32).view(torch.float32)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a · b + c, rounded once but for the rare sums that FP64 rounds to a tie."""
    return (a.double() * b.double() + c.double()).float()


def _step(values: Tensor, steps: Tensor) -> Tensor:
    """Move positive numbers by so many neighbors."""
    return (values.view(torch.int32) + steps.to(torch.int32)).view(torch.float32)
