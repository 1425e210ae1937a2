"""Count on one GPU how many log-probabilities of exact mode have the bits of training, with random weights.

    python -m tools.count_equal_bits small v2_lite_16b --texts 1600

`octile lab rollout` does this for a trained model. Here weights of a preset's shape are drawn, an engine samples texts
256 at a time, and the model computes them again, some at a time. The exit status is 1 if one has other bits.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from octile.lab.operators import count_equal
from octile.lab.rollout import Text, draw_prompts, prefill, roll_out
from octile.models.config import PRESETS
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer

MAX_BATCH, STEP_TOKENS, N_PAGES = 256, 2048, 6144
TRAINED_AT_ONCE = 8  # texts


def make_model(name: str, device: torch.device) -> DeepseekV3:
    torch.manual_seed(0)
    with device:
        model = DeepseekV3(PRESETS[name]())
        model = model.bfloat16() if device.type == "cuda" else model
    apply_recipe(model, Recipe.exact())
    return model.eval()


def sample(model: DeepseekV3, n_texts: int, new_tokens: int, device: torch.device) -> list[Text]:
    """Continue random prompts in exact mode, and prefill the prompts alone."""
    vocabulary = model.config.vocab_size
    runner = ModelRunner(model, N_PAGES, max_batch=MAX_BATCH, batch_invariant=True, max_step_tokens=STEP_TOKENS)
    runner.warm_up()
    tokenizer = Tokenizer.train([], MIN_VOCAB_SIZE)
    engine = Engine(
        runner, tokenizer, EngineConfig(max_batch=MAX_BATCH, max_step_tokens=STEP_TOKENS, batch_invariant=True)
    )
    drawn = random.Random(0).choices(range(vocabulary), k=20_000)
    texts = roll_out(engine, draw_prompts(drawn, n_texts, 0), new_tokens, 0)
    print(engine.stats(), flush=True)
    prefill(runner, texts)
    engine.close()
    return texts


@torch.no_grad()
def compare(model: DeepseekV3, texts: list[Text], device: torch.device) -> Iterator[tuple[str, int, int]]:
    """Yield for prompts and decoded tokens of some texts how many there are, and how many have equal bits."""
    texts = sorted(texts, key=lambda text: len(text.prompt))
    for i in range(0, len(texts), TRAINED_AT_ONCE):
        group = texts[i : i + TRAINED_AT_ONCE]
        rows = [torch.tensor(text.prompt + text.tokens, device=device) for text in group]
        longest = max(map(len, rows))
        tokens_BS = torch.stack([pad(row, (0, longest - len(row))) for row in rows])
        trained = model.log_probs(tokens_BS).cpu()
        for text, trained_S in zip(group, trained, strict=True):
            n, end = len(text.prompt) - 1, len(text.prompt) + len(text.tokens) - 1
            yield "prompts", *equal(torch.tensor(text.read), trained_S[:n])
            yield "decoded", *equal(torch.tensor(text.decoded), trained_S[n:end])


def equal(served: Tensor, trained: Tensor) -> tuple[int, int]:
    return count_equal([served], [trained])[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="+", choices=list(PRESETS))
    parser.add_argument("--texts", type=int, default=1600)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    device, differs = torch.device(options.device), False
    for name in options.presets:
        begin = time.perf_counter()
        model = make_model(name, device)
        texts = sample(model, options.texts, options.new_tokens, device)
        counts = {"prompts": [0, 0], "decoded": [0, 0]}
        for kind, n, same in compare(model, texts, device):
            counts[kind] = [counts[kind][0] + n, counts[kind][1] + same]
        differs |= any(n != same for n, same in counts.values())
        shown = ", ".join(f"{kind} {same:,} of {n:,}" for kind, (n, same) in counts.items())
        print(f"{name}, equal bits: {shown}; {time.perf_counter() - begin:.0f} s", flush=True)
        del model
    sys.exit(differs)


if __name__ == "__main__":
    main()
