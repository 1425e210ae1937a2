"""`octile generate`: continue a prompt with a trained model."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from octile.options import Positional
from octile.serve.newest_run import newest_run
from octile.signals import importing
from octile.text import escape_control_characters


@dataclass(frozen=True)
class Options:
    """Continue a prompt with a trained model.

    Attributes:
        run: a run folder, or a Hugging Face folder of a DeepSeek-V3 model; the newest under runs/ if not given.
        prompt: the text to continue; an empty one has the model begin a text.
        max_new_tokens: maximum number of tokens to generate.
        temperature: 0 is greedy, 1 samples from the model's distribution. If not given, that of the folder's
            generation_config.json, or 0 without one.
        top_p: sample only from the most likely tokens that together have this probability. If not given, that of
            generation_config.json, or 1.
        seed: seed of the random choices; with temperature 0 there are none.
    """

    run: Positional[Path | None] = None
    prompt: str = "def "
    max_new_tokens: int = 200
    temperature: float | None = None
    top_p: float | None = None
    seed: int = 0


def run(options: Options) -> None:
    """Print the text as it is generated.

    Raises:
        FileNotFoundError: there is no run, no model or no tokenizer.
        ValueError: as for `octile.serve.generate.generate_from`.
    """
    path = options.run or newest_run()
    with importing():
        from octile.serve.generate import generate_from
        from octile.serve.weights.load import Folder

    folder = Folder.open(path)
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(options, name)) is not None}
    sampling = folder.sampling(max_new_tokens=options.max_new_tokens, seed=options.seed, **given)
    pieces = generate_from(folder, options.prompt, sampling)
    show = escape_control_characters if sys.stdout.isatty() else str  # a pipe gets the text itself
    first = next(pieces, "")  # raises before the prompt is printed if it cannot be continued
    print(show(options.prompt + first), end="", flush=True)
    for piece in pieces:
        print(show(piece), end="", flush=True)
    print()
