"""A training step as two CUDA graphs: forward and backward pass, and the update.

Launching the thousands of kernels of a step one by one takes the host longer than the GPU needs to run them. A graph
launches them all at once. The host reads nothing between the two graphs: the first one decides on the device whether
the second one changes anything. They are two because copies of the weights to a moving average may overlap with the
first and must end before the second.

A graph repeats the kernels of the step that was captured, with the same addresses. It is captured again when the shape
of the batch, a layer's recipe or a number that the step takes from the host changes. What a step must run eagerly is
listed in `why_eager`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from octile.kernels.cuda.gemm.launch_cache import one_workspace_in_capture
from octile.nn.fused.quantize import quantize_requested
from octile.nn.linear import recipe_changes
from octile.nn.observer import has_observers
from octile.nn.weight_cache import WeightRequest, quantized_once_in_capture, recorded_requests
from octile.ops.accumulator import is_replaced
from octile.recipe import Recipe

WARM_UP_STEPS = 3  # eager steps before a capture: they compile kernels and create the optimizer's state


def why_eager(device: torch.device, recipe: Recipe, deterministic: bool, waits_for_rows: bool = False) -> str | None:
    """Return why a training step cannot be captured, or None.

    Args:
        device: the device of the step.
        recipe: the recipe of the model.
        deterministic: whether the kernels are deterministic.
        waits_for_rows: whether the host waits for the numbers of rows that go to the experts of each rank.
    """
    if device.type != "cuda":
        return "CUDA graphs need a GPU"
    if deterministic:
        return "deterministic kernels wait for the host"
    if recipe.loss_scale:
        return "the host changes the loss scale"
    if recipe.formats is None and recipe.compute == torch.float32:
        return "torch's grouped GEMM in FP32 waits for the host"
    if recipe.optimizer.gradient != "float32":
        return "hooks move FP8 gradients while autograd runs"
    if waits_for_rows:
        return "the host reads how many rows go to the experts of each rank (not on symmetric memory)"
    if has_observers() or is_replaced():
        return "an observer reads this step"
    return None


class CapturedStep:
    """The two graphs of a model's training step, which are captured after WARM_UP_STEPS eager steps.

    Args:
        model: the model; its parameters hold the gradients after `compute`.
        compute: compute(tokens) runs the forward and backward pass and returns tensors on the device.
        update: update(learning_rate, result of compute) updates the weights; learning_rate is float64 [] on the device.
        device: a GPU.
        gathers_weights: whether `compute` overwrites weights with those of other ranks. Each is then quantized at its
            first use; otherwise all are quantized together at the begin of a captured step.
    """

    def __init__(
        self,
        model: nn.Module,
        compute: Callable[[Tensor], Any],
        update: Callable[[Tensor, Any], None],
        device: torch.device,
        gathers_weights: bool = False,
    ):
        self.model = model
        self._compute, self._update = compute, update
        self._gathers_weights = gathers_weights
        self._learning_rate = torch.zeros((), dtype=torch.float64, device=device)
        self._key: Sequence[object] = ()
        self._recipes: Sequence[object] = ()
        self._recipe_changes = -1  # when they were read
        self._eager_steps = 0
        self._requests: Sequence[WeightRequest] = ()  # of the last eager step
        self._tokens = torch.empty(0)
        self._result: Any = None
        self._parameters: list[nn.Parameter] = []
        self._gradients: list[Tensor | None] = []
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the last step was a replay."""
        return self._graphs is not None

    def compute(self, tokens_BS: Tensor, constants: Sequence[float] = ()) -> Any:
        """Run the forward and backward pass of a batch, int64 [B, S] on the host or the device.

        Args:
            tokens_BS: the batch.
            constants: the numbers on the host that `compute` and `update` use; a capture contains them.
        """
        if self._recipe_changes != recipe_changes():  # no walk through all modules in each step
            self._recipe_changes = recipe_changes()
            self._recipes = [getattr(module, "recipe", None) for module in self.model.modules()]
        key = (tokens_BS.shape, *constants, *self._recipes)
        if key != self._key:
            self.release()
            self._key = key
        if self._graphs is None and self._eager_steps < WARM_UP_STEPS:
            self._eager_steps += 1
            with recorded_requests() as requests:
                result = self._compute(tokens_BS)
            self._requests = () if self._gathers_weights else requests
            return result
        if self._graphs is None:
            self._capture(tokens_BS)
        assert self._graphs is not None
        self._tokens.copy_(tokens_BS, non_blocking=True)
        self._graphs[0].replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._result

    def update(self, learning_rate: float, result: Any) -> None:
        """Update the weights with the gradients and the result of `compute`."""
        self._learning_rate.fill_(learning_rate)
        if self._graphs is None:
            self._update(self._learning_rate, result)
            return
        self._graphs[1].replay()
        increment_version(self._parameters)  # a replay writes them unnoticed; cached weights are stale

    def release(self) -> None:
        """Free the memory of the graphs, and with it the gradients; later steps capture them again."""
        if self._graphs is not None:
            torch.cuda.synchronize(self._learning_rate.device)  # a replay may be running
            for parameter in self._parameters:
                parameter.grad = None
        self._key, self._eager_steps, self._requests = (), 0, ()
        self._graphs, self._result, self._parameters, self._gradients = None, None, [], []

    def _capture(self, tokens_BS: Tensor) -> None:
        """Capture both graphs. Nothing runs meanwhile, so the weights stay as they are."""
        for parameter in self.model.parameters():
            parameter.grad = None
        with quantized_once_in_capture():
            quantize_requested(self._requests)  # loads its kernels, which cannot be captured
        gc.collect()
        torch.cuda.empty_cache()  # the graphs' memory is their own
        device = self._learning_rate.device
        self._tokens = torch.empty(tokens_BS.shape, dtype=tokens_BS.dtype, device=device)
        graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # other threads may use CUDA meanwhile: one prepares batches in pinned memory, one averages weights
        one_thread: Any = {"stream": _stream(device), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graphs[0], **one_thread), quantized_once_in_capture(), one_workspace_in_capture():
            quantize_requested(self._requests)
            self._result = self._compute(self._tokens)
        self._parameters = list(self.model.parameters())
        self._gradients = [parameter.grad for parameter in self._parameters]
        with torch.cuda.graph(graphs[1], pool=graphs[0].pool(), **one_thread):
            self._update(self._learning_rate, self._result)
        self._graphs = graphs


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps 64 MiB of workspaces for each stream that it ever used."""
    return torch.cuda.Stream(device)
