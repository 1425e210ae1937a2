"""Print the memory that the first steps of `octile train` take on a GPU, by phase, with random tokens.

    python -m tools.measure_memory small deepseek_v3
    python -m tools.measure_memory medium deepseek_v3 --lines
    python -m tools.measure_memory medium deepseek_v3 --limits 60,56,52

The steps are those of `octile.train.trainer`: eager ones, the one that is captured, replays, and a validation. Each
line has the bytes that tensors have and that torch has reserved, after the phase and at their largest in it. At the end
stand the reserved bytes by pool: graphs have pools of their own, which nothing else may use. `--lines` says what was
alive at the peak of each phase, by the line that allocated it (torch's history of allocations, in the processes' host
memory). `--limits` then lets torch reserve so many GiB at most, one after the other until memory runs out: the least
with which the steps succeed is what a run needs.
"""

import gc
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from octile.train.config import TrainConfig, preset
from octile.train.trainer import Trainer
from tools.random_run import random_store, weights_drawn_on

GIB = 2**30
EAGER, REPLAYS = 3, 3  # steps before the capture, and after it
SHOWN = 25  # lines of a peak


def make_trainer(config: TrainConfig) -> Trainer:
    """The trainer of a run with random tokens."""
    device = torch.device("cuda", torch.cuda.current_device())
    store = random_store(config.model.vocab_size, 4 * config.batch_size * config.sequence_length)
    with weights_drawn_on(device):
        return Trainer(config, store, device)


def measure(config: TrainConfig, has_lines: bool) -> None:
    trainers: list[Trainer] = []
    phases: list[tuple[str, Callable[[], object]]] = [("build", lambda: trainers.append(make_trainer(config)))]
    phases += [(f"step {number}, eager", lambda: trainers[0].step()) for number in range(1, EAGER + 1)]
    phases += [(f"step {EAGER + 1}, captured and replayed", lambda: trainers[0].step())]
    phases += [(f"step {EAGER + 1 + number}, replayed", lambda: trainers[0].step()) for number in range(1, REPLAYS + 1)]
    phases += [("validation", lambda: trainers[0].evaluator.validate())]
    print(f"{'':36}  after: tensors  reserved  largest: tensors  reserved")
    for phase, run in phases:
        torch.cuda.reset_peak_memory_stats()
        if has_lines:
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=10**7)
        run()
        torch.cuda.synchronize()
        after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        largest = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(
            f"{phase:36}{{:16.2f}}{{:10.2f}}{{:18.2f}}{{:10.2f}}".format(*(n / GIB for n in after + largest)),
            flush=True,
        )
        if has_lines:
            events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
            torch.cuda.memory._record_memory_history(None)
            print("\n".join(lines_at_peak(events, after[0])), flush=True)
    trainer = trainers[0]
    assert trainer.captured is not None
    parameters = list(trainer.model.parameters())
    sizes = {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "moments": sum(t.nbytes for state in trainer.optimizer.state.values() for t in state.values()),
    }
    print(f"captured {trainer.captured.is_captured}, keeps activations {trainer.strategy.saves_activations}; ", end="")
    print(", ".join(f"{what} {size / GIB:.2f}" for what, size in sizes.items()))
    print("\n".join(pools(torch.cuda.memory_snapshot())), flush=True)
    trainer.close()
    trainer.captured.release()


def lines_at_peak(events: Sequence[dict[str, Any]], after: int) -> list[str]:
    """The allocations of a phase that were alive when most bytes were, by line.

    Args:
        events: torch's trace of the phase.
        after: the allocated bytes after it.
    """
    total = most = peak = 0
    for index, event in enumerate(events):
        total += {"alloc": event["size"], "free_completed": -event["size"]}.get(event["action"], 0)
        if total > most:
            most, peak = total, index
    alive: dict[int, dict[str, Any]] = {}
    for event in events[: peak + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    sizes: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in alive.values():
        own = [f for f in event.get("frames", []) if "octile/" in f["filename"]]
        line = " < ".join(f"{f['filename'].rpartition('octile/')[2]}:{f['line']}" for f in own[:5])
        sizes[line] += event["size"]
        calls[line] += 1
    found = [f"    at the peak {most / GIB:.2f} more than at the begin, {(after - total) / GIB:.2f}:"]
    found += [f"    {size / GIB:9.3f} in {calls[line]:4}: {line}" for line, size in sizes.most_common(SHOWN)]
    return [*found, f"    {sum(sizes.values()) / GIB:9.3f} in {sum(calls.values()):4}: all"]


def pools(segments: Sequence[dict[str, Any]]) -> list[str]:
    """The reserved bytes of each pool of torch's allocator, and how many of them no tensor has."""
    found: dict[tuple[Any, str], Counter[str]] = {}
    for segment in segments:
        pool = found.setdefault((tuple(segment["segment_pool_id"]), segment["segment_type"]), Counter())
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        pool["segments"] += 1
        pool["reserved"] += segment["total_size"]
        pool["free"] += sum(free)
        pool["largest free"] = max(pool["largest free"], *free, 0)
    return [
        f"pool {key[0]}, {key[1]}: {pool['segments']} segments, reserved {pool['reserved'] / GIB:.2f}, of which free "
        f"{pool['free'] / GIB:.2f}, the largest block {pool['largest free'] / GIB:.2f}"
        for key, pool in sorted(found.items())
    ]


def main(arguments: Sequence[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("preset")
    parser.add_argument("recipe")
    parser.add_argument("--lines", action="store_true")
    parser.add_argument("--limits", type=lambda text: [float(limit) for limit in text.split(",")], default=[])
    options = parser.parse_args(arguments)
    config = replace(preset(options.preset), recipe=options.recipe, val_sequences=8)
    print(f"{options.preset}, {options.recipe}, {torch.cuda.get_device_name()}, torch {torch.__version__}; GiB")
    if not options.limits:
        measure(config, options.lines)
    for limit in options.limits:
        print(f"at most {limit} GiB")
        torch.cuda.set_per_process_memory_fraction(limit * GIB / torch.cuda.get_device_properties(0).total_memory)
        try:
            measure(config, options.lines)
        except torch.OutOfMemoryError as error:
            print(f"out of memory: {error}")
            break
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{torch.cuda.memory_allocated() / GIB:.2f} stay allocated", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
