"""`octile bench lab`: the speed of the tensor core model, and the cost of telemetry.

The model in C++ and in plain torch is compared with an FP32 GEMM, and a training step with telemetry with a step
without it; the steps are interleaved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from octile.bench.rows import LEGEND, Row, compare, table_with
from octile.bench.timing import seconds
from octile.lab.telemetry import telemetry
from octile.lab.tensor_core import native, vectorized
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.tensor_core.operand import DecodedOperand, decode
from octile.lab.tensor_core.vectorized import Summation
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.optim import AdamW, param_groups
from octile.parallel.device import pick_device
from octile.recipe import Recipe

Implementation = Callable[[DecodedOperand, DecodedOperand, Tensor, Summation], Tensor]
SIZE = 512
SEQUENCES, LENGTH = 8, 128  # of a batch
EVERY = 100
ROUNDS, STEP_ROUNDS = 10, 12
CASES = (("sm_90", torch.float8_e4m3fn), ("sm_100", torch.float8_e4m3fn), ("sm_90", torch.bfloat16))


def rows() -> Iterator[Row]:
    """Yield the speed of the tensor core model, then the cost of telemetry."""
    yield from _tensor_core()
    yield from _telemetry(ModelConfig.tiny())


def _tensor_core() -> Iterator[Row]:
    """Yield GFLOP/s on the CPU with promotion every 128; the time includes decoding the operands."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    for arch, dtype in CASES:
        instruction = find_instruction(arch, dtype, dtype)
        a, b, summation = x.to(dtype), w.to(dtype), Summation(instruction, 128, promote=True)
        start = torch.zeros(SIZE, SIZE)
        implementations = {
            module.__name__.rpartition(".")[2]: partial(_sum, module.sum_products, a, b, start, summation)
            for module in (native, vectorized)
        }
        times = seconds({**implementations, "FP32": lambda: x @ w.T}, ROUNDS)
        speed = {name: 2 * SIZE**3 / taken / 1e9 for name, taken in times.items()}
        for name in implementations:
            case = f"{arch} {instruction.name} {dtype}".replace("torch.", "")
            yield compare(case, name, speed[name], "GFLOP/s", "torch's FP32 product", speed["FP32"])


def _telemetry(config: ModelConfig) -> Iterator[Row]:
    """Yield the milliseconds of a step with telemetry, and what telemetry in every 100th step adds to a run."""
    device = pick_device("auto")
    torch.manual_seed(0)
    model = apply_recipe(DeepseekV3(config), Recipe.deepseek_v3()).to(device)
    optimizer = AdamW(param_groups(model, 0.1), lr=1e-5)
    tokens_BS = torch.randint(config.vocab_size, (SEQUENCES, LENGTH), device=device)

    def step() -> None:
        model(tokens_BS, tokens_BS).backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured() -> None:
        with telemetry(model) as measurement:
            step()
            measurement.step()

    times = seconds({"measured": measured, "other": step}, STEP_ROUNDS)
    case, cost = f"tiny, {SEQUENCES} × {LENGTH} tokens", times["measured"] / times["other"] - 1
    yield compare(case, "a step with telemetry", times["measured"] * 1e3, "ms", "without", times["other"] * 1e3)
    yield Row(case, f"telemetry at every {EVERY}th step adds", 100 * cost / EVERY, "%")


def show(found: Sequence[Row]) -> str:
    """Return the rows as a table."""
    return table_with(LEGEND, found)


def _sum(implementation: Implementation, a: Tensor, b: Tensor, start: Tensor, summation: Summation) -> Tensor:
    return implementation(decode(a, summation.instruction), decode(b, summation.instruction), start, summation)
