"""A byte-level BPE tokenizer: training, encoding, decoding.

Every byte is a token, so that every text can be encoded. Training repeats one step: the most frequent pair of adjacent
tokens becomes a new token. Tokens are never merged across the boundaries of words.
Source: Sennrich et al. (arXiv 1508.07909); on bytes: Radford et al., "Language Models are Unsupervised Multitask
Learners" (2019) §2.2.

Two special tokens represent no bytes: <|begin|> begins a text, <|end|> ends it. If a text contains these strings, they
are encoded as ordinary characters.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octile.added_tokens import FILE as ADDED_TOKENS
from octile.added_tokens import add_tokens, read_added_tokens
from octile.atomic_files import write_json, write_text
from octile.byte_level import byte_of_character
from octile.extras import require
from octile.tiktoken_model import FILE as TIKTOKEN_MODEL
from octile.tiktoken_model import read_tiktoken_model, reserved_tokens

if TYPE_CHECKING:
    import tokenizers

BEGIN, END = "<|begin|>", "<|end|>"
FILES = ("tokenizer.json", TIKTOKEN_MODEL, "tokenizer_config.json", ADDED_TOKENS)  # that a folder may have
CHAT_TEMPLATE = "chat_template.jinja"  # precedes the template in tokenizer_config.json
NAMED_TEMPLATES = "additional_chat_templates"  # a folder: NAME.jinja, as transformers writes them
MIN_VOCAB_SIZE = 256 + 2  # the bytes, and the two special tokens


class Tokenizer:
    """A tokenizer of the package `tokenizers` with tokens for the beginning and the end of a text.

    Attributes:
        backend: the `tokenizers.Tokenizer` itself.
        config: the content of transformers' `tokenizer_config.json`.
        begin, end: the ids of the special tokens; the same id if a tokenizer has only one of them.
        vocab_size: one more than the largest id.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", config: dict[str, Any]):
        vocabulary = backend.get_vocab(with_added_tokens=True)
        end = token_text(config.get("eos_token"))
        begin = token_text(config.get("bos_token")) or end
        for name, token in (("eos_token", end), ("bos_token", begin)):
            if token not in vocabulary:
                what = f"not {token!r}, which it does not have" if token else "but is missing"
                raise ValueError(f"{name} of tokenizer_config.json must be a token of the tokenizer, {what}")
        backend.encode_special_tokens = True  # "<|end|>" inside a text is text
        backend.no_truncation()  # a tokenizer.json may enable both
        backend.no_padding()
        self.backend, self.config = backend, config
        self.begin, self.end = vocabulary[begin], vocabulary[end]
        self.vocab_size = max(vocabulary.values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train a tokenizer of at most `vocab_size` tokens; fewer if no pair of tokens occurs twice.

        The same texts give the same tokenizer.

        Raises:
            ValueError: vocab_size is less than the 256 bytes and the two special tokens.
        """
        check_vocab_size(vocab_size)
        require("tokenizers", extra="train")
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[BEGIN, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))]
        )
        return cls(backend, _config(BEGIN, END))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a `tokenizer.json`, a `tiktoken.model` of Moonshot's, or the folder that contains one.

        A `tokenizer_config.json` in the same folder names the special tokens; otherwise they are <|begin|> and <|end|>.
        Its `added_tokens_decoder` and an `added_tokens.json` add the tokens that the other file lacks.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, the special tokens are missing, or an added token cannot have its id.
        """
        path = Path(path)
        choices = [path / "tokenizer.json", path / TIKTOKEN_MODEL] if path.is_dir() else [path]
        file = next((file for file in choices if file.is_file()), None)
        if file is None:
            what = " or ".join(map(str, choices))
            raise FileNotFoundError(f"tokenizer {str(path)!r}: there is no file {what}")
        require("tokenizers", extra="train")
        config_file = file.with_name("tokenizer_config.json")
        config = _read_config(config_file) if config_file.is_file() else _config(BEGIN, END)
        added = read_added_tokens(config_file, config)
        if file.suffix == ".model":
            backend = read_tiktoken_model(file, config)
            added = reserved_tokens(backend.get_vocab_size()) | added
        else:
            backend = _read_tokenizer_json(file)
        add_tokens(backend, added, str(file.parent))
        try:
            return cls(backend, config)
        except ValueError as error:
            raise ValueError(f"tokenizer {str(path)!r}: {error}") from None

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer reads."""
        write_text(Path(folder, "tokenizer.json"), self.backend.to_str(pretty=True))
        write_json(Path(folder, "tokenizer_config.json"), self.config)

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of everything on which the ids of a text depend."""
        return hashlib.sha256(f"{self.backend.to_str()} {self.begin} {self.end}".encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without <|begin|> and <|end|>."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that a model continues: `prefix` and the text; <|begin|> if there is neither."""
        return [*self.prefix, *self.encode(text)] or [self.begin]

    @cached_property
    def prefix(self) -> list[int]:
        """The ids before a text that a model continues: none with many models.

        They are those that the post-processor of a `tokenizer.json` adds, or else the begin-of-text token where
        `add_bos_token` of a `tokenizer_config.json` is true, as in DeepSeek-V3's folder. transformers 4 did the same;
        transformers 5 ignores that field where there is a `tokenizer.json`.
        """
        marked, plain = (self.backend.encode("a", add_special_tokens=adds).ids for adds in (True, False))
        before = next((i for i in range(len(marked)) if marked[i : i + len(plain)] == plain), 0)
        adds_begin = self.config.get("add_bos_token") is True and bool(token_text(self.config.get("bos_token")))
        return marked[:before] or [self.begin] * adds_begin

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ids, exactly as it was encoded. Special tokens appear as their names."""
        return self.backend.decode(tokens, skip_special_tokens=False)

    @cached_property
    def special_tokens(self) -> frozenset[int]:
        """The ids of special tokens, which represent no text."""
        added = self.backend.get_added_tokens_decoder().items()
        return frozenset(token for token, properties in added if properties.special)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that a text has at least, from its length alone."""
        return -(-len(text.encode()) // self._longest) if self._longest else 0

    @cached_property
    def _longest(self) -> int | None:
        """The bytes of the longest token; None if tokens may leave out some of a text."""
        normalizer = json.loads(self.backend.to_str())["normalizer"]
        shortens = normalizer is not None and normalizer.get("normalizers") != []
        strips = any(token.lstrip or token.rstrip for token in self.backend.get_added_tokens_decoder().values())
        return None if self.token_bytes is None or shortens or strips else max(map(len, self.token_bytes))

    @cached_property
    def token_bytes(self) -> list[bytes] | None:
        """The bytes of each id, which concatenate to those of a text; None if the decoder does more than that."""
        decoder = json.loads(self.backend.to_str())["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":
            return None
        byte_of = byte_of_character()
        texts = [""] * self.vocab_size
        for text, token in self.backend.get_vocab(with_added_tokens=True).items():
            texts[token] = text
        return [bytes(byte_of[c] for c in text) if all(c in byte_of for c in text) else text.encode() for text in texts]


def disable_word_cache(backend: "tokenizers.Tokenizer") -> None:
    """Disable a tokenizer's cache of encoded words, for a process whose memory must not grow.

    `tokenizers` 0.23 caches the first 10,000 words, with up to 8 KB each, in each thread that encodes. Without the
    cache English texts are encoded in 1.2 to 1.3 times the time.
    """
    resize = getattr(backend.model, "_resize_cache", None)  # BPE and Unigram have it
    if resize is not None:
        resize(0)


def check_text(name: str, text: str) -> None:
    """Raise ValueError if a text has lone surrogates, as Python reads arguments that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = os.fsencode(text[error.start])[-1]
        raise ValueError(
            f"{name} must be UTF-8, but character {error.start + 1} begins with the byte 0x{byte:02x}"
        ) from None


def check_vocab_size(vocab_size: int, name: str = "vocab_size") -> None:
    """Raise ValueError if a vocabulary is too small for the bytes and the special tokens; `name` is the argument's."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"{name} must be at least {MIN_VOCAB_SIZE} (256 bytes + 2), not {vocab_size}")


def _read_tokenizer_json(file: Path) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # `tokenizers` raises no narrower type
        raise ValueError(f"tokenizer {file} cannot be read: {error}") from error


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, not {config!r:.50}")
    return config


def _config(begin: str, end: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,  # transformers would otherwise remove spaces before punctuation
    }


def token_text(token: str | dict[str, Any] | None) -> str:
    """The text of a special token in a configuration: a string, a dict with its properties, or None."""
    return token["content"] if isinstance(token, dict) else token or ""
