"""Step times under FSDP2 of a model in the shape of Llama 8B with 4 layers; a mode and a batch of 4096 tokens each.

torchrun --nproc_per_node 2 steps.py bf16:2 octile:2 octile_fp8gather:2
"""

import gc
import json
import os
import statistics
import sys
import time
import traceback

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octile
from octile.parallel import use_fp8_all_gather

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")


def run(mode, batch):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        attn_implementation="sdpa",
    )
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    if mode != "bf16":
        octile.convert(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        if "compiled" in mode:
            layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if "fp8gather" in mode:
        use_fp8_all_gather(model)
    tokens = torch.randint(0, 32000, (batch, 4096), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    times, losses = [], []
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _i in range(12):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        loss = step()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start, host))
        losses.append(loss.item())
    peak = torch.cuda.max_memory_allocated()
    row = {
        "mode": mode,
        "batch": batch,
        "median_ms": round(1e3 * statistics.median(t for t, _ in times[4:]), 2),
        "host_ms": round(1e3 * statistics.median(h for _, h in times[4:]), 2),
        "losses": losses[:3],
        "peak_GiB": round(peak / 2**30, 2),
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        step()
        torch.cuda.synchronize()
    kernels = sorted(((e.self_device_time_total / 1e3, e.count, e.key[:70]) for e in p.key_averages()), reverse=True)
    row["gpu_ms"] = round(sum(k[0] for k in kernels), 1)
    row["top"] = [(round(a, 2), n, k) for a, n, k in kernels[:14]]
    return row


for spec in sys.argv[1:]:
    mode, batch = spec.split(":")
    try:
        row = run(mode, int(batch))
    except Exception:
        row = {"mode": mode, "error": traceback.format_exc()[-1500:]}
    if rank == 0:
        top = row.pop("top", [])
        print(json.dumps(row), flush=True)
        for line in top:
            print("      ", *line, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
dist.barrier()
dist.destroy_process_group()
