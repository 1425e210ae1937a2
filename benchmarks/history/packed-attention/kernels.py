"""Times attention within packed texts: octile's kernels, torch's FlashAttention-2, cuDNN's for texts of one length.

python kernels.py [MORE …]

MORE are flash-attn-4, where it is installed, and `prompts`: attention of a server's prompts, forward only.

ms forward and backward, the median of eight rounds with a cold L2 cache, and the errors of o, dq, dk and dv relative
to the norm of FlashAttention-2's. That needs equally many channels in keys and values, so zeros are appended, and gets
the length of a sequence as that of the longest text, as training gave it.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.bench.kernel_time import host_seconds, work_seconds
from octile.kernels import flash_attn_4
from octile.kernels.triton import packed_attention as triton_packed
from octile.kernels.triton import ragged_attention as triton_kernel
from octile.ops.attention import attention, attention_backward, ragged_attention

HEADS_AND_CHANNELS = (16, 192, 128), (8, 64, 64), (32, 128, 128), (128, 192, 128)
aten = torch.ops.aten


def draw_lengths(total: int, texts: int) -> list[int]:
    cuts = torch.randperm(total - 1)[: texts - 1].sort().values + 1
    return torch.diff(torch.cat([torch.tensor([0]), cuts, torch.tensor([total])])).tolist()


def cases() -> dict[str, tuple[list[int], int]]:
    """The lengths of texts, and the sequence length."""
    return {
        "4 x 4096": ([4096] * 4, 4096),
        "41 texts": (draw_lengths(16384, 41), 16384),
        "64 x 256": ([256] * 64, 256),
        "1 x 16384": ([16384], 16384),
        "480 of 32 x 1024": (draw_lengths(32768, 480), 1024),
        "60 of 4 x 4096, 196 empty": (draw_lengths(16384, 60) + [0] * 196, 4096),
    }


class FlashAttention2:
    """torch's kernels of FlashAttention-2 for texts of various lengths."""

    def __init__(self, starts: Tensor, longest: int, scale: float):
        self.texts, self.scale = (starts, starts, longest, longest), scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, lse, *_ = aten._flash_attention_forward(*padded(q, k, v), *self.texts, 0.0, True, False, scale=self.scale)
        return o[..., : v.shape[-1]].contiguous(), lse

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> list[Tensor]:
        do, q_padded, k_padded, v_padded, o = padded(do, q, k, v, o)
        unused = torch.empty((), dtype=torch.int64, device=q.device)
        found = aten._flash_attention_backward(
            do, q_padded, k_padded, v_padded, o, lse, *self.texts, 0.0, True, unused, unused, scale=self.scale
        )
        return [d[..., : t.shape[-1]].contiguous() for d, t in zip(found, (q, k, v), strict=True)]


class Packed(NamedTuple):
    """Kernels that are called with the starts of the texts and the scale."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, ...]]

    @classmethod
    def of(cls, module: ModuleType, starts: Tensor, scale: float) -> Self:
        return cls(*(partial(f, cu_seqlens=starts, scale=scale) for f in (module.forward, module.backward)))


class Whole:
    """Attention of sequences without borders; torch chooses cuDNN's kernels on Hopper."""

    def __init__(self, length: int, scale: float):
        self.length, self.scale = length, scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return attention(*self._sequences(q, k, v), self.scale)

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        return attention_backward(*self._sequences(do, q, k, v), o, lse, self.scale)

    def _sequences(self, *tensors: Tensor) -> list[Tensor]:
        return [t.unflatten(0, (-1, self.length)) for t in tensors]


def padded(*tensors: Tensor) -> list[Tensor]:
    width = max(t.shape[-1] for t in tensors)
    return [F.pad(t, (0, width - t.shape[-1])) for t in tensors]


def error(found: Tensor, expected: Tensor) -> float:
    difference = found.flatten().float() - expected.flatten().float()
    return float(difference.norm() / expected.float().norm())


def measure(name: str, heads: int, x: int, values: int, lengths: list[int], longest: int) -> None:
    q, k, v, do = (
        torch.randn(sum(lengths), heads, width, device="cuda", dtype=torch.bfloat16) for width in (x, x, values, values)
    )
    starts = F.pad(torch.tensor(lengths, device="cuda").cumsum(0), (1, 0)).int()
    kernels = {
        "FlashAttention-2": FlashAttention2(starts, longest, x**-0.5),
        "octile": Packed.of(triton_packed, starts, x**-0.5),
    }
    if "flash-attn-4" in sys.argv:
        kernels["flash-attn-4"] = Packed.of(flash_attn_4, starts, x**-0.5)
    if len({*lengths}) == 1:
        kernels["whole (cuDNN)"] = Whole(lengths[0], x**-0.5)
    results = {each: kernel.forward(q, k, v) for each, kernel in kernels.items()}
    gradients = {each: kernel.backward(do, q, k, v, *results[each]) for each, kernel in kernels.items()}
    works = {}
    for each, kernel in kernels.items():
        works[each, "forward"] = lambda kernel=kernel: kernel.forward(q, k, v)
        works[each, "backward"] = lambda kernel=kernel, found=results[each]: kernel.backward(do, q, k, v, *found)
    seconds = work_seconds(works, rounds=8)
    expected = results["FlashAttention-2"][0], *gradients["FlashAttention-2"]
    for each in kernels:
        times = " · ".join(f"{1e3 * seconds[each, direction]:8.3f}" for direction in ("forward", "backward"))
        pairs = zip((results[each][0], *gradients[each]), expected, strict=True)
        errors = " ".join(f"{error(*pair):.4f}" for pair in pairs)
        print(f"{heads:4} {x}/{values:<4}{name:27}{each:22}{times} ms   {errors}", flush=True)


def prompt_cases() -> dict[str, list[tuple[int, int]]]:
    """The rows and the keys of each prompt that a step of 8,192 tokens reads."""
    return {
        "8 x 1024": [(1024, 1024)] * 8,
        "2 x 4096": [(4096, 4096)] * 2,
        "1 x 8192": [(8192, 8192)],
        "8 x 1000": [(1000, 1000)] * 8,
        "2 of 4000": [(4000, 4000)] * 2,
        "3700, 2300, 1400, 700, 92": [(n, n) for n in (3700, 2300, 1400, 700, 92)],
        "32 of 256": [(256, 256)] * 32,
        "8192 rows after 24576": [(8192, 32768)],
        "2048 rows after 30720": [(2048, 32768)],
        "1024 rows after 3072": [(1024, 4096)],
        "512 rows alone": [(512, 512)],
    }


def measure_prompts(heads: int, x: int, values: int, name: str, texts: list[tuple[int, int]]) -> None:
    rows, keys = (torch.tensor(n, device="cuda") for n in zip(*texts, strict=True))
    starts, key_starts = (F.pad(n.cumsum(0), (1, 0)).int() for n in (rows, keys))
    longest = int(rows.max()), int(keys.max())
    q = torch.randn(int(rows.sum()), heads, x, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(int(keys.sum()), heads, width, device="cuda", dtype=torch.bfloat16) for width in (x, values))
    out = q.new_empty(len(q), heads, values)
    ragged = starts, key_starts, *longest, x**-0.5

    def triton() -> Tensor:
        triton_kernel.launch(out, q, k, v, starts, key_starts, x**-0.5)
        return out

    def library() -> Tensor:
        flash_attn_4.forward_prompts(out, q, k, v, starts, key_starts, x**-0.5)
        return out

    works = {"Triton": triton, "octile": lambda: (ragged_attention(out, q, k, v, *ragged), out)[1]}
    if "flash-attn-4" in sys.argv:
        works["flash-attn-4"] = library
    expected = triton().clone()
    errors = {each: error(work(), expected) for each, work in works.items()}
    seconds, host = work_seconds(works, rounds=8), {each: host_seconds(work) for each, work in works.items()}
    for each in works:
        times = f"{1e3 * seconds[each]:8.3f} ms, host {1e6 * host[each]:5.0f} µs"
        print(f"prompts {heads:4} {x}/{values:<4}{name:27}{each:27}{times}   {errors[each]:.4f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    if "prompts" in sys.argv:
        for sizes in (16, 192, 128), (128, 192, 128), (64, 128, 128):
            for name, texts in prompt_cases().items():
                measure_prompts(*sizes, name, texts)
    for sizes in HEADS_AND_CHANNELS:
        for name, texts in cases().items():
            measure(name, *sizes, *texts)
