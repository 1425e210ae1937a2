"""A moving average of the weights on the CPU, updated asynchronously during training.

    average ← decay · average + (1 − decay) · weights          after each step

It estimates early how good the model will be after the learning rate has decayed. DeepSeek-V3 (arXiv 2412.19437 §3.2.3)
stores it in CPU memory and updates it asynchronously, so that it takes neither memory nor time of the GPU:

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
    """The moving average of a model's trainable parameters, float32 on the CPU. It begins with the current weights.

    Buffers, such as the bias of an expert gate, are not averaged. The result does not depend on timing: updates are
    applied one after the other, each to the weights at its call.

    Args:
        model: the model whose weights `update` reads, on a CPU or one GPU.
        decay: in [0, 1].
        optimizer: its next step waits for the copies of weights on a GPU, so that the copies overlap with forward and
            backward. Without it the stream waits in `update`, which is correct but not overlapped.

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

    def update(self, skip: Tensor | None = None) -> None:
        """Add the model's current weights to the average; on a GPU it returns before that is done.

        Args:
            skip: bool [] on the weights' device: if true, the average does not change.

        Raises:
            ValueError: the model's parameters are not those of the average.
        """
        weights = _trainable(self._model)
        self._check(weights)
        self.synchronize()  # the previous update must have read the staging buffers
        if self._copier is None:
            if skip is None or not skip:
                self._average_in(weights)
            return
        self._copier.start(weights, self._average_in, skip)
        if not self._optimizer_waits:
            self._copier.hold_stream()

    def wait_for_copies(self) -> None:
        """Let later work of the current stream wait until the last update has read the weights on a GPU.

        The optimizer's step does this. Only the replay of a CUDA graph that contains the step needs this call before.
        """
        if self._copier is not None:
            self._copier.hold_stream()

    def synchronize(self) -> None:
        """Wait until all updates are applied, and raise the exception of an update that failed."""
        if self._copier is not None:
            self._copier.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """The averages themselves, not copies."""
        self.synchronize()
        return dict(self.average)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the averages that `state_dict` returned.

        Raises:
            ValueError: names or shapes are not those of the average; nothing is changed then.
        """
        self._check(state)
        self.synchronize()
        for name, average in self.average.items():
            average.copy_(state[name])

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrite the model's weights with the average, rounded to their dtype.

        Raises:
            ValueError: the model's parameters are not those of the average.
        """
        weights = _trainable(model)
        self._check(weights)
        self.synchronize()
        for name, param in weights.items():
            param.copy_(self.average[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Replace the model's weights by the average inside the context, and restore them bit for bit after it."""
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
        # one call for all tensors: taking Python's lock for each of them would delay the thread that launches kernels
        news = [weights[name].float() for name in self.average]
        torch._foreach_lerp_(list(self.average.values()), news, 1 - self.decay)

    def _check(self, weights: dict[str, Any]) -> None:
        if differing := weights.keys() ^ self.average.keys():
            raise ValueError(f"the parameters of the average and the given ones differ in {sorted(differing)}")
        for name, average in self.average.items():
            if weights[name].shape != average.shape:
                raise ValueError(f"{name} must be {list(average.shape)}, not {list(weights[name].shape)}")


class _Copier:
    """Copies weights from a GPU to pinned memory on a side stream, and calls a function with them in a thread."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.staging = {
            n: torch.empty_like(p, device="cpu", requires_grad=False).pin_memory() for n, p in weights.items()
        }
        self.device = next(p.device for p in weights.values() if p.is_cuda)
        self.skip = torch.zeros((), dtype=torch.bool).pin_memory()
        self.stream = torch.cuda.Stream(self.device)
        self.copied = torch.cuda.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octile-ema")
        self.pending: Future[None] | None = None

    @torch.no_grad()
    def start(self, weights: dict[str, Tensor], then: Callable[[dict[str, Tensor]], None], skip: Tensor | None) -> None:
        """Launch the copies after all work of the current stream.

        `then(staging)` is called when they are complete, unless skip is true.
        """
        if skip is None:
            self.skip.fill_(False)
        else:  # on the current stream, whose later work may overwrite it
            self.skip.copy_(skip, non_blocking=True)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            torch._foreach_copy_(list(self.staging.values()), [weights[n] for n in self.staging], non_blocking=True)
            self.copied.record()

        def work() -> None:
            self.copied.synchronize()
            if not self.skip:
                then(self.staging)

        self.pending = self.thread.submit(work)

    def hold_stream(self, *_: Any) -> None:
        """Make later work of the current stream wait until the copies have read the weights.

        A graph that is being captured cannot wait for them: `EMA.wait_for_copies` is called before its replay.
        """
        if torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.current_stream(self.device).wait_event(self.copied)

    def finish(self) -> None:
        """Wait for `then`, and raise its exception if it failed."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
