"""Count the operators of a training step on a CPU, without a pipeline and with both stages of a folded one.

    python benchmarks/history/pipeline/count_operators.py

The model has the layers of `small` at smaller widths, the step 16 micro-batches, and `both` 36 actions, as on a GPU.
Operators that launch nothing on a GPU are left out: views, and tensors without values. A GPU may launch several kernels
for one operator. Those whose numbers differ are listed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from octile.parallel import pipeline
from octile.parallel.ranks import Ranks
from octile.train import trainer as trainer_module
from octile.train.config import preset
from octile.train.strategy.make import make_strategy
from octile.train.trainer import Trainer
from tools.measure_pipeline import MICRO_BATCHES, both_stages
from tools.random_run import random_store

NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "lift_fresh", "new_empty", "new_empty_strided", "empty_strided"}
WIDTHS = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}


class Operators(TorchDispatchMode):
    """The operators that are called, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[str(func)] += not (func.is_view or name in NO_KERNEL)
        return func(*args, **(kwargs or {}))


def count(phase: str) -> Counter[str]:
    base = preset("small")
    model = replace(base.model, num_attention_heads=2, **WIDTHS)
    config = replace(
        base, model=model, batch_size=MICRO_BATCHES, micro_batches=MICRO_BATCHES, sequence_length=128, val_sequences=2
    )
    trainer_module.make_strategy = both_stages if phase == "both" else make_strategy
    store = random_store(model.vocab_size, 4 * config.batch_size * config.sequence_length)
    trainer = Trainer(config, store, torch.device("cpu"), ranks=Ranks.alone())
    trainer.step()  # which makes the optimizer's state
    operators, run_interleaved = Operators(), pipeline.run_interleaved

    def run(first: Callable[[], object], second: Callable[[], object]) -> None:
        def run_first() -> None:  # in a thread of its own, which has no modes
            with operators:
                first()

        run_interleaved(run_first, second)

    pipeline.run_interleaved = run
    with operators:
        trainer.step()
    pipeline.run_interleaved = run_interleaved
    trainer.close()
    return operators.counts


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
alone, both = count("alone"), count("both")
print(f"{'all operators':40} alone {alone.total():6,}, both {both.total():6,}")
for name in sorted(alone | both, key=lambda name: (-abs(both[name] - alone[name]), name)):
    if alone[name] != both[name]:
        print(f"{name:40} alone {alone[name]:6,}, both {both[name]:6,}")
dist.destroy_process_group()
