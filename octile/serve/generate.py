"""Text generation, a token at a time, with a cache of latents. The whole prompt is one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from octile.checkpoint.hugging_face import load, read_model_config
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn import frozen_weights
from octile.serve.request import Sampling
from octile.tokenizer import Tokenizer, check_text


def generate_from(folder: Path, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Generate text with the model and the tokenizer of a run folder or a Hugging Face folder.

    The model reads a begin-of-text token and the prompt. After an empty prompt it begins a text of its own.

    Raises:
        FileNotFoundError: there is no model or no tokenizer.
        ValueError: a file is damaged, the prompt is no Unicode text or too long for the model's context, or the
            tokenizer is that of another model. The last three are raised before weights are read.
    """
    check_text("prompt", prompt)
    inside = folder / "model"
    config = read_model_config(folder)
    tokenizer = Tokenizer.load(inside if inside.is_dir() else folder)
    check_prompt([tokenizer.begin, *tokenizer.encode(prompt)], sampling, config)
    model = load(folder).to("cuda" if torch.cuda.is_available() else "cpu")
    return generate_text(model, tokenizer, prompt, sampling)


def generate_text(model: DeepseekV3, tokenizer: Tokenizer, prompt: str, sampling: Sampling) -> Iterator[str]:
    """Generate the continuation of a prompt, as pieces of text when they are complete.

    Raises:
        ValueError: prompt and new tokens exceed the model's context.
    """
    tokens: list[int] = []
    shown = ""
    for token in generate(model, [tokenizer.begin, *tokenizer.encode(prompt)], sampling, tokenizer.end):
        tokens.append(token)
        text = tokenizer.decode(tokens)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character whose bytes are not complete yet
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(tokens)[len(shown) :]


@torch.inference_mode()
def generate(model: DeepseekV3, prompt: list[int], sampling: Sampling, end: int) -> Iterator[int]:
    """Generate the tokens after the prompt, up to and without the token `end`.

    Raises:
        ValueError: as in `check_prompt`.
    """
    check_prompt(prompt, sampling, model.config)
    model.eval()
    device = next(model.parameters()).device
    random = torch.Generator()
    random.seed() if sampling.seed is None else random.manual_seed(sampling.seed)
    cache = model.new_cache(1, len(prompt) + sampling.max_new_tokens)
    next_tokens = torch.tensor([prompt], device=device)
    with frozen_weights(model):
        for _ in range(sampling.max_new_tokens):
            logits_V = model(next_tokens, cache=cache)[0, -1].float().cpu()
            token = sample_token(logits_V, sampling, random)
            if token == end:
                return
            yield token
            next_tokens = torch.tensor([[token]], device=device)


def check_prompt(prompt: list[int], sampling: Sampling, config: ModelConfig) -> None:
    """Refuse a prompt that a model cannot continue.

    Raises:
        ValueError: the prompt is empty, has a token that the model does not know, or exceeds its context together with
            the new tokens.
    """
    context, unknown = config.max_position_embeddings, [t for t in prompt if not 0 <= t < config.vocab_size]
    if not prompt:
        raise ValueError("prompt must have at least one token")
    if unknown:
        raise ValueError(
            f"prompt has the token {unknown[0]}, but the model's vocabulary has {config.vocab_size}: the tokenizer is "
            "that of another model"
        )
    if len(prompt) + sampling.max_new_tokens > context:
        raise ValueError(
            f"prompt has {len(prompt)} tokens and max_new_tokens is {sampling.max_new_tokens}: together they must not "
            f"exceed the model's context of {context}"
        )


def sample_token(logits_V: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """Choose the next token from logits [V] float32: greedy, or nucleus sampling (Holtzman et al., arXiv 1904.09751).

    Raises:
        FloatingPointError: a logit is NaN, because a weight is damaged or the training diverged.
    """
    if logits_V.isnan().any():
        raise FloatingPointError("the model's logits are NaN: a weight is damaged, or its training diverged")
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, tokens_V = ((logits_V - logits_V.max()) / sampling.temperature).softmax(-1).sort(descending=True)
    before_V = probabilities_V.cumsum(-1) - probabilities_V
    probabilities_V[before_V >= sampling.top_p] = 0.0  # the most likely token always stays
    return int(tokens_V[torch.multinomial(probabilities_V, 1, generator=random)])
