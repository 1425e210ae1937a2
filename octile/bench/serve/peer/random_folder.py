"""A Hugging Face folder with random weights of V2-Lite's shape, which octile and other engines load unchanged."""

from __future__ import annotations

import string
import tempfile
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import torch
from torch import Tensor

from octile.bench.serve.random_weights import random_tensor
from octile.checkpoint.hugging_face import Weights, write_folder
from octile.extras import require
from octile.models.config import ModelConfig
from octile.models.meta import checkpoint_shapes
from octile.tokenizer import MIN_VOCAB_SIZE, Tokenizer, check_vocab_size

V2_LITE_WIDTH = 11008  # of the dense layer, for 10,944: vLLM takes FP8 weights of SwiGLU in whole blocks of 128 rows
V2_LITE = replace(ModelConfig.v2_lite_16b(), intermediate_size=V2_LITE_WIDTH, bos_token_id=0, eos_token_id=1)


def write_random_folder(
    folder: Path,
    config: ModelConfig,
    weights: Weights,
    device: torch.device | str = "cpu",
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model with random weights and a tokenizer. The same arguments give the same weights.

    Args:
        folder: created if it does not exist.
        config: configuration of the model.
        weights: "fp8" or "bf16"; both are roundings of the same values.
        device: where the values are made.
        tokenizer: the tokenizer; None: `letter_tokenizer` of the model's vocabulary.

    Raises:
        ImportError: the package tokenizers is missing.
        ValueError, OSError: as `octile.checkpoint.hugging_face.save`, or the vocabulary is too small.
    """
    tokenizer = tokenizer or letter_tokenizer(config.vocab_size)
    shapes, generator = checkpoint_shapes(config), torch.Generator(device).manual_seed(0)

    def read(name: str) -> Tensor:
        return random_tensor(name, shapes[name], generator)

    with tempfile.TemporaryDirectory() as other:
        tokenizer.save(Path(other))
        write_folder(folder, config, shapes, read, weights, sorted(Path(other).iterdir()))


def letter_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer of the bytes and of groups of two to four letters, so that random tokens are text.

    Raises:
        ImportError: the package tokenizers is missing.
        ValueError: vocab_size is less than the 256 bytes and the two special tokens.
    """
    check_vocab_size(vocab_size)
    require("tokenizers", extra="train")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    empty = Tokenizer.train([], MIN_VOCAB_SIZE)
    letters = string.ascii_lowercase
    pairs = ["".join(pair) for pair in product(letters, repeat=2)]
    groups = (*product(letters, letters), *product(pairs, letters), *product(pairs, pairs))
    merges = list(islice(groups, vocab_size - MIN_VOCAB_SIZE))
    vocabulary = empty.backend.get_vocab() | {a + b: MIN_VOCAB_SIZE + i for i, (a, b) in enumerate(merges)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([empty.decode([empty.begin]), empty.decode([empty.end])])
    return Tokenizer(backend, empty.config)
