"""Time kernels in training steps, and alone, with the GPU's clock and power.

    CUDA_VISIBLE_DEVICES=0 python -m tools.measure_step_kernels medium FOLDER SECONDS
    CUDA_VISIBLE_DEVICES=1 python -m tools.measure_step_kernels v3_layers FOLDER SECONDS

The first is the preset `medium`, the second 2 layers of DeepSeek-V3 with 16 experts and 4 micro-batches of 4096 tokens,
both captured as in `octile train`. FOLDER/STEP.json.gz has the time of a step in a row of steps and the kernels of the
last one of three. Then, as long as SECONDS last, GEMMs and attention at the sizes of DeepSeek-V3's layers run: each
after a pause, as `octile bench` measures them, and repeated for half a second without one (FOLDER/alone_STEP.json).

With all of them is the mean clock of the SMs in MHz and the mean power in W, which nvidia-smi reads every 20 ms.
"""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import mean, median

import torch

from octile.bench.gemm_case import prepare_case
from octile.bench.shapes import Case
from octile.bench.timing import seconds
from octile.ops.attention import attention, attention_backward
from octile.parallel.ranks import Ranks
from octile.plan.published import V3_LAYERS
from octile.scaled import quantize
from octile.train.config import TrainConfig, preset
from octile.train.trainer import Trainer
from tools.exposed_communication import events_of
from tools.measure_ranks import launch_and_collect
from tools.random_run import random_store, weights_drawn_on

FIELDS = "timestamp,clocks.sm,power.draw,clocks_throttle_reasons.sw_power_cap"
REPEATED, WARM_UP, ROUNDS = 0.5, 4, 3  # seconds, steps, rows of two steps
CASES = [
    Case("dense", 4096, 2112, 7168),
    Case("dense", 4096, 24576, 1536),
    Case("dense", 4096, 32768, 512),
    Case("dense", 4096, 7168, 16384),
    Case("dense", 4096, 4096, 7168),
    Case("grouped", 2048, 4096, 7168, groups=16),
    Case("grouped", 2048, 7168, 2048, groups=16),
    Case("grouped", 8192, 4096, 7168, groups=4),
    Case("grouped", 8192, 7168, 2048, groups=4),
    Case("dense", 24576, 1536, 4096, tiles=True, accumulate=True),
    Case("dense", 7168, 16384, 4096, tiles=True, accumulate=True),
    Case("wgrad", 4096, 7168, 8192, groups=4, accumulate=True),
    Case("wgrad", 7168, 2048, 8192, groups=4, accumulate=True),
    Case("wgrad", 4096, 7168, 2048, groups=16, accumulate=True),
]


class Sensors:
    """The clock and the power of the GPU, as nvidia-smi prints them in a process of its own."""

    def __init__(self, path: Path):
        self.path = path
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        command = ["nvidia-smi", "-i", gpu, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        self.process = subprocess.Popen(
            [*command, "-lms", "20"], stdout=path.open("w", encoding="utf-8"), stderr=subprocess.STDOUT
        )

    def between(self, start: float, end: float) -> dict[str, float | str]:
        """The means of the samples within a time, which is in seconds of `time.time`."""
        found = []
        for line in self.path.read_text("utf-8").splitlines():
            parts = [part.strip() for part in line.split(",")]
            try:
                at = datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
                found += [(float(parts[1]), float(parts[2]), parts[3])] if start <= at <= end else []
            except (ValueError, IndexError):
                continue
        if not found:
            return {"samples": 0}
        limited = mean(reason == "Active" for _, _, reason in found)
        return {
            "samples": len(found),
            "MHz": round(mean(clock for clock, _, _ in found)),
            "W": round(mean(power for _, power, _ in found)),
            "limited": round(limited, 2),
        }


def repeated(call: Callable[[], object], sensors: Sensors) -> dict[str, object]:
    """The mean time of a call in the second half of a row without pauses."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(4, int(REPEATED / 2 / (time.perf_counter() - begin)))
    for _ in range(count):
        call()
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    before.synchronize()
    start = time.time()
    for _ in range(count):
        call()
    after.record()
    after.synchronize()
    return {"repeated_us": 1e3 * before.elapsed_time(after) / count, **sensors.between(start, time.time())}


def attention_calls() -> dict[str, Callable[[], object]]:
    def randn(channels: int) -> torch.Tensor:
        return torch.randn(1, 4096, 128, channels, device="cuda", dtype=torch.bfloat16)

    q, k, v, do, scale = randn(192), randn(192), randn(128), randn(128), 192**-0.5
    o, lse = attention(q, k, v, scale)
    return {
        "attention": lambda: attention(q, k, v, scale),
        "attention backward": lambda: attention_backward(do, q, k, v, o, lse, scale),
    }


def operator_calls() -> dict[str, Callable[[], object]]:
    x = torch.randn(32768, 7168, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {
        "BF16 8192×8192×8192": lambda: a @ b.mT,
        "quantize 32768×7168": lambda: quantize(x),
        "copy 32768×7168": lambda: y.copy_(x),
    }


def measure_alone(sensors: Sensors, until: float) -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}

    def measure(calls: dict[str, Callable[[], object]]) -> None:
        for name, call in calls.items():
            if time.monotonic() < until:
                alone = seconds({name: call}, 10)[name]
                found[name] = {"alone_us": 1e6 * alone, **repeated(call, sensors)}
                print(name, found[name], flush=True)

    measure(attention_calls())
    for case in CASES:
        if time.monotonic() < until:
            measure({f"{case.what} {case.name}": prepare_case(case, "cuda").call})
    measure(operator_calls())
    return found


def layers_of_v3() -> TrainConfig:
    """2 layers of DeepSeek-V3 with 16 of its experts, as many rows for each as on a rank of EP2 × 32 experts."""
    return replace(preset("medium"), model=V3_LAYERS, batch_size=4, micro_batches=4, sequence_length=4096)


def measure_step(name: str, config: TrainConfig, folder: Path, sensors: Sensors) -> dict[str, object]:
    device = torch.device("cuda", 0)
    store = random_store(config.model.vocab_size, 4 * config.batch_size * config.sequence_length)
    with weights_drawn_on(device):
        trainer = Trainer(replace(config, val_sequences=config.batch_size), store, device, ranks=Ranks.alone())
    for _ in range(WARM_UP):
        trainer.step()
    times, begin = [], time.time()
    for _ in range(ROUNDS):
        before = trainer.progress.seconds
        launch_and_collect(trainer, 2)
        times.append((trainer.progress.seconds - before) / 2)
    found: dict[str, object] = {"ms": 1e3 * median(times), "all": [round(1e3 * t, 2) for t in times]}
    found |= sensors.between(begin + 1, time.time())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        launch_and_collect(trainer, 3)
        torch.cuda.synchronize()
    whole = folder / f"whole_{name}.json"
    record.export_chrome_trace(str(whole))
    events = events_of(whole)
    whole.unlink()
    last = events[-len(events) // 3 :]
    start = last[0]["ts"]
    kernels = [
        [round(event["ts"] - start, 2), round(event["dur"], 3), event["args"].get("grid"), event["name"][:70]]
        for event in last
    ]
    trainer.close()
    found |= {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "captured": bool(trainer.captured.is_captured),
        "kernels": len(kernels),
    }
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(found | {"profile": kernels}).encode()))
    trainer.captured.release()
    return found


def main(step: str, folder: Path, limit: float) -> None:
    begin, config = time.monotonic(), preset("medium") if step == "medium" else layers_of_v3()
    sensors = Sensors(folder / f"sensors_{step}.csv")
    try:
        found = measure_step(step, config, folder, sensors)
        print(f"[{time.monotonic() - begin:.0f} s] {step}: {found}", flush=True)
        alone = measure_alone(sensors, begin + limit)
        (folder / f"alone_{step}.json").write_text(json.dumps(alone, indent=1, ensure_ascii=False), "utf-8")
    finally:
        sensors.process.terminate()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
