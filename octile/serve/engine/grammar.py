"""Texts that follow a grammar: of a JSON schema, of a regular expression, of choices, or a context-free one.

    compiler = GrammarCompiler(tokenizer, vocab_size, end_tokens)
    matcher = compiler.start(json_schema({"type": "object"})).result()
    matcher.masks()                 # which tokens may come next, as bits
    matcher.consume(token)          # the token that was chosen

llguidance compiles a grammar to a parser over the vocabulary. That takes a millisecond, and up to a second for the
largest schemas, so it is done in a thread, and the compiled grammar is kept for later requests.

Source: https://github.com/guidance-ai/llguidance, which documents its grammars and what it supports of JSON schemas.
Shapes: V tokens of the model's vocabulary.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from octile.extras import require
from octile.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

MAX_COMPILED = 128  # grammars that are kept
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of every JSON object
WORD = 32  # bits of a mask's word


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """Return the grammar of the JSON texts that a schema allows.

    Raises:
        ValueError: it is no JSON object.
    """
    return _made("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def regex(pattern: str) -> str:
    """Return the grammar of the texts that match a regular expression as a whole."""
    return _made("regex", pattern)


def choice(texts: Sequence[str]) -> str:
    """Return the grammar of some texts."""
    return _made("choice", json.dumps([*texts], ensure_ascii=False))


def context_free(grammar: str) -> str:
    """Return a context-free grammar, written as Lark or as GBNF writes it.

    Raises:
        ValueError: it is neither.
    """
    return _made("grammar", grammar)


def _made(kind: Any, text: str) -> str:
    require("llguidance", extra="serve")
    from llguidance import grammar_from

    return grammar_from(kind, text)


def _in_one_line(message: str) -> str:
    return " ".join(message.split())


class GrammarError(ValueError):
    """A grammar cannot be compiled, or has become too large for the text."""


class Matcher:
    """How far a text has come in its grammar.

    Args:
        matcher: llguidance's, at the beginning of a text.
        vocab_size: V.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int):
        self._matcher, self._words = matcher, -(-vocab_size // WORD)

    def masks(self, drafts: Sequence[int] = ()) -> list[np.ndarray]:
        """Return which tokens may come next, and after each of some drafts: int32 [V / 32] each, a bit for each token.

        After a draft that may not come all tokens may: nothing is chosen there that is kept.
        """
        from llguidance.numpy import fill_next_token_bitmask

        masks = np.full((1 + len(drafts), self._words), -1, dtype=np.int32)
        n_consumed = 0
        for i in range(1 + len(drafts)):
            fill_next_token_bitmask(self._matcher, masks, i)
            if i == len(drafts) or not self._matcher.validate_tokens([drafts[i]]):
                break
            self._matcher.consume_token(drafts[i])
            n_consumed += 1
        if n_consumed:
            self._matcher.rollback(n_consumed)
        return [*masks]

    def consume(self, token: int) -> None:
        """Go on by a token that the mask allows.

        Raises:
            GrammarError: it does not, or the grammar has become too large for the text.
        """
        if not self._matcher.consume_token(token):
            raise GrammarError(_in_one_line(self._matcher.get_error()))

    @property
    def has_ended(self) -> bool:
        """Whether nothing can follow the text."""
        return self._matcher.is_stopped()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Any thread may use it.

    Args:
        tokenizer: the tokenizer.
        vocab_size: tokens of the model, which may be more than the tokenizer's.
        end_tokens: tokens that may come where a text of the grammar is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Collection[int]):
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, sorted(end_tokens)
        self._vocabulary: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(1, "grammars")

    def start(self, grammar: str) -> Future[Matcher]:
        """Compile a grammar in a thread, or take it from those that were compiled.

        The future raises GrammarError if it cannot be compiled.
        """
        return self._threads.submit(self.compile, grammar)

    def compile(self, grammar: str) -> Matcher:
        """Compile a grammar now.

        Raises:
            GrammarError: it cannot be compiled; the message says why.
            ImportError: llguidance is not installed.
        """
        require("llguidance", extra="serve")
        import llguidance

        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = llguidance.LLMatcher(self._read_vocabulary(), grammar, log_level=0)
                if found.is_error():
                    raise GrammarError(_in_one_line(found.get_error()))
                self._compiled[grammar] = found
                while len(self._compiled) > MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(grammar)
            return Matcher(found.deep_copy(), self._vocab_size)

    def special_token(self, text: str) -> int | None:
        """Return the token that has a text and can come nowhere in other text; None if there is none.

        Besides special tokens these are added ones with a name in angle brackets.

        Raises:
            ImportError: llguidance is not installed.
        """
        require("llguidance", extra="serve")
        token = self._tokenizer.backend.token_to_id(text)
        with self._lock:
            is_special = token is not None and self._read_vocabulary().is_special_token(token)
        return token if is_special else None

    def _read_vocabulary(self) -> llguidance.LLTokenizer:
        """Return the vocabulary, which is read once; the caller holds the lock."""
        import llguidance

        if self._vocabulary is None:
            backend = self._tokenizer.backend.to_str()
            self._vocabulary = llguidance.LLTokenizer(backend, self._vocab_size, self._end_tokens)
        return self._vocabulary

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)
