"""Count on one GPU or a CPU how many log-probabilities of exact mode have the bits of training.

    python -m tools.count_equal_bits small v2_lite_16b --texts 1600
    python -m tools.count_equal_bits tiny --device cpu --pages 64       # too few for 256 texts: some are preempted
    python -m tools.count_equal_bits runs/exact --device cpu --drafts 2

Weights of a preset's shape are drawn, those of a run folder are read. An engine samples texts 256 at a time, and the
model computes them again, some at a time. `octile lab rollout` compares each text of a folder alone, and says where a
difference begins. The exit status is 1 if a log-probability has other bits, if no text was preempted although there
are other pages than usual, or if no draft was accepted.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

import octile
from octile.lab.operators import count_equal
from octile.lab.pages.preflight import read_tokens
from octile.lab.rollout import Text, draw_prompts, prefill, roll_out
from octile.models.config import PRESETS
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Request
from octile.serve.engine.scheduler import Scheduler
from octile.serve.engine.stats import Stats
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer

MAX_BATCH, STEP_TOKENS, N_PAGES = 256, 2048, 6144
PROMPT_TOKENS = 20_000  # that prompts are cut from
TRAINED_AT_ONCE = 8  # texts


def make_model(name: str, device: torch.device) -> DeepseekV3:
    """Draw the weights of a preset, or read those of a folder."""
    if name not in PRESETS:
        return octile.load(name, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    torch.manual_seed(0)
    with device:
        model = DeepseekV3(PRESETS[name]())
        model = model.bfloat16() if device.type == "cuda" else model
    apply_recipe(model, Recipe.exact())
    return model.eval()


def prompt_tokens(name: str, vocabulary: int) -> list[int]:
    """Draw the tokens that prompts are cut from, or read them for the tokenizer of a folder."""
    if name not in PRESETS:
        return read_tokens(Path(name), "stdlib", PROMPT_TOKENS).tolist()
    return random.Random(0).choices(range(vocabulary), k=PROMPT_TOKENS)


def sample(
    model: DeepseekV3, prompts: Sequence[Sequence[int]], new_tokens: int, n_pages: int, n_drafts: int
) -> tuple[list[Text], Stats, set[int]]:
    """Continue prompts in exact mode, and prefill the prompts alone; return also which texts were preempted."""
    runner = ModelRunner(
        model, n_pages, max_batch=MAX_BATCH, n_drafts=n_drafts, batch_invariant=True, max_step_tokens=STEP_TOKENS
    )
    runner.warm_up()
    tokenizer = Tokenizer.train([], MIN_VOCAB_SIZE)
    config = EngineConfig(MAX_BATCH, STEP_TOKENS, n_drafts, batch_invariant=True)
    engine = Engine(runner, tokenizer, config)
    preempted, preempt = set(), Scheduler._preempt

    def note(scheduler: Scheduler, request: Request) -> None:
        preempted.add(request.id)  # its number among the texts: the engine is new
        preempt(scheduler, request)

    with patch.object(Scheduler, "_preempt", note):
        texts = roll_out(engine, prompts, new_tokens, 0)
    stats = engine.stats()
    prefill(runner, texts)
    engine.close()
    return texts, stats, preempted


@torch.no_grad()
def compare(
    model: DeepseekV3, texts: Sequence[Text], preempted: set[int], device: torch.device
) -> Iterator[tuple[str, int, int]]:
    """Yield for prompts and decoded tokens of some texts how many there are, and how many have equal bits."""
    numbers = sorted(range(len(texts)), key=lambda i: len(texts[i].prompt))
    for i in range(0, len(texts), TRAINED_AT_ONCE):
        group = {number: texts[number] for number in numbers[i : i + TRAINED_AT_ONCE]}
        rows = [torch.tensor(text.prompt + text.tokens, device=device) for text in group.values()]
        longest = max(map(len, rows))
        tokens_BS = torch.stack([pad(row, (0, longest - len(row))) for row in rows])
        trained = model.log_probs(tokens_BS).cpu()
        for (number, text), trained_S in zip(group.items(), trained, strict=True):
            n, end = len(text.prompt) - 1, len(text.prompt) + len(text.tokens) - 1
            yield "prompts", *equal(torch.tensor(text.read), trained_S[:n])
            decoded = equal(torch.tensor(text.decoded), trained_S[n:end])
            yield "decoded", *decoded
            if number in preempted:
                yield "decoded of preempted texts", *decoded


def equal(served: Tensor, trained: Tensor) -> tuple[int, int]:
    return count_equal([served], [trained])[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help=f"run folders, or of {', '.join(PRESETS)}")
    parser.add_argument("--texts", type=int, default=1600)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--pages", type=int, default=N_PAGES)
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    device, failed = torch.device(options.device), False
    for name in options.models:
        begin = time.perf_counter()
        model = make_model(name, device)
        prompts = draw_prompts(prompt_tokens(name, model.config.vocab_size), options.texts, 0)
        texts, stats, preempted = sample(model, prompts, options.new_tokens, options.pages, options.drafts)
        print(stats, flush=True)
        if options.pages != N_PAGES and not preempted:
            print(f"{name}: no text was preempted")
            failed = True
        if options.drafts and not stats.accepted_tokens:
            print(f"{name}: no draft was accepted")
            failed = True
        counts: dict[str, tuple[int, int]] = {}
        for kind, n, same in compare(model, texts, preempted, device):
            before = counts.get(kind, (0, 0))
            counts[kind] = before[0] + n, before[1] + same
        failed |= any(n != same for n, same in counts.values())
        shown = ", ".join(f"{kind} {same:,} of {n:,}" for kind, (n, same) in counts.items())
        print(f"{name}, equal bits: {shown}; {time.perf_counter() - begin:.0f} s", flush=True)
        del model
    sys.exit(failed)


if __name__ == "__main__":
    main()
