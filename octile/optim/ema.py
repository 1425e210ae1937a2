"""A moving average of the weights, on the CPU, beside the training.

    average ← decay · average + (1 − decay) · weights          after each step

It shows early how the model will do once the learning rate has decayed. DeepSeek-V3 (arXiv 2412.19437 §3.2.3) keeps it
in CPU memory and updates it asynchronously, so that it costs the GPU neither memory nor time:

    GPU, main stream    … step n │ forward │ backward │ step n+1 …      step n+1 waits for the copies of step n
    GPU, side stream             │ copies to pinned memory ┐
    CPU, a thread                                          └ average
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """The moving average of a model's trainable parameters, float32 on the CPU. It starts from the weights as they are.

    Buffers, such as the bias of an expert gate, are not averaged: a model that takes the average keeps its own. The
    result does not depend on timing: updates are applied one after the other, on the weights of their call.

    Args:
        model: whose weights `update` reads, on a CPU or one GPU.
        decay: in [0, 1].
        optimizer: whose next step must wait for the copies of weights that lie on a GPU; forward and backward then run
            beside them. Without it `update` lets the stream wait at once: correct, but not hidden.

    Attributes:
        average: the averages by parameter name; call `synchronize` before reading them.

    Raises:
        ValueError: decay lies outside [0, 1].
    """

    def __init__(self, model: nn.Module, decay: float, optimizer: torch.optim.Optimizer | None = None) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be in [0, 1], not {decay}")
        self.decay = decay
        self._model = model
        weights = _trainable(model)
        self.average = {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in weights.items()}
        self._copier = _Copier(weights) if any(p.is_cuda for p in weights.values()) else None
        self._optimizer_waits = optimizer is not None
        if optimizer is not None and self._copier is not None:
            optimizer.register_step_pre_hook(self._copier.hold_stream)

    def update(self) -> None:
        """Averages the model's present weights in; on a GPU it returns before that is done.

        Raises:
            ValueError: the model's parameters are not those that the average began with.
        """
        weights = _trainable(self._model)
        self._check(weights)
        self.synchronize()  # the previous update has read the staging memory
        if self._copier is None:
            self._average_in(weights)
            return
        self._copier.start(weights, self._average_in)
        if not self._optimizer_waits:
            self._copier.hold_stream()

    def synchronize(self) -> None:
        """Waits until all updates are in the average, and raises what went wrong in one."""
        if self._copier is not None:
            self._copier.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, not copies."""
        self.synchronize()
        return dict(self.average)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from averages that `state_dict` gave.

        Raises:
            ValueError: other names or shapes than the model's; nothing was changed then.
        """
        self._check(state)
        self.synchronize()
        for name, average in self.average.items():
            average.copy_(state[name])

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrites the model's weights by the average, rounded to their dtype.

        Raises:
            ValueError: the model's parameters are not those that the average began with.
        """
        weights = _trainable(model)
        self._check(weights)
        self.synchronize()
        for name, param in weights.items():
            param.copy_(self.average[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's weights are the average; after it they are again what they were, bit for bit."""
        own = {name: p.detach().clone() for name, p in _trainable(model).items()}
        self.copy_to(model)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, param in _trainable(model).items():
                    param.copy_(own[name])

    @torch.no_grad()
    def _average_in(self, weights: dict[str, Tensor]) -> None:
        # one call for all: a thread that takes Python's lock for each tensor holds up what queues the next step
        news = [weights[name].float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), news, 1 - self.decay)

    def _check(self, weights: dict[str, Any]) -> None:
        if differing := weights.keys() ^ self.average.keys():
            raise ValueError(f"the average and what was given differ in {sorted(differing)}")
        for name, average in self.average.items():
            if weights[name].shape != average.shape:
                raise ValueError(f"{name} must be {list(average.shape)}, not {list(weights[name].shape)}")


class _Copier:
    """Brings weights from a GPU to pinned memory on a side stream, and hands them to a function in a thread."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.staging = {
            n: torch.empty_like(p, device="cpu", requires_grad=False).pin_memory() for n, p in weights.items()
        }
        self.device = next(p.device for p in weights.values() if p.is_cuda)
        self.stream = torch.cuda.Stream(self.device)
        self.copied = torch.cuda.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octile-ema")
        self.pending: Future[None] | None = None

    @torch.no_grad()
    def start(self, weights: dict[str, Tensor], then: Callable[[dict[str, Tensor]], None]) -> None:
        """Queues the copies behind all work of the current stream; `then(staging)` runs when they have arrived."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            torch._foreach_copy_(list(self.staging.values()), [weights[n] for n in self.staging], non_blocking=True)
            self.copied.record()

        def work() -> None:
            self.copied.synchronize()
            then(self.staging)

        self.pending = self.thread.submit(work)

    def hold_stream(self, *_: Any) -> None:
        """Work queued on the current stream from now on waits until the copies have read the weights."""
        torch.cuda.current_stream(self.device).wait_event(self.copied)

    def finish(self) -> None:
        """Waits for `then`, and raises what it raised."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
