"""The speed of exact mode relative to the default on one GPU: training steps, prompts and requests that decode.

    python -m tools.measure_exact

Steps are those of `octile train` with random tokens, prompts and requests those of `octile bench serve` with random
weights of DeepSeek-V2-Lite's shape. Both modes run in the same process, one after the other. Below each figure are the
kernels that took longest in one step, where there is a GPU.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch

from octile.bench.rows import Row
from octile.bench.serve.engine import (
    V2_LITE,
    Shape,
    decoded_step,
    new_tokens,
    prefill_rows,
    profile_rows,
)
from octile.bench.serve.random_weights import random_weights
from octile.serve.runner.model_runner import ModelRunner
from octile.train.config import TrainConfig, preset
from octile.train.trainer import Trainer
from tools.random_run import random_store

WARM_UP, STEPS = 3, 5
TRAINED = {"medium": (2048, 64, 4), "small": (2048, 16, 1)}  # positions, texts of a step, micro-batches
BATCHES = (1, 32, 256)


def serve(shape: Shape, device: torch.device) -> list[str]:
    """Tokens/s of each batch of `shape` and of its prompts in both modes, and exact mode's share of the default."""
    weights = random_weights(shape.config, device)
    pages = max(shape.batches) * (1 + -(-(shape.prompt + new_tokens(shape)) // ModelRunner.page_size))
    lines: list[str] = []
    speeds: dict[str, list[float]] = {}
    for name, exact in (("default", False), ("exact", True)):
        begin = time.perf_counter()
        runner = ModelRunner(
            weights,
            pages,
            max_batch=max(shape.batches),
            max_step_tokens=shape.prefill * shape.prompt,
            batch_invariant=exact,
        )
        lines += [f"{shape.name}, {name}: CUDA graphs after {time.perf_counter() - begin:.1f} s"]
        for batch in shape.batches:
            step, _, kernels = decoded_step(runner, shape, batch)
            case = f"{shape.name}, {batch} requests"
            speeds.setdefault(case, []).append(batch / step.seconds)
            lines += [f"{case}, {name}: {speeds[case][-1]:,.0f} tokens/s", *profile(kernels)]
        throughput, *rows = prefill_rows(runner, shape)
        speeds.setdefault(throughput.case, []).append(throughput.value)
        lines += [f"{throughput.case}, {name}: {throughput.value:,.0f} tokens/s", *profile(rows)]
        del runner
        gc.collect()
    return lines + [
        f"{case}: exact has {exact / default:.3f} of the default" for case, (default, exact) in speeds.items()
    ]


def train(name: str, config: TrainConfig, device: torch.device) -> list[str]:
    """Seconds of a step of `config` under both recipes, and exact mode's as a multiple of the default's."""
    lines, times = [], {}
    store = random_store(config.model.vocab_size, 16 * config.batch_size * config.sequence_length)
    for recipe in ("deepseek_v3", "exact"):
        trainer = Trainer(replace(config, recipe=recipe), store, device)
        for _ in range(WARM_UP):
            trainer.step()
        times[recipe] = median(step_seconds(trainer, device) for _ in range(STEPS))
        lines += [f"{name}, {recipe}: {1e3 * times[recipe]:,.1f} ms a step"]
        lines += profile(profile_rows(name, trainer.step, device))
        trainer.close()
        del trainer
        gc.collect()
    return [*lines, f"{name}: exact takes {times['exact'] / times['deepseek_v3']:.3f} times as long"]


def profile(rows: Sequence[Row]) -> list[str]:
    return [f"    {row.what}: {row.value:.6g} {row.unit}" for row in rows]


def step_seconds(trainer: Trainer, device: torch.device) -> float:
    begin = time.perf_counter()
    trainer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def say(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def main() -> None:
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    for name, (length, batch, micro_batches) in TRAINED.items():
        config = replace(preset(name), device="cuda", sequence_length=length, batch_size=batch, val_sequences=4)
        say(train(name, replace(config, micro_batches=micro_batches), device))
    say(serve(replace(V2_LITE, batches=BATCHES), device))


if __name__ == "__main__":
    main()
