"""Live statistics: how many tokens each expert has had in the last steps, by which its copies are placed anew.

The forward passes add to counts on their device, in CUDA graphs, too. Eight times in a window the totals are copied to
the host, which does not wait for them: on a GPU a copy is read when the next one is made.

Shapes: T rows, K chosen experts of each, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PARTS = 8  # of a window


class ExpertLoad:
    """The tokens of each expert, counted over a window of steps that moves.

    Args:
        layers: the numbers of the layers that have experts.
        n_experts: E of each.
        window: how many steps; a multiple of 8.
        device: of the model.

    Attributes:
        in_window: the tokens of each expert of each layer, by the layer's number, in the last `window` steps; up to a
            quarter of the window is newer than these.
    """

    def __init__(self, layers: Sequence[int], n_experts: int, window: int, device: torch.device):
        self._layers, self._every, self._steps = list(layers), window // PARTS, 0
        self._total = torch.zeros(len(self._layers), n_experts, dtype=torch.int64, device=device)
        self._of_layer = dict(zip(self._layers, self._total, strict=True))
        self._totals = deque([torch.zeros_like(self._total, device="cpu")], maxlen=PARTS + 1)
        self._copied: tuple[Tensor, torch.cuda.Event] | None = None
        self.in_window: Mapping[int, tuple[int, ...]] = {}
        self._read(self._totals[0])

    def count(self, layer: int, experts_TK: Tensor, slots_T: Tensor) -> None:
        """Count the chosen experts, int64, of a layer's rows, but for those that are written to no slot: padding."""
        is_row = (slots_T >= 0).to(torch.int64)[:, None].expand(experts_TK.shape)
        self._of_layer[layer].scatter_add_(0, experts_TK.flatten(), is_row.flatten())

    def end_step(self) -> None:
        """Move the window by a step."""
        self._steps += 1
        if self._steps % self._every:
            return
        if self._total.device.type == "cpu":
            self._read(self._total.clone())
            return
        if self._copied is not None:
            total, event = self._copied
            event.synchronize()  # of an eighth of a window ago
            self._read(total)
        total = torch.empty_like(self._total, device="cpu", pin_memory=True)
        total.copy_(self._total, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._total.device))  # of the model's GPU
        self._copied = total, event

    def _read(self, total: Tensor) -> None:
        self._totals.append(total)
        rows = (total - self._totals[0]).tolist()
        self.in_window = {layer: tuple(row) for layer, row in zip(self._layers, rows, strict=True)}
