"""Continue one prompt: `octile generate`, and the sample of a training run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Request, RequestFactory, Sampling, exception_of
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.load import Folder
from octile.serve.weights.weights import ServedWeights
from octile.tokenizer import Tokenizer, check_text


def generate_from(
    folder: Path | Folder, prompt: str, sampling: Sampling, device: torch.device | str | None = None
) -> Iterator[str]:
    """Generate text with the model and the tokenizer of a run folder or a Hugging Face folder.

    The prompt's tokens follow those that its tokenizer begins texts with. An empty prompt lets the model begin a text.

    Args:
        folder: folder of the model, or the opened one, whose `Folder.sampling` has the model's defaults.
        prompt: the text to continue.
        sampling: how to continue it.
        device: a GPU if there is one and None is given. Activations are BF16 on a GPU and FP32 on a CPU.

    Raises:
        FileNotFoundError: there is no model or no tokenizer.
        ValueError: a file is damaged, the prompt is no Unicode text or too long for the model's context, or the
            tokenizer is that of another model. The last three are raised before weights are read.
    """
    opened = folder if isinstance(folder, Folder) else Folder.open(folder)
    opened.warn_of_unused()
    request = _request(prompt, opened.tokenizer, opened.model, sampling)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    weights, end_tokens = opened.read_weights(device, drafts=False), opened.generation.end_tokens
    return _generate(weights, opened.tokenizer, request, end_tokens)


def generate_text(
    model: DeepseekV3 | ServedWeights, tokenizer: Tokenizer, prompt: str, sampling: Sampling
) -> Iterator[str]:
    """Generate the continuation of a prompt, as pieces of text when they are complete.

    Raises:
        ValueError: the prompt is no Unicode text, prompt and new tokens exceed the model's context, or the tokenizer is
            that of another model.
        FloatingPointError: a logit is NaN or +Inf, or all are -Inf: a weight is damaged, or the training diverged.
        RuntimeError: the choice of a token has failed otherwise; the message says how.
    """
    return _generate(model, tokenizer, _request(prompt, tokenizer, model.config, sampling))


def _request(prompt: str, tokenizer: Tokenizer, model: ModelConfig, sampling: Sampling) -> Request:
    """Return a request that the model can continue: the prompt, after what its tokenizer begins texts with."""
    check_text("prompt", prompt)
    factory = RequestFactory(model.vocab_size, model.max_position_embeddings)
    (request,) = factory.make(tokenizer.encode_prompt(prompt), sampling)
    return request


def _generate(
    model: DeepseekV3 | ServedWeights,
    tokenizer: Tokenizer,
    request: Request,
    end_tokens: Sequence[int] = (),
) -> Iterator[str]:
    """Generate the continuation of a prompt, as pieces of text when they are complete."""
    n_pages = -(-request.max_length // ModelRunner.page_size)
    runner = ModelRunner(model, n_pages, max_batch=1, max_step_tokens=0)  # one prompt is worth no graphs
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=1), end_tokens)
    engine.submit(request)
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise exception_of(output.error)
            if output.text:
                yield output.text
