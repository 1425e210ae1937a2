"""Print the host's time to launch a captured step of `small`, on a CPU, with stand-ins for its CUDA graphs.

    python benchmarks/history/pipeline/launch.py

The graphs, and the copy of the tokens to the GPU, do nothing. Batches lie in buffers that are used again and again, as
pinned memory is. Five steps of 16 micro-batches are launched in a row, as by `tools.measure_pipeline`, while a thread
prepares batches.
"""

import time
from dataclasses import replace
from itertools import cycle
from statistics import median

import torch

from octile.train.compute import Computed
from octile.train.config import preset
from octile.train.step.captured import CapturedStep
from octile.train.trainer import AHEAD, Trainer
from tools.random_run import random_store

MICRO_BATCHES, LAUNCHES, ROUNDS = 16, 5, 44


class Pinned:
    """Buffers that stand in for pinned memory, which torch's allocator uses again."""

    def __init__(self, *shape: int):
        self.buffers = cycle([torch.zeros(shape, dtype=torch.int64) for _ in range(2 * AHEAD + LAUNCHES)])

    def __call__(self, *args: object, pin_memory: bool = False, **settings: object) -> torch.Tensor:
        return next(self.buffers) if pin_memory else empty(*args, **settings)  # type: ignore[call-overload]


class NoGraph:
    def replay(self) -> None:
        pass


class NoTokens:
    def copy_(self, tokens_BS: torch.Tensor, non_blocking: bool) -> None:
        pass


torch.set_num_threads(1)
base = preset("small")
config = replace(base, batch_size=MICRO_BATCHES * base.micro_batch_size, micro_batches=MICRO_BATCHES, val_sequences=2)
store = random_store(config.model.vocab_size, 4 * config.batch_size * config.sequence_length)
trainer = Trainer(config, store, torch.device("cpu"))
computation, model, progress = trainer._computation, trainer.model, trainer.progress
step = CapturedStep(model, computation.compute, computation.update, trainer.device)
tokens_BS = trainer._prepared.batch(0)
parameters = list(model.parameters())
step._graphs, step._tokens = (NoGraph(), NoGraph()), NoTokens()
step._parameters, step._gradients = parameters, [torch.zeros_like(p) for p in parameters]
no_skip = torch.tensor(False)
step._result = Computed(torch.zeros(computation.width), trainer.strategy.no_load(), no_skip, overflowed=False)
constants = progress.mtp_loss_weight(), progress.balance_speed(), progress.batch_size()
step._key = (tokens_BS.shape, *constants, *(getattr(module, "recipe", None) for module in model.modules()))
trainer.captured, trainer._prepared._ahead = step, AHEAD
trainer.strategy.why_eager = lambda: None
empty, torch.empty, trainer.batches._pin = torch.empty, Pinned(*tokens_BS.shape), True

own, wall = [], []
for _ in range(ROUNDS):
    time.sleep(0.03)  # until all batches are prepared
    thread_before, before = time.thread_time(), time.perf_counter()
    for _ in range(LAUNCHES):
        trainer.launch()
    own.append(1e3 * (time.thread_time() - thread_before) / LAUNCHES)
    wall.append(1e3 * (time.perf_counter() - before) / LAUNCHES)
    assert step.is_captured
    list(trainer.collect())
before = time.thread_time()
for number in range(20):
    trainer.batches.batch(number)
batch = 1e3 * (time.thread_time() - before) / 20
trainer.close()
print(
    f"a launch: {median(own[4:]):.2f} ms of the thread's CPU time, {median(wall[4:]):.2f} ms; a batch: {batch:.2f} ms"
)
