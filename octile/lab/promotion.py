"""Compare the loss of models trained with different accumulators: FP32, promoted every 128, never promoted.

    python -m octile.lab.promotion --recipe per_tensor --steps 300

All models start from the same weights and see the same batches. They differ in how FP8 GEMMs are summed: in FP32 (as
the references do), on the tensor core with promotion every 128 products, or on the tensor core alone. A fourth model,
with another seed, shows how large a difference is noise.

Per-tensor scaling suits this experiment: its sums run over all of K without rescaling (see
`octile.lab.tensor_core_scaled_matmul`).
"""

import argparse
import json
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from octile.atomic_files import write_text
from octile.lab.tensor_core import tensor_core
from octile.parallel.device import pick_device
from octile.report.run.lines import Record
from octile.train.config import TrainConfig, tiny
from octile.train.data.token_store import TokenStore
from octile.train.loop import run_steps
from octile.train.run.console import RunConsole
from octile.train.run.tokens import prepare_tokens
from octile.train.trainer import Trainer


@dataclass(frozen=True)
class Trained:
    """The result of one run.

    Attributes:
        sums: the accumulator, "FP32", "promoted every 128" or "never promoted".
        seed: the seed of the weights and of the order of the data.
        steps, val_loss: held-out loss in nats per token after these steps.
        seconds: the duration of the run.
    """

    sums: str
    seed: int
    steps: tuple[int, ...]
    val_loss: tuple[float, ...]
    seconds: float


def accumulators(arch: str) -> dict[str, AbstractContextManager[object]]:
    """Return the contexts that set the accumulator, by name."""
    return {
        "FP32": nullcontext(),
        "promoted every 128": tensor_core(arch, promote_every=128),
        "never promoted": tensor_core(arch, promote_every=None),
    }


class _Validating:
    """The `LoopHooks` of a run, which measure its held-out loss and nothing else."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.steps: list[int] = []
        self.val_loss: list[float] = []

    def around(self, step: int) -> AbstractContextManager[object]:
        return nullcontext()

    def record(self, lines: Iterable[Record]) -> None:
        for _ in lines:  # they are collected as they are read
            pass

    def between_steps(self) -> None:
        pass

    def validate(self) -> None:
        self.steps.append(self.trainer.steps_done)
        self.val_loss.append(self.trainer.evaluator.validate()["val_loss"])

    def save(self) -> None:
        pass

    def is_finished(self) -> bool:
        return False


def run(config: TrainConfig, sums: str, context: AbstractContextManager[object], store: TokenStore) -> Trained:
    """Train one model inside the context."""
    start = time.perf_counter()
    with context, closing(Trainer(config, store, pick_device(config.device))) as trainer:
        hooks = _Validating(trainer)
        run_steps(trainer, hooks, stop=())
    return Trained(sums, config.seed, tuple(hooks.steps), tuple(hooks.val_loss), time.perf_counter() - start)


def main(arguments: list[str] | None = None) -> None:
    """Train the four models, print a line for each, and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m octile.lab.promotion", description="Train with three kinds of accumulators."
    )
    parser.add_argument("--recipe", default="per_tensor")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/lab-promotion"), help="folder (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    with tensor_core(chosen.arch, promote_every=128):  # raises an error for invalid options before any work
        pass
    config = replace(tiny(), recipe=chosen.recipe, steps=chosen.steps, seed=chosen.seed)
    console = RunConsole()
    store = prepare_tokens(config, chosen.out / "data", console)
    found: list[Trained] = []
    todo = [(name, chosen.seed) for name in accumulators(chosen.arch)]
    for name, seed in [*todo, ("FP32", chosen.seed + 1)]:
        trained = run(replace(config, seed=seed), name, accumulators(chosen.arch)[name], store)
        found.append(trained)
        against = trained.val_loss[-1] / found[0].val_loss[-1] - 1
        loss = f"held-out loss {trained.val_loss[-1]:.4f} ({against:+.2%})"
        console.print(f"{name}, seed {seed}: {loss} in {trained.seconds:.0f} s")
        result = {"recipe": chosen.recipe, "arch": chosen.arch, "runs": [asdict(t) for t in found]}
        write_text(chosen.out / "promotion.json", json.dumps(result, indent=1) + "\n")
    console.print(f"measurements: {chosen.out / 'promotion.json'}")


if __name__ == "__main__":
    main()
