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
import math
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from decimal import Decimal
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from octile.extras import require
from octile.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

OLDEST = 1, 7  # version of llguidance, as in pyproject.toml: it takes several end tokens
MAX_COMPILED = 128  # grammars that are kept
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of every JSON object
WORD = 32  # bits of a mask's word
BLANKS = r"(\n[ \t]{0,32}| )?"  # between two parts of JSON: those of pretty-printed JSON, and not any number of them
MAX_MULTIPLE = 100_000  # a parser has a state for each remainder: 70 MB and 0.6 s
MULTIPLE_OF = re.compile(r"""multipleOf\\*"\s*:\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)""")
ESCAPED = re.compile(r"\\+u([0-9a-fA-F]{4})")
MAX_MESSAGE = 300  # characters of what llguidance says, which may repeat a whole grammar
NO_FORCING = '%llguidance {"no_forcing": true}\n'


def json_schema(schema: Mapping[str, Any] | str) -> str:
    """Return the grammar of the JSON texts that a schema allows, with the blanks of pretty-printed JSON.

    Raises:
        ValueError: it is no JSON object, or nested too deeply.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"the schema must be an object, not {json.dumps(value)[:60]}")
    return _made("json_schema", json.dumps(with_blanks(value)))


def with_blanks(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema that says which blanks its JSON has, unless it does so itself.

    A model that may write any number of blanks can go on with them to its limit of tokens.
    """
    return {"x-guidance": {"whitespace_pattern": BLANKS}, **schema}


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
    require_llguidance()
    from llguidance import grammar_from

    return grammar_from(kind, text)


def require_llguidance() -> None:
    """Check that llguidance is installed, in a version that octile can use.

    Raises:
        ImportError: it is not.
    """
    require("llguidance", extra="serve")
    found = _version("llguidance")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ImportError(f'llguidance must be at least {needed}, not {found}: pip install -U "octile[serve]"')


@cache
def _version(package: str) -> str:
    return version(package)  # reads a file


def _in_one_line(message: str) -> str:
    """What llguidance says, without the state of its parser."""
    if message.startswith("NoExtensionBias"):
        return "no text can follow it"
    return " ".join(message.partition("<state>")[0].split())[:MAX_MESSAGE]


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
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(1, "grammars")

    def prepare(self) -> None:
        """Read the vocabulary now, not with the first grammar, if llguidance is installed and can read it.

        With 129,280 tokens it takes 0.6 s, in which no other thread of the process runs.

        Raises:
            ImportError: llguidance is too old.
        """
        if find_spec("llguidance") is not None:
            require_llguidance()
            with suppress(GrammarError):  # it is that of each grammar
                _ = self._special_names

    def start(self, grammar: str) -> Future[Matcher]:
        """Compile a grammar in a thread, or take it from those that were compiled.

        The future raises GrammarError if it cannot be compiled.
        """
        return self._threads.submit(self.compile, grammar)

    def compile(self, grammar: str) -> Matcher:
        """Compile a grammar now.

        Raises:
            GrammarError: it cannot be compiled; the message says why.
            ImportError: llguidance is not installed, or too old.
        """
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:  # others need not wait for it
            found = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return Matcher(found.deep_copy(), self._vocab_size)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        require_llguidance()
        import llguidance

        decoded = ESCAPED.sub(lambda match: chr(int(match[1], 16)), grammar)
        _check_multiples(decoded)
        if any(name in decoded for name in self._special_names):
            grammar = _without_forcing(grammar)
        found = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if not found.is_error():
            found.compute_bitmask()  # some errors are found with the first one
        if found.is_error():
            raise GrammarError(_in_one_line(found.get_error()))
        return found

    def special_token(self, text: str) -> int | None:
        """Return the token that has a text and can come nowhere in other text; None if there is none.

        Besides special tokens these are added ones with a name in angle brackets.

        Raises:
            GrammarError: llguidance cannot read the vocabulary.
            ImportError: llguidance is not installed, or too old.
        """
        require_llguidance()
        token = self._tokenizer.backend.token_to_id(text)
        return token if token is not None and self._vocabulary.is_special_token(token) else None

    @property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        if isinstance(self._read_vocabulary, str):
            raise GrammarError(self._read_vocabulary)
        return self._read_vocabulary

    @cached_property
    def _read_vocabulary(self) -> llguidance.LLTokenizer | str:
        """The vocabulary, or why llguidance cannot read it."""
        import llguidance

        try:
            return llguidance.LLTokenizer(self._tokenizer.backend.to_str(), self._vocab_size, self._end_tokens)
        except ValueError as error:  # of words, for example, whose spaces it does not know
            return f"llguidance cannot read the model's tokenizer: {_in_one_line(str(error))}"

    @cached_property
    def _special_names(self) -> list[str]:
        """The texts of special tokens, as `special_token` has them."""
        added = self._tokenizer.backend.get_added_tokens_decoder()
        return [token.content for i, token in added.items() if self._vocabulary.is_special_token(i)]

    def close(self) -> None:
        """End the thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_multiples(grammar: str) -> None:
    """Refuse multiples for which a parser would have too many states; those of several schemas may be combined.

    Raises:
        GrammarError: it has some.
    """
    if math.lcm(*map(_digits, MULTIPLE_OF.findall(grammar))) > MAX_MULTIPLE:
        what = "the least common multiple of all multipleOf, without their points,"
        raise GrammarError(f"{what} must be at most {MAX_MULTIPLE}")


def _digits(number: str) -> int:
    """A decimal number without its point and the zeros behind it, as 1.50 is 15; too much if it is no number."""
    try:
        _, digits, exponent = Decimal(number).normalize().as_tuple()
    except ArithmeticError:
        return MAX_MULTIPLE + 1
    shift = max(int(exponent), 0)
    if len(digits) + shift > len(str(MAX_MULTIPLE)):
        return MAX_MULTIPLE + 1
    return int("".join(map(str, digits))) * 10**shift or 1


def _without_forcing(grammar: str) -> str:
    """Return a grammar that does not force the tokens of a text with one spelling.

    Where only one text can follow, llguidance allows its usual tokens alone. If the text spells a special token that is
    this token, which then is none of the text.
    """
    if not grammar.lstrip().startswith("{"):
        return NO_FORCING + grammar
    first, *others = json.loads(grammar)["grammars"]
    if first.get("lark_grammar"):
        first["lark_grammar"] = NO_FORCING + first["lark_grammar"]
        return json.dumps({"grammars": [first, *others]})
    outer = {"lark_grammar": f"{NO_FORCING}start: @content"}
    return json.dumps({"grammars": [outer, {**first, "name": "content"}, *others]})
