"""Time and memory of pipeline schedules on two GPUs, eager: python steps.py"""

import datetime
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from octile.models.config import PRESETS
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.stages import split_stages
from octile.nn.conversion import apply_recipe
from octile.parallel.pipeline import Pipeline
from octile.parallel.schedules import make_schedule
from octile.recipe import Recipe

CONFIG = replace(
    PRESETS["tiny"](),
    vocab_size=8192,
    hidden_size=2048,
    intermediate_size=4096,
    moe_intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=16,
    q_lora_rank=512,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=16,
    num_experts_per_tok=4,
)
TOKENS, STEPS = 2048, 3
CASES = [("1f1b", 8), ("zb1p", 8), ("dualpipe", 8), ("dualpipe", 24), ("1f1b", 24)]


def measure(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=40)
    dist.init_process_group("nccl", f"file://{folder}/store", limit, 2, rank, device_id=device)
    torch.manual_seed(0)
    with torch.device(device):
        model = apply_recipe(DeepseekV3(CONFIG), Recipe.deepseek_v3())
    for name, m in CASES:
        schedule = make_schedule(name, 2, m)
        model.zero_grad()
        stages = split_stages(model, 2)
        own = {s: stages[s] for s in schedule.stages(rank)}
        pipeline = Pipeline(schedule, own, stages[-1].loss, tied=stages[-1].tied)
        generator = torch.Generator(device).manual_seed(1)
        tokens = list(torch.randint(8192, (m, 1, TOKENS), device=device, generator=generator))

        def step(pipeline: Pipeline = pipeline, tokens: list[torch.Tensor] = tokens) -> torch.Tensor:
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                return pipeline.step(tokens, tokens)

        for _ in range(2):
            losses = step()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.reset_peak_memory_stats()
        before, start, host = torch.cuda.memory_allocated(), time.perf_counter(), 0.0
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            host += time.perf_counter() - begin
        torch.cuda.synchronize()
        row = {
            "schedule": name,
            "m": m,
            "ms": (time.perf_counter() - start) / STEPS * 1e3,
            "host_ms": host / STEPS * 1e3,
            "rank": rank,
            "loss": losses.mean().item(),
            "peak_mb": (torch.cuda.max_memory_allocated() - before) / 2**20,
        }
        print(json.dumps(row), flush=True)
        if (name, m) == ("dualpipe", 8):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                step()
                torch.cuda.synchronize()
            profile.export_chrome_trace(f"{folder}/{rank}.json")
            print(json.dumps({"rank": rank, **overlap(Path(f"{folder}/{rank}.json"))}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def overlap(trace: Path) -> dict[str, object]:
    """For how long kernels other than NCCL's ran, on one stream or on two at the same time."""
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    spans: dict[int, list[tuple[float, float, bool]]] = {}
    for e in events:
        spans.setdefault(e["args"]["stream"], []).append((e["ts"], e["ts"] + e["dur"], "nccl" in e["name"].lower()))
    every = [span for of_stream in spans.values() for span in of_stream]
    edges = sorted(edge for start, end, is_nccl in every if not is_nccl for edge in ((start, 1), (end, -1)))
    busy = two = 0.0
    running, last = 0, edges[0][0]
    for when, change in edges:
        busy += (when - last) * (running >= 1)
        two += (when - last) * (running >= 2)
        running, last = running + change, when
    return {
        "span_ms": (max(end for _, end, _ in every) - min(start for start, _, _ in every)) / 1e3,
        "busy_ms": busy / 1e3,
        "two_streams_ms": two / 1e3,
        "streams": {key: [len(own), sum(end - start for start, end, _ in own) / 1e3] for key, own in spans.items()},
    }


if __name__ == "__main__":
    mp.spawn(measure, (tempfile.mkdtemp(),), 2)
