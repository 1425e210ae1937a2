"""Time the forward pass of 4 MoE layers and the backward pass of 4 others, in sequence and interleaved, on two GPUs.

    torchrun --nproc-per-node 2 -m tools.measure_pair v3 FOLDER SECONDS

The experts of all layers are spread over both GPUs, on symmetric memory. The two passes are those of an overlapped pair
of a pipeline, captured in a CUDA graph, with the kernels that `octile.parallel.pipeline` launches: GEMMs add to the
gradients of earlier micro-batches. Written to FOLDER: a line for each way to run them, and a trace of the pair on each
rank, of which `python -m tools.exposed_communication` computes how much of the communication is exposed. A process ends
after SECONDS.

The layers have the sizes of DeepSeek-V3 (v3, with 32 experts of 256) or of V2-Lite (v2_lite, with all 64); a rank has
4096 tokens.
"""

import datetime
import faulthandler
import gc
import gzip
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from octile.kernels.cuda.gemm.launch_cache import one_workspace_in_capture
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.stages import split_stages
from octile.nn.conversion import apply_recipe
from octile.nn.fused.quantize import quantize_requested
from octile.nn.interleave import run_interleaved
from octile.nn.moe import MoE, share_of_experts
from octile.nn.weight_cache import WeightRequest, quantized_once_in_capture, recorded_requests
from octile.optim.gradient import added_in_place
from octile.parallel import shard_experts
from octile.recipe import Recipe
from octile.train.step.kernel_records import is_communication
from tools.exposed_communication import describe, events_of, kernels_of

TOKENS, LAYERS, ROUNDS, REPLAYS = 4096, 4, 4, 4
SIZES = {
    "v3": replace(ModelConfig.v3_671b(), n_routed_experts=32, vocab_size=4096, bos_token_id=0, eos_token_id=1),
    "v2_lite": replace(ModelConfig.v2_lite_16b(), vocab_size=4096, bos_token_id=0, eos_token_id=1),
}
WAYS = ("sequence", "interleaved")
MARK = "spin_kernel"


class Passes:
    """The passes of a pair: `begin` has run before, and `end` runs after it."""

    def __init__(self, stages, tokens: Tensor, h: Tensor):
        self.first, self.second = stages
        self.tokens, self.h, self.dh = tokens, h.requires_grad_(), torch.randn_like(h) * 1e-3
        self.one, self.zero = (torch.full((), value, device=h.device) for value in (1.0, 0.0))
        self.edges: dict[int, list] = {}

    def forward(self, i: int) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            outputs = self.second(self.h, self.zero) if i else self.first(self.tokens)
        self.edges[i] = [get_gradient_edge(t) for t in outputs]

    def backward(self, i: int) -> None:
        with added_in_place((self.second if i else self.first).parameters()):
            torch.autograd.backward(self.edges.pop(i), [self.dh, self.one])

    def begin(self) -> None:
        self.h.grad = None  # of a replay, which the memory of its graph holds
        self.forward(1)

    def pair(self, way: str) -> None:
        if way == "sequence":
            self.forward(0)
            self.backward(1)
        else:
            run_interleaved(lambda: self.backward(1), lambda: self.forward(0))

    def end(self) -> None:
        self.backward(0)

    def run(self, way: str) -> None:
        self.begin()
        self.pair(way)
        self.end()


def warm_up(passes: Passes, parameters: Sequence[Tensor]) -> Sequence[WeightRequest]:
    """Run the passes eagerly, and return which weights they quantize once a step. Parameters then have gradients."""
    passes.run("sequence")
    torch.optim.SGD(parameters, 0.0).step()  # of weights that an optimizer writes
    with recorded_requests() as requests:
        passes.run("interleaved")
    return requests


def capture(passes: Passes, way: str, requests) -> list[torch.cuda.CUDAGraph]:
    graphs, stream = [torch.cuda.CUDAGraph() for _ in range(3)], torch.cuda.Stream()
    with quantized_once_in_capture():
        quantize_requested(requests)

    def begin() -> None:
        quantize_requested(requests)
        passes.begin()

    with quantized_once_in_capture(), one_workspace_in_capture():
        for graph, work in zip(graphs, (begin, lambda: passes.pair(way), passes.end), strict=True):
            pool = None if graph is graphs[0] else graphs[0].pool()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                work()
    return graphs


def replay(graphs: list[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.replay()


def times(graphs: list[torch.cuda.CUDAGraph]) -> list[float]:
    """The ms of the pair in each of some replays."""
    events = []
    for _ in range(REPLAYS):
        graphs[0].replay()
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        graphs[1].replay()
        events[-1][1].record()
        graphs[2].replay()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def trace(graphs: list[torch.cuda.CUDAGraph], path: Path) -> str:
    """Write the trace of the pair's kernels, and describe it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        for _ in range(2):
            graphs[0].replay()
            torch.cuda._sleep(5_000_000)  # while the host launches the pair
            graphs[1].replay()
            torch.cuda._sleep(100_000)
            graphs[2].replay()
        torch.cuda.synchronize()
    whole = path.with_suffix(".whole")
    record.export_chrome_trace(str(whole))
    events = events_of(whole)
    whole.unlink()
    *_, before, after = [i for i, event in enumerate(events) if MARK in event["name"]]
    events = events[before + 1 : after]
    start, kernels = events[0]["ts"], kernels_of(events)
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(("computation", "communication"))
    ]
    for event in events:
        event["ts"], event["pid"], event["tid"] = event["ts"] - start, 0, int(is_communication(event["name"]))
        event["args"] = {key: event["args"][key] for key in ("stream", "grid", "bytes") if key in event["args"]}
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": names + events}).encode()))
    return describe(kernels)


def main(size: str, folder: Path, seconds: float) -> None:
    rank, begin = int(os.environ["RANK"]), time.monotonic()
    faulthandler.dump_traceback_later(seconds, exit=True)  # a rank that waits for another one would stay behind
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60), device_id=device)
    lines = (folder / f"{size}_{rank}.txt").open("w", buffering=1, encoding="utf-8")

    def report(line: str) -> None:
        lines.write(f"[{time.monotonic() - begin:.0f} s] {line}\n")

    config = replace(SIZES[size], num_hidden_layers=2 * LAYERS, first_k_dense_replace=0, num_nextn_predict_layers=0)
    torch.manual_seed(0)
    with device, share_of_experts(rank, 2):
        model = apply_recipe(DeepseekV3(config), Recipe.deepseek_v3())
        torch.nn.init.normal_(model.model.embed_tokens.weight)  # so that tokens differ, and go to different experts
    stages, too_many_rows = split_stages(model, 2), torch.zeros((), device=device)
    rows = int(1.25 * TOKENS * config.num_experts_per_tok)
    share = shard_experts(torch.nn.ModuleList(stages), None, TOKENS, rows, too_many_rows=too_many_rows)
    report(f"{share}; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    parameters = [p for name, p in model.named_parameters() if not name.startswith("lm_head")]
    torch.manual_seed(rank + 1)
    tokens = torch.randint(config.vocab_size, (1, TOKENS), device=device)
    passes = Passes(stages, tokens, torch.randn(1, TOKENS, config.hidden_size, device=device, dtype=torch.bfloat16))

    requests = warm_up(passes, parameters)
    torch.cuda.synchronize()
    loads = [m.last_load_E.view(2, -1).sum(1).tolist() for m in model.modules() if isinstance(m, MoE)]
    report(f"ran eagerly; rows of the experts of each rank by layer {loads}, too many {bool(too_many_rows)}")
    graphs, found = {}, {way: list[float]() for way in WAYS}
    for way in WAYS:
        passes.run(way)  # compiles what the graphs need
        graphs[way] = capture(passes, way, requests)
        replay(graphs[way])
    torch.cuda.synchronize()
    report(f"captured; peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    dist.barrier()
    for _ in range(ROUNDS):
        for way in WAYS:
            found[way] += times(graphs[way])
    for way in WAYS:
        dist.barrier()
        described = trace(graphs[way], folder / f"{size}_{way}_{rank}.json.gz")
        all_ms = ", ".join(f"{ms:.2f}" for ms in found[way])
        report(f"{size}, {way}: median {median(found[way]):.3f} ms of {all_ms}; trace: {described}")
    passes.h.grad = None
    graphs.clear()  # they hold the memory of the ranks' exchanges
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
