"""Sample completions with an engine: those of a step depend on the weights, the prompts and (seed, step) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octile.rl.prompts import Prompt
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling, exception_of
from octile.tokenizer import Tokenizer


@dataclass
class Completion:
    """A completion of a prompt.

    Attributes:
        prompt: the prompt, and the answer.
        prompt_tokens: its tokens, with those that begin a prompt.
        tokens: the sampled tokens, with the end-of-text token if there is one: it was sampled, too.
        log_probs: the engine's log-probability of each of them.
        text: the text of the sampled tokens, without that of the end-of-text token.
        is_ended: whether the completion has ended before it was cut off.
    """

    prompt: Prompt
    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    text: str = ""
    is_ended: bool = False


def sampling_seeds(seed: int, step: int, count: int) -> list[int]:
    """Return the seeds of the completions of a step."""
    words = np.random.SeedSequence((seed, step)).generate_state(count, np.uint64)
    return [int(word) for word in words >> np.uint64(1)]  # below 2⁶³, as `Sampling` takes them


def sample_groups(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    group_size: int,
    max_new_tokens: int,
    seeds: Sequence[int],
) -> list[Completion]:
    """Sample completions at temperature 1, all of them at once.

    Args:
        engine: without requests.
        tokenizer: encodes prompts and decodes completions.
        prompts: what is continued.
        group_size: completions of each prompt.
        max_new_tokens: maximum number of tokens of a completion.
        seeds: the seed of each completion.

    Returns:
        The completions of the first prompt, those of the second, and so on.

    Raises:
        FloatingPointError: the engine has ended a completion, because logits are not finite.
        RuntimeError: the choice of a token has failed otherwise, as where memory has run out; the message says how.
    """
    found: dict[int, Completion] = {}
    numbers = iter(seeds)
    for prompt in prompts:
        prompt_tokens = tokenizer.encode_prompt(prompt.prompt) if prompt.tokens is None else [*prompt.tokens]
        for _ in range(group_size):
            sampling = Sampling(max_new_tokens, 1.0, seed=next(numbers), logprobs=0)
            found[engine.add(prompt_tokens, sampling).id] = Completion(prompt, prompt_tokens)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise exception_of(output.error)
            completion = found[output.request_id]
            completion.tokens += output.tokens
            completion.log_probs += [each.logprob for each in output.logprobs]
            if output.end_token is not None and output.end_logprobs is not None:
                completion.tokens.append(output.end_token)
                completion.log_probs.append(output.end_logprobs.logprob)
                completion.is_ended = True
    for completion in found.values():
        completion.text = tokenizer.decode(completion.tokens[: len(completion.tokens) - completion.is_ended])
    return list(found.values())
