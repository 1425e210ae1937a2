"""Time a pair's passes on one GPU with a delay in the place of each exchange of rows, in sequence and interleaved.

    python -m tools.measure_delayed_pair v3 1.0 2.0

V3's size needs PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in 80 GB.

The passes are those of `tools.measure_pair`, with the experts that one of two ranks has there; all tokens go to them.
An exchange takes about the given milliseconds on a stream of its own, and moves nothing. GEMMs leave it as many SMs as
to an exchange of kernels, for as long as it takes. With a delay the pair takes longer than without one by what is
exposed, and by what GEMMs lose on fewer SMs: each line has both as a share of the sum of the delays. The pair's time is
that of events around its CUDA graph. A delay's is the mean of a profile of further replays: the kernel counts cycles,
which take longer where GEMMs lower the GPU's clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch

from octile.bench.kernel_time import record_kernels
from octile.kernels.cuda.gemm import num_sms as gemm_sms
from octile.kernels.triton.launch_config import PEER_SMS_OVERLAPPED
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.stages import split_stages
from octile.nn.conversion import apply_recipe
from octile.nn.dispatcher import InFlight, LocalDispatcher
from octile.nn.moe import MoE
from octile.recipe import Recipe
from tools.measure_pair import LAYERS, MARK, ROUNDS, SIZES, TOKENS, WAYS, Passes, capture, replay, times, warm_up

FLOPS_PER_MS = 1e12  # of GEMMs in FP8 on the SMs that are left, at most


class DelayedDispatcher(LocalDispatcher):
    """Dispatch and combine within one device, whose exchanges take a while.

    Args:
        exchange: called where an exchange begins; returns what makes the current stream wait for its end.
    """

    exchanges = True

    def __init__(self, exchange: Callable[[], Callable[[], None]]):
        self._exchange = exchange

    def begin_send(self, *given: Any, **settings: Any) -> InFlight[Any]:
        return InFlight(super().begin_send(*given, **settings).result, self._exchange())

    def begin_send_quantized(self, *given: Any, **settings: Any) -> InFlight[Any]:
        return InFlight(super().begin_send_quantized(*given, **settings).result, self._exchange())

    def begin_send_back(self, *given: Any, **settings: Any) -> InFlight[Any]:
        return InFlight(super().begin_send_back(*given, **settings).result, self._exchange())


class Exchanges:
    """Delays on a stream of their own, and how many have begun. Without a delay nothing is launched."""

    def __init__(self) -> None:
        self.stream, self.ms, self.begun = torch.cuda.Stream(priority=-1), 0.0, 0
        torch.cuda._sleep(1)  # loads the kernel
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.cuda._sleep(10**8)
        end.record()
        torch.cuda.synchronize()
        self._cycles_per_ms = 10**8 / begin.elapsed_time(end)

    def begin(self) -> Callable[[], None]:
        self.begun += 1
        if not self.ms:  # all SMs are the GEMMs'
            return lambda: None
        start, end = torch.cuda.Event(), torch.cuda.Event()
        start.record()
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(start)
            torch.cuda._sleep(int(self.ms * self._cycles_per_ms))
            end.record()
        restore_gemms = gemm_sms.leave_free(PEER_SMS_OVERLAPPED, FLOPS_PER_MS * self.ms)

        def arrive() -> None:
            torch.cuda.current_stream().wait_event(end)
            restore_gemms()

        return arrive


def delay_ms(graphs: list[torch.cuda.CUDAGraph]) -> float | None:
    """The ms that a delay takes in replays, on average; None if the profiler has seen none."""
    delays = [kernel.duration for kernel in record_kernels(lambda: times(graphs)) if MARK in kernel.name]
    return fmean(delays) / 1e3 if delays else None


def main(size: str, delays: Sequence[float]) -> None:
    device = torch.device("cuda")
    exchanges = Exchanges()
    config = replace(SIZES[size], num_hidden_layers=2 * LAYERS, first_k_dense_replace=0, num_nextn_predict_layers=0)
    groups = {"n_group": config.n_group // 2, "topk_group": config.topk_group // 2} if config.n_group > 1 else {}
    config = replace(config, n_routed_experts=config.n_routed_experts // 2, **groups)
    torch.manual_seed(0)
    with device:
        model = apply_recipe(DeepseekV3(config), Recipe.deepseek_v3())
        torch.nn.init.normal_(model.model.embed_tokens.weight)  # so that tokens differ, and go to different experts
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatcher = DelayedDispatcher(exchanges.begin)
    print(f"{size} on {torch.cuda.get_device_name()}, torch {torch.__version__}, {config.n_routed_experts} experts")
    parameters = [p for name, p in model.named_parameters() if not name.startswith("lm_head")]
    tokens = torch.randint(config.vocab_size, (1, TOKENS), device=device)
    h = torch.randn(1, TOKENS, config.hidden_size, device=device, dtype=torch.bfloat16)
    passes = Passes(split_stages(model, 2), tokens, h)

    requests = warm_up(passes, parameters)
    without: dict[str, float] = {}
    for exchanges.ms in (0.0, *delays):
        for way in WAYS:
            exchanges.begun = 0
            passes.begin()
            outside = exchanges.begun
            passes.pair(way)
            of_pair = exchanges.begun - outside
            passes.end()
            graphs = capture(passes, way, requests)
            replay(graphs)
            found = median([ms for _ in range(ROUNDS) for ms in times(graphs)])
            print(f"{size}, {way}, {of_pair} exchanges of {exchanges.ms:g} ms: {found:.2f} ms", end="", flush=True)
            if exchanges.ms:
                more, each = found - without[way], delay_ms(graphs)
                total = of_pair * (each or exchanges.ms)
                of_each = f"{each:.3f} each" if each else "if each took as long as it was to: none was profiled"
                print(f", {more:+.2f}: {more / total:.1%} of {total:.1f} ms exposed, {of_each}", flush=True)
            else:
                without[way] = found
                print(flush=True)
            del graphs


if __name__ == "__main__":
    main(sys.argv[1], [float(ms) for ms in sys.argv[2:]])
