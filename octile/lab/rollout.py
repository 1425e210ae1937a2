"""Whether serving gives a token the log-probability that training computes for it, and where the two begin to differ.

    prompts      prefilled by the engine's model in one piece
    decoded      sampled by the engine, many texts at a time: of various lengths, some with a common beginning
    training     the same texts in `DeepseekV3.log_probs`, each alone

In reinforcement learning the engine samples a text and the trainer weighs its tokens by their probabilities. Where the
two disagree, the gradient is that of another policy. Under `Recipe.exact` and an engine in exact mode all bits agree.

The Kullback-Leibler divergence of training from serving is estimated from the decoded tokens, which serving has
sampled (`octile.rl.batch.estimate_kl`).
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from octile.models.deepseek_v3 import DeepseekV3
from octile.ops.cross_entropy import log_probabilities
from octile.rl.batch import compare_log_probs, estimate_kl
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.engine.stats import Stats
from octile.serve.model.forward import observe_blocks
from octile.serve.runner.batch import Batch, Chunk
from octile.serve.runner.model_runner import ModelRunner

SHARED_EVERY = 3  # of so many prompts one has the common beginning
SHARED = 80  # tokens of it, more than a page
SHORTEST, LONGEST = 1, 200  # tokens of a drawn prompt

Advance = Callable[[int], object]  # called with how many tokens or texts are done in addition


class InexactError(Exception):
    """Serving and training differ, and the engine is in exact mode."""

    exit_code = 1


def no_progress(n: int) -> None:
    """Show nothing."""


@dataclass
class Text:
    """A text that the engine has continued.

    Attributes:
        prompt, tokens: what was given, and what was sampled.
        decoded: log-probability of each sampled token, by the engine.
        read: log-probability of each token of the prompt but the first, by the engine's model.
        differs: whether a log-probability has other bits than that of training; `compare` sets it.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    decoded: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    differs: bool = False


@dataclass(frozen=True)
class Agreement:
    """How far log-probabilities of serving and of training agree.

    Attributes:
        kind: "prompts" or "decoded".
        tokens, equal: how many there are, and how many have equal bits.
        mean, largest: the mean and the largest magnitude of the differences, in nats.
        kl: an estimate of the divergence, in nats a token; None for prompts, which nobody has sampled.
    """

    kind: str
    tokens: int
    equal: int
    mean: float
    largest: float
    kl: float | None


@dataclass(frozen=True)
class Difference:
    """Where the bits of serving and training first differ in a text.

    Attributes:
        text: the text's number.
        position: the first position that differs in the first place that differs.
        where: "block 3", "norm", or "head".
        values: how many of this place's values at this position differ, and of how many.
        largest: the largest difference among them.
    """

    text: int
    position: int
    where: str
    values: tuple[int, int]
    largest: float


@dataclass(frozen=True)
class DraftCounts:
    """What became of the draft tokens of an engine.

    Attributes:
        verified, accepted: draft tokens that were verified, and those of them that were accepted.
        acceptance_rate: the share that was accepted; None if none was verified.
        tokens_per_step: tokens that a step has added to a text on average, 1 if no draft was accepted.
    """

    verified: int
    accepted: int
    acceptance_rate: float | None
    tokens_per_step: float

    @classmethod
    def of(cls, stats: Stats) -> DraftCounts:
        """Count by the statistics of an engine that has generated tokens."""
        verified, accepted, generated = stats.drafted_tokens, stats.accepted_tokens, stats.generated_tokens
        # a step adds the drafts that it accepts, and a token of its own
        return cls(verified, accepted, stats.acceptance_rate, generated / (generated - accepted))


def draw_prompts(tokens: Sequence[int], count: int, seed: int, longest: int = SHARED + LONGEST) -> list[list[int]]:
    """Cut prompts of drawn lengths from tokens; one in three begins with tokens that all of these share.

    Args:
        tokens: what they are cut from.
        count: the number of prompts.
        seed: determines them.
        longest: tokens of a prompt at most; what it would have beyond them is left out.
    """
    rng = random.Random(seed)
    common = list(tokens[: min(SHARED, len(tokens) // 2)])
    prompts = []
    for i in range(count):
        length = min(rng.randint(SHORTEST, LONGEST), len(tokens))
        start = rng.randrange(len(tokens) - length + 1)
        prompt = (common if i % SHARED_EVERY == 0 else []) + list(tokens[start : start + length])
        prompts.append(prompt[:longest])
    return prompts


def count_pages(prompts: Sequence[Sequence[int]], new_tokens: int, max_batch: int) -> int:
    """Return the pages that an engine needs at most to continue prompts, so many at once, without a preemption."""
    pages = (-(-(len(prompt) + new_tokens) // ModelRunner.page_size) for prompt in prompts)
    return sum(sorted(pages, reverse=True)[:max_batch])


def roll_out(
    engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int, advance: Advance = no_progress
) -> list[Text]:
    """Continue prompts by so many sampled tokens each, all of them at once.

    Args:
        engine: without requests.
        prompts, new_tokens: what is continued, and by how many tokens.
        seed: that of the first text; those of the others follow.
        advance: called with the tokens that a step has added.

    Raises:
        RuntimeError: the engine has ended a request with an error.
    """
    texts: dict[int, Text] = {}
    for i, prompt in enumerate(prompts):
        sampling = Sampling(new_tokens, 1.0, seed=seed + i, ignore_eos=True, logprobs=0)
        texts[engine.add(prompt, sampling).id] = Text(list(prompt))
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(output.error)
            texts[output.request_id].tokens += output.tokens
            texts[output.request_id].decoded += [each.logprob for each in output.logprobs]
            advance(len(output.tokens))
    return list(texts.values())


def prefill(runner: ModelRunner, texts: Sequence[Text], advance: Advance = no_progress) -> None:
    """Prefill the prompts alone, and note the log-probabilities of their tokens."""
    for text in texts:
        if len(text.prompt) > 1:
            logits, _ = runner.run(Batch([_chunk(runner, text.prompt, 0, len(text.prompt))]))
            chosen = torch.tensor(text.prompt[1:], device=logits.device)
            text.read = log_probabilities(logits[:-1]).gather(1, chosen[:, None])[:, 0].tolist()
        advance(1)


@torch.no_grad()
def compare(model: DeepseekV3, texts: Sequence[Text], advance: Advance = no_progress) -> list[Agreement]:
    """Compare texts with a model's own log-probabilities, and record in which texts any of them differ.

    Args:
        model: in evaluation mode, as `octile.load` returns it; `DeepseekV3.log_probs` says how it computes on a GPU.
        texts: what the engine has computed.
        advance: called with 1 for each text.
    """
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"prompts": [], "decoded": []}
    for text in texts:
        trained_S = training_log_probs(model, text)
        n = len(text.prompt) - 1
        both = {
            "prompts": (torch.tensor(text.read), trained_S[:n][: len(text.read)]),
            "decoded": (torch.tensor(text.decoded), trained_S[n:]),
        }
        text.differs = any(bool((_bits(a) != _bits(b)).any()) for a, b in both.values())
        for kind, pair in both.items():
            pairs[kind].append(pair)
        advance(1)
    return [_agreement(kind, *map(torch.cat, zip(*found, strict=True))) for kind, found in pairs.items()]


def training_log_probs(model: DeepseekV3, text: Text) -> Tensor:
    """Return the log-probabilities of a text's tokens but the first, on the host: float32 [S − 1]."""
    device = model.lm_head.weight.device
    tokens = torch.tensor([text.prompt + text.tokens], device=device)
    return model.log_probs(tokens)[0].cpu()


def _bits(values: Tensor) -> Tensor:
    """Return the bits of values as float32, which has those of BF16: −0.0 has others than 0.0, a NaN equals itself."""
    return values.float().contiguous().view(torch.int32)


def _agreement(kind: str, served_N: Tensor, trained_N: Tensor) -> Agreement:
    kl = estimate_kl(served_N, trained_N) if kind == "decoded" and len(served_N) else None
    return Agreement(kind, *compare_log_probs(served_N, trained_N), kl)


def first_to_search(texts: Sequence[Text], count: int) -> list[int]:
    """Return the numbers of the texts to search for a difference, at most count: those with `differs` first."""
    return sorted(range(len(texts)), key=lambda i: not texts[i].differs)[:count]


@torch.no_grad()
def find_difference(
    model: DeepseekV3,
    runner: ModelRunner,
    texts: Sequence[Text],
    numbers: Iterable[int] | None = None,
    advance: Advance = no_progress,
) -> Difference | None:
    """Find where the bits of serving and training first differ: text by text, and in a text block by block.

    The runner reads a text's prompt in one piece and then its tokens one by one. Only a text whose results differ there
    is found.

    Args:
        model: in evaluation mode.
        runner: without CUDA graphs.
        texts: whose tokens are read.
        numbers: those of the texts to search, in this order; None: all.
        advance: called with 1 for each text.
    """
    for i in range(len(texts)) if numbers is None else numbers:
        served, trained = _served_places(runner, texts[i]), _trained_places(model, texts[i])
        for where, served_SD in served.items():
            trained_SD = trained[where]
            served_SD = served_SD[: len(trained_SD)]
            differs_SD = _bits(served_SD) != _bits(trained_SD)
            if bool(differs_SD.any()):
                position = int(differs_SD.any(-1).nonzero()[0])
                d_D = (served_SD[position].double() - trained_SD[position].double()).abs()
                return Difference(i, position, where, (int(differs_SD[position].sum()), len(d_D)), float(d_D.max()))
        advance(1)
    return None


def _served_places(runner: ModelRunner, text: Text) -> dict[str, Tensor]:
    """Return what serving computes at each position of a text: the output of each block, the norm's, the logits."""
    places: dict[str, list[Tensor]] = {}

    def note(where: str, x: Tensor) -> None:
        places.setdefault(where, []).append(x.detach().cpu().clone())

    def note_block(rows: int, layer: int, x_TD: Tensor) -> None:
        note(f"block {layer}", x_TD[:rows])

    tokens, n = text.prompt + text.tokens, len(text.prompt)
    for start, end in ((0, n), *((s, s + 1) for s in range(n, len(tokens)))):
        rows = end - start  # of the chunk, which padding follows
        with observe_blocks(partial(note_block, rows)):
            logits, hidden_TD = runner.run(Batch([_chunk(runner, tokens, start, end)]))
        note("norm", hidden_TD[:rows])
        note("head", logits)
    return {where: torch.cat(parts) for where, parts in places.items()}


def _trained_places(model: DeepseekV3, text: Text) -> dict[str, Tensor]:
    """Return the same of a training forward pass, without the last position's logits."""
    places: dict[str, Tensor] = {}
    blocks = list(model.model.layers[: model.config.num_hidden_layers])
    named: list[tuple[str, nn.Module]] = [(f"block {i}", block) for i, block in enumerate(blocks)]
    named += [("norm", model.model.norm), ("head", model.lm_head)]

    def noting(where: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(_: nn.Module, __: object, y: Tensor) -> None:
            places[where] = y.detach()[0].float().cpu() if where == "head" else y.detach()[0].cpu()

        return hook

    handles = [module.register_forward_hook(noting(where)) for where, module in named]
    try:
        training_log_probs(model, text)
    finally:
        for handle in handles:
            handle.remove()
    return places


def _chunk(runner: ModelRunner, tokens: Sequence[int], start: int, end: int) -> Chunk:
    """Return a chunk of a text, which has the first pages of the cache, with all its logits."""
    pages = array("i", range(-(-end // runner.page_size)))
    return Chunk(tokens[start:end], start, pages, end - start)
