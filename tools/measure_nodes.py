"""Dispatch and combine across nodes: NVSHMEM vs. `all_to_all_single`, each GPU of this host as a node of its own.

    torchrun --nproc-per-node 2 -m tools.measure_nodes

The rows are those of `octile bench dispatch`: 4096 tokens of width 7168 a rank, 8 of 256 experts. Both transports have
the same kernels inside a node, which has one rank and so only copies. The bytes are those that leave a GPU; the time is
that of the whole dispatch or combine, and in a second column with the host, launched kernel by kernel.
"""

import os
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from octile.bench import dispatch as bench
from octile.nn import Gate, MoE
from octile.ops.quantize import quantize
from octile.parallel import shard_experts
from octile.parallel.nodes import NodeDispatcher
from octile.scaled import ScaledTensor


def main() -> None:
    """Measure both transports, and print a table on rank 0."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    torch.manual_seed(dist.get_rank())
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cuda", (ranks, 1), mesh_dim_names=("node", "rank"))
    experts_TK, load_E = bench.choose_experts(device)
    x = torch.randn(bench.TOKENS, bench.HIDDEN, device=device, dtype=torch.bfloat16)
    data, scale = quantize(x, 1, 128, "e4m3", True)
    q = ScaledTensor(data, scale, (1, 128))
    lines = [f"{ranks} nodes of one {torch.cuda.get_device_name()}, torch {torch.__version__}"]
    for across in ("nvshmem", "all_to_all_single"):
        with torch.device("meta"):
            moe = MoE(Gate(bench.HIDDEN, bench.EXPERTS, bench.CHOSEN), bench.HIDDEN, 128)
        rows = 2 * bench.TOKENS * bench.CHOSEN
        share = shard_experts(moe, mesh, max_tokens=bench.TOKENS, max_rows=rows, across=across)
        own = moe.dispatcher
        assert isinstance(own, NodeDispatcher)
        plan = own.plan(experts_TK, load_E)
        y = torch.randn(len(plan.order_R), bench.HIDDEN, device=device, dtype=torch.bfloat16)
        lines.append(share.exchange)
        exchanges = {
            "plan": bench.Exchange(partial(own.plan, experts_TK, load_E), 0),
            "dispatch FP8": bench.dispatch(own, q, plan, experts_TK),
            "combine BF16": bench.combine(own, y, plan, experts_TK),
        }
        for name, exchange in exchanges.items():
            captured = None if own.waits_for_device else bench.graph_seconds(bench.captured(exchange.call).replay)
            launched = bench.call_seconds(exchange.call)
            for case, seconds in (("captured", captured), ("launched", launched)):
                if seconds is not None:
                    line = f"  {name:13} {case} {1e6 * seconds:8.0f} µs"
                    if exchange.n_bytes:
                        line += f", {bench.megabytes(exchange)}, {bench.gb_per_s(exchange, seconds):.0f} GB/s"
                    lines.append(line)
            lines.append(f"  {name:13} host     {1e6 * _host_seconds(exchange.call):8.0f} µs")
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


def _host_seconds(call: Callable[[], object]) -> float:
    """The host's time for a call, with what it waits for."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(bench.CALLS):
        call()
    seconds = (time.perf_counter() - start) / bench.CALLS
    torch.cuda.synchronize()
    return seconds


if __name__ == "__main__":
    main()
