"""torchtitan's trainer on CPUs, over gloo, with a small DeepSeek-V3 on the bytes of a file.

torchtitan asks for a GPU in a few places, which `on_cpu` replaces: names of the device, its memory, a histogram of
integers, a Triton kernel that has a reference in torch, and gradients that NCCL divides as it sums them.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

MODULES = ("torchtitan.train", "torchtitan.models.deepseek_v3", "torchtitan.models.llama4.infra.parallelize")
NAME = "octile_test"  # of the model among torchtitan's
SEQUENCE = 32
HISTC = torch.histc


@contextmanager
def on_cpu() -> Iterator[None]:
    """Have torchtitan run on a CPU."""
    import torchtitan.train as train
    from torchtitan.components import metrics
    from torchtitan.distributed import utils
    from torchtitan.models.llama4.infra import parallelize
    from torchtitan.models.moe import utils as moe

    permutation = partial(moe.generate_permute_indices, use_cpu=True)
    stats = partial(metrics.DeviceMemStats, *[0] * 6)
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=stats, reset_peak_stats=Mock())
    divide = parallelize.disable_fsdp_gradient_division
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("torchtitan."):
                for attribute, value in (("device_type", "cpu"), ("device_module", torch.cpu)):
                    if attribute in vars(module):
                        patches.enter_context(patch.object(module, attribute, value))
        for owner, attribute, value in (
            (torch, "histc", count_integers),
            (moe, "generate_permute_indices", permutation),
            (metrics, "build_device_memory_monitor", lambda: monitor),
            (parallelize, "disable_fsdp_gradient_division", lambda model: (divide(model), sum_gradients(model))),
            (utils, "set_pg_timeouts", Mock()),  # which asks for the number of the GPU
            (train, "time", SimpleNamespace(perf_counter=train.time.perf_counter, sleep=Mock())),
        ):
            patches.enter_context(patch.object(owner, attribute, value))
        yield
    gc.enable()  # torchtitan collects garbage itself


def count_integers(x: Tensor, **bins: int) -> Tensor:
    """`torch.histc`, which CPUs have for floating-point numbers only."""
    return HISTC(x.float(), **bins).to(x.dtype)


def sum_gradients(model: nn.Module) -> None:
    """Have FSDP2 sum gradients: gloo knows no sum with a factor."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class Loader:
    """Batches of bytes, of which each rank gets its own."""

    def __init__(self, dp_rank: int, job_config: Any, **_: Any):
        self.rank, self.batch, self.step = dp_rank, job_config.training.local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
        while True:
            generator = torch.Generator().manual_seed(100 * self.rank + self.step)
            starts = torch.randint(len(text) - SEQUENCE, (self.batch, 1), generator=generator)
            tokens = text[starts + torch.arange(SEQUENCE + 1)]
            self.step += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def train(folder: Path, *arguments: str) -> list[float]:
    """Train a few steps by torchtitan's own command line; return this rank's losses.

    The model has a dense layer and one with eight experts. Ranks must be in a process group.
    """
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec
    from torchtitan.train import Trainer

    losses = []

    class Recorded(Trainer):
        def forward_backward_step(self, **batch: Any) -> Tensor:
            loss = super().forward_backward_step(**batch)
            losses.append(loss.item() * dist.get_world_size())
            return loss

    spec = train_spec.get_train_spec("deepseek_v3")
    small = replace(spec.model_args["debugmodel"], vocab_size=256, n_layers=2, n_heads=4, kv_lora_rank=128)
    parts = {"model_args": {NAME: small}, "build_tokenizer_fn": None, "build_dataloader_fn": Loader}
    train_spec._extra_train_specs[NAME] = replace(spec, **parts)
    settings = {
        "job.dump_folder": folder,
        "model.name": NAME,
        "model.flavor": NAME,
        "training.seq_len": SEQUENCE,
        "training.local_batch_size": 2,
        "training.steps": 4,
        "lr_scheduler.warmup_steps": 1,
        "activation_checkpoint.mode": "none",
        "debug.seed": 0,
    }
    own = [
        text for name, value in settings.items() if f"--{name}" not in arguments for text in (f"--{name}", str(value))
    ]
    with on_cpu(), patch.dict("os.environ", LOCAL_RANK="0"):
        trainer = Recorded(ConfigManager().parse_args([*own, *arguments]))
        trainer.train()
        trainer.close()
    return losses


def octile(*arguments: str) -> Sequence[str]:
    """The arguments of a job with octile's converter."""
    module = "octile.integrations.torchtitan"
    return ("--job.custom_config_module", module, "--model.converters", "octile", *arguments)
