"""Kernels of a run's first step, which are compiled while its data is prepared.

They follow from the configuration: the passes of the run's model on the meta device plan their launches
(`octile.ops.planning`), so whatever the model and the recipe are, the kernels are those of its step. The optimizer's
own kernels, which take half a second, are left to the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

import torch

from octile.kernels.compile_ahead import KernelsAhead
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.num_sms import chip
from octile.kernels.cuda.gemm.request import why_not_on
from octile.kernels.planning import PlannedKernel
from octile.ops.planning import planned_kernels
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.memory.device import available_memory
from octile.train.memory.saved_activations import can_save, saving_activations
from octile.train.model import converted_meta_model, run_recipe
from octile.train.pipeline_layout import held_share
from octile.train.step.progress import batch_ramp


def compile_ahead(config: TrainConfig, device: torch.device, steps_done: int) -> KernelsAhead | None:
    """Begin to compile the kernels of a run's next step in threads; None where there is nothing to compile.

    The first rank of a machine compiles for all of them: they share its disk cache.

    Args:
        config: the configuration of the run.
        device: where it runs.
        steps_done: the steps that lie behind the run.
    """
    if device.type != "cuda" or why_not_on(device) is not None or int(os.environ.get("LOCAL_RANK") or 0):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    gpu = torch.device("cuda", index)

    def plan() -> Iterable[PlannedKernel]:
        recipe = run_recipe(config)
        if can_save(config, available_memory(gpu), held_share(config)):
            recipe = saving_activations(recipe)
        return plan_step(config, recipe, chip(gpu), steps_done)

    return KernelsAhead(plan, gpu)


def plan_step(config: TrainConfig, recipe: Recipe, gpu: Chip, steps_done: int = 0) -> list[PlannedKernel]:
    """Return the kernels of a step's forward and backward pass on a Hopper GPU, each once, in the order of the step.

    Args:
        config: the configuration of the run. With several ranks the kernels are those of a rank that has all layers
            and experts.
        recipe: the recipe of the model.
        gpu: the GPU.
        steps_done: the steps that lie behind the run.
    """
    model = converted_meta_model(config, recipe)
    sequences = batch_ramp(config).size(steps_done) // (config.parallel.dp * config.micro_batches)
    tokens_BS = torch.empty(sequences, config.sequence_length, dtype=torch.int64, device="meta")
    with planned_kernels(gpu, recipe.compute) as kernels, suppress(Exception):
        torch.autograd.backward(model(tokens_BS, tokens_BS))  # the kernels before an error are planned, too
    return list(kernels.values())
