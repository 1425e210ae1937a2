"""Read `generation_config.json`, in which transformers stores how the texts of a model are generated.

Its `eos_token_id` end a text besides those of `config.json` and of the tokenizer. Its sampling values are the defaults
of requests that give none. Other fields that would change a text are named, not applied.

Source: transformers' `GenerationConfig`. This module imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from octile.checkpoint.files import GENERATION_CONFIG
from octile.models.config import tokens_of
from octile.serve.engine.request import Sampling
from octile.validation import Range, check_fields, from_json, quoted, read_json

TokenId = Annotated[int, Range(at_least=0)]
NO_EFFECT = {  # on the text
    "transformers_version", "_from_model_config", "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache",
    "cache_implementation", "cache_config", "return_dict_in_generate", "output_scores", "output_logits",
    "output_attentions", "output_hidden_states",
}  # fmt: skip
NEUTRAL_AT_1 = {  # other fields are without effect where they are null, false, 0 or empty
    "encoder_repetition_penalty", "typical_p", "num_beams", "num_beam_groups", "length_penalty",
    "num_return_sequences", "guidance_scale",
}  # fmt: skip


@dataclass(frozen=True)
class GenerationConfig:
    """The fields of `generation_config.json` that octile uses; None where the file does not give one.

    Attributes:
        eos_token_id: tokens that end a text.
        do_sample: false: texts are greedy, whatever the temperature; true without a temperature: it is 1.
        temperature, top_p, min_p, repetition_penalty: fields of `Sampling`.
        top_k: field of `Sampling`; −1 is all tokens, too.

    Raises:
        TypeError, ValueError: a field has another type, or is outside its range.
    """

    eos_token_id: TokenId | tuple[TokenId, ...] | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Range(at_least=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        Sampling(**{**self.sampling, **({} if self.temperature is None else {"temperature": self.temperature})})

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return tokens_of(self.eos_token_id)

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of `Sampling` that are given, by name."""
        temperature = self.temperature
        if self.do_sample is not None:
            temperature = (1.0 if temperature is None else temperature) if self.do_sample else 0.0
        top_k = None if self.top_k is None else max(self.top_k, 0)
        found = {"temperature": temperature, "top_p": self.top_p, "top_k": top_k}
        found |= {"min_p": self.min_p, "repetition_penalty": self.repetition_penalty}
        return {name: value for name, value in found.items() if value is not None}


def read_generation_config(folder: Path, vocab_size: int) -> tuple[GenerationConfig, list[str]]:
    """Read the file of a model's folder, if it has one.

    Args:
        folder: folder of the model.
        vocab_size: tokens of the model.

    Returns:
        what it gives; name and value of each field that would change a text and is not used, for a message.

    Raises:
        ValueError: the file is damaged, or a field has another type or is outside its range; the message names both.
    """
    file = folder / GENERATION_CONFIG
    if not os.path.lexists(file):
        return GenerationConfig(), []
    if not file.is_file():  # a broken link, say: its values would be lost
        raise ValueError(f"{file} is no file that can be read: bring it back, or remove it")
    values = {name: value for name, value in read_json(file).items() if value is not None}
    known = {f.name for f in fields(GenerationConfig)}
    try:
        config = from_json(GenerationConfig, {name: value for name, value in values.items() if name in known})
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    for token in config.end_tokens:
        if token >= vocab_size:
            raise ValueError(f"{file}: eos_token_id must be below vocab_size, {vocab_size}, not {quoted(token)}")
    unused = _unused(config, values, known)
    return config, [f"{name if name.isidentifier() else quoted(name)} {quoted(value)}" for name, value in unused]


def _unused(config: GenerationConfig, values: Mapping[str, Any], known: set[str]) -> list[tuple[str, Any]]:
    """The fields that would change a text and are not used, and a temperature of texts that are greedy."""
    changing = [
        (name, value)
        for name, value in values.items()
        if value and name not in known | NO_EFFECT and not (name in NEUTRAL_AT_1 and value == 1)
    ]
    if config.temperature and config.do_sample is False:
        changing.append(("temperature", config.temperature))
    return changing
