"""Tests of texts that follow a grammar."""

import json
import re
import tomllib
from functools import partial
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel

pytest.importorskip("llguidance", reason="octile[serve] is not installed")

import llguidance

from octile.serve.engine import engine as engine_module
from octile.serve.engine import grammar as grammar_module
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.grammar import GrammarCompiler, GrammarError, choice, context_free, json_schema, regex
from octile.serve.engine.request import FinishReason, Sampling
from octile.tokenizer import Tokenizer
from tests.chat.templates import with_tokens
from tests.serve.engine.test_engine import run
from tests.serve.fake_runner import FakeRunner

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "size": {"type": "integer", "minimum": 3, "maximum": 40},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


@pytest.fixture
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, 330, [tokenizer.end])


def allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def texts(tokenizer, samplings, n_drafts=0, **limits):
    """Text and reason of each request, of a model with random logits."""
    runner = FakeRunner(n_pages=400, vocab_size=330, n_drafts=n_drafts, **limits)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32, n_drafts=n_drafts))
    for i, sampling in enumerate(samplings):
        engine.add([1, 2, i], sampling)
    found = run(engine)
    return [(found[i][1], found[i][2].finish_reason) for i in range(len(samplings))]


def test_a_prepared_compiler_does_not_read_the_vocabulary_again(tokenizer, compiler, monkeypatch):
    compiler.prepare()
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *_: pytest.fail("read again"))
    assert compiler.compile(regex("a")).masks()
    assert compiler.special_token("<|end|>") == tokenizer.end


def test_nothing_is_prepared_where_llguidance_is_missing(compiler, monkeypatch):
    monkeypatch.setattr(grammar_module, "find_spec", lambda _: None)
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *_: pytest.fail("read"))
    compiler.prepare()


def test_a_vocabulary_that_llguidance_cannot_read_is_read_once_and_named_with_each_grammar(monkeypatch):
    words = Tokenizer(tokenizers.Tokenizer(WordLevel({"<|end|>": 0, "yes": 1}, "<|end|>")), {"eos_token": "<|end|>"})
    compiler, read, of = GrammarCompiler(words, 2, [0]), [], llguidance.LLTokenizer
    monkeypatch.setattr(llguidance, "LLTokenizer", lambda *arguments: read.append(arguments) or of(*arguments))
    compiler.prepare()
    for use in (partial(compiler.compile, "a"), partial(compiler.special_token, "yes")):
        with pytest.raises(GrammarError, match=r"^llguidance cannot read the model's tokenizer: can't determine dec"):
            use()
    assert len(read) == 1


@pytest.mark.parametrize("found", ["0.9.9", "1.6.1", "1.6rc1"])
def test_an_old_llguidance_is_refused(compiler, monkeypatch, found):
    monkeypatch.setattr(grammar_module, "_version", lambda _: found)
    what = f'llguidance must be at least 1.7, not {found}: pip install -U "octile[serve]"'
    uses = compiler.prepare, partial(compiler.compile, "a"), partial(compiler.special_token, "a"), partial(regex, "a")
    for use in uses:
        with pytest.raises(ImportError) as error:
            use()
        assert str(error.value) == what


@pytest.mark.parametrize("found", ["1.7", "1.10.0", "2.0rc1"])
def test_a_later_llguidance_is_used(compiler, monkeypatch, found):
    monkeypatch.setattr(grammar_module, "_version", lambda _: found)
    assert compiler.compile(regex("a")).masks()


def test_the_oldest_llguidance_is_that_of_the_extra():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = ".".join(map(str, grammar_module.OLDEST))
    assert f"llguidance>={oldest}" in project["optional-dependencies"]["serve"]


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (regex(r"[0-9]{2,4}-(ab|cd)+!"), r"[0-9]{2,4}-(ab|cd)+!"),
        (choice(["yes", "no", 'say "maybe"']), r'yes|no|say "maybe"'),
        (context_free('start: "(" start ")" | "x"'), r"\(*x\)*"),
        (context_free('root ::= "a" | "b" root'), r"b*a"),
    ],
    ids=["regex", "choice", "Lark", "GBNF"],
)
@pytest.mark.parametrize("n_drafts", [0, 2])
def test_texts_follow_a_grammar(tokenizer, grammar, pattern, n_drafts):
    samplings = [Sampling(200, 1.0, seed=seed, grammar=grammar) for seed in range(6)]
    for text, reason in texts(tokenizer, samplings, n_drafts):
        assert reason == FinishReason.STOP
        assert re.fullmatch(pattern, text), text


@pytest.mark.one_case
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("n_drafts", [0, 1, 3])
def test_texts_are_the_json_of_a_schema(tokenizer, n_drafts, temperature):
    samplings = [Sampling(300, temperature, seed=seed, grammar=json_schema(SCHEMA)) for seed in range(8)]
    ended = [text for text, reason in texts(tokenizer, samplings, n_drafts) if reason == FinishReason.STOP]
    assert ended
    for text in ended:
        found = json.loads(text)
        assert sorted(found) == ["name", "size", "tags"]
        assert (len(found["name"]) <= 8, 3 <= found["size"] <= 40) == (True, True)
        assert 1 <= len(found["tags"]) <= 3
        assert set(found["tags"]) <= {"red", "green"}


@pytest.mark.one_case
@pytest.mark.parametrize("n_drafts", [0, 2])
def test_a_text_of_a_grammar_is_the_same_alone_and_next_to_others(tokenizer, n_drafts):
    grammars = [json_schema(SCHEMA), "", regex("(abc|de)*f"), ""]
    samplings = [Sampling(40, 1.0, seed=seed, grammar=grammar) for seed, grammar in enumerate(grammars)]
    together = texts(tokenizer, samplings, n_drafts)
    for i, sampling in enumerate(samplings):
        runner = FakeRunner(n_pages=400, vocab_size=330, max_ahead=4)
        engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
        engine.add([1, 2, i], sampling)
        ((_, text, last),) = run(engine).values()
        assert (text, last.finish_reason) == together[i]


def test_a_text_that_is_cut_says_so(tokenizer):
    ((text, reason),) = texts(tokenizer, [Sampling(5, 1.0, seed=1, grammar=json_schema(SCHEMA))])
    assert reason == FinishReason.LENGTH
    with pytest.raises(json.JSONDecodeError):
        json.loads(text)


BLANKS = [
    ('{"a":[1,2]}', True),
    ('{"a": [1, 2]}', True),
    ('{\n    "a": [\n        1,\n        2\n    ]\n}', True),
    ('{\n\t"a": []\n}', True),
    ('{  "a": []}', False),
    ('{\n\n"a": []}', False),
]


@pytest.mark.parametrize(("written", "is_allowed"), BLANKS)
def test_json_has_the_blanks_of_pretty_printed_json(compiler, tokenizer, written, is_allowed):
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    matcher = compiler.compile(json_schema(schema))
    assert takes(matcher, tokenizer.encode(written)) == is_allowed


def takes(matcher, tokens) -> bool:
    """Whether a matcher takes all tokens, as the masks say."""
    for token in tokens:
        if token not in allowed(matcher.masks()[0]):
            return False
        matcher.consume(token)
    return True


@pytest.mark.parametrize(
    "grammar",
    [
        choice(["a<think>b"]),
        regex("a<think>b"),
        json_schema({"const": "a<think>b"}),
        context_free('start: "a<think>b"'),
        context_free('start: %json {"const": "a\\u003cthink>b"}'),
    ],
    ids=["choice", "regex", "JSON", "Lark", "escaped"],
)
def test_text_that_spells_a_special_token_is_text(tokenizer, grammar):
    spelled = with_tokens(tokenizer)
    matcher = GrammarCompiler(spelled, spelled.vocab_size, [spelled.end]).compile(grammar)
    quote = '"' * ("const" in grammar)
    tokens = [token for part in (f"{quote}a<th", f"ink>b{quote}") for token in spelled.encode(part)]
    assert takes(matcher, tokens)


@pytest.mark.parametrize(
    ("schema", "message"),
    [("[]", "the schema must be an object"), ("[" * 100_000, "the schema is nested too deeply"), ("{", "Expecting")],
    ids=["list", "deep", "no JSON"],
)
def test_a_text_that_is_no_schema_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        json_schema(schema)


@pytest.mark.one_case
@pytest.mark.parametrize("multiple", [0.01, 0.25, 5, 1.0, 1e-7, 99_999, 1.5e3])
def test_common_multiples_are_followed(compiler, multiple):
    assert compiler.compile(json_schema({"type": "number", "multipleOf": multiple}))


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema({"multipleOf": 100_003}),
        json_schema({"multipleOf": 1e300}),
        json_schema({"multipleOf": 0.12345678}),
        json_schema({"properties": {"a": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}}}),
        context_free('start: %json {"multiple\\u004ff": 99999989}'),
    ],
    ids=["integer", "exponent", "digits", "together", "escaped"],
)
def test_multiples_that_take_too_much_memory_are_refused(compiler, grammar):
    with pytest.raises(
        GrammarError, match=r"the least common multiple of all multipleOf, without their points, must be"
    ):
        compiler.compile(grammar)


def test_a_grammar_that_is_compiled_does_not_wait_for_another(compiler, monkeypatch):
    compiler.compile(choice(["a"]))
    has_begun, may_end = Event(), Event()
    right = GrammarCompiler._compile

    def wait_and_compile(self, grammar):
        has_begun.set()
        may_end.wait(30)
        return right(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "_compile", wait_and_compile)
    slow = compiler.start(choice(["b"]))
    has_begun.wait(30)
    assert compiler.compile(choice(["a"]))
    assert not slow.done()
    may_end.set()
    assert slow.result()


def test_a_text_ends_with_its_grammar_where_end_tokens_are_ignored(tokenizer):
    sampling = Sampling(50, 1.0, seed=1, grammar=choice(["done"]), ignore_eos=True)
    assert texts(tokenizer, [sampling]) == [("done", FinishReason.STOP)]


def test_an_end_token_after_a_grammar_is_no_part_of_the_text_where_they_are_ignored(tokenizer):
    likely = ((tokenizer.end, 100.0),)
    sampling = Sampling(50, 1.0, grammar=regex("[0-9]{1,3}"), ignore_eos=True, logit_bias=likely)
    assert [len(text) for text, _ in texts(tokenizer, [sampling])] == [1]


def test_what_nothing_may_follow_is_an_error_of_its_request(tokenizer):
    (letter,) = tokenizer.encode("x")
    sampling = Sampling(50, grammar=regex("x"), bad_words=((letter,),))
    runner = FakeRunner(vocab_size=330)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
    engine.add([1], sampling)
    ((_, _, last),) = run(engine).values()
    assert last.error.startswith("no token may come next: the grammar, bad_words or min_tokens forbid all")
    assert last.is_request_error


def test_masks_after_drafts_are_those_after_tokens(compiler, tokenizer):
    tokens = tokenizer.encode("ab1")
    matcher, other = (compiler.compile(regex("[ab]+[0-9]c")) for _ in range(2))
    masks = matcher.masks(tokens)
    for mask, token in zip(masks, [*tokens, None], strict=True):
        (expected,) = other.masks()
        assert allowed(mask) == allowed(expected)
        if token is not None:
            other.consume(token)
    assert allowed(matcher.masks()[0]) == allowed(masks[0])


def test_after_a_draft_that_may_not_come_all_tokens_may(compiler, tokenizer):
    x, a = tokenizer.encode("x") + tokenizer.encode("a")
    masks = compiler.compile(regex("ab")).masks([x, a])
    assert a in allowed(masks[0])
    assert x not in allowed(masks[0])
    assert (masks[1] == -1).all()


def test_a_compiled_grammar_begins_anew_for_each_text(compiler, tokenizer):
    grammar = choice(["ab"])
    first = compiler.compile(grammar)
    for token in tokenizer.encode("ab"):
        first.consume(token)
    assert first.has_ended
    assert not compiler.compile(grammar).has_ended


def test_a_token_that_the_grammar_does_not_allow_is_an_error(compiler, tokenizer):
    with pytest.raises(GrammarError):
        compiler.compile(choice(["ab"])).consume(tokenizer.encode("x")[0])


@pytest.mark.parametrize("grammar", ["start: (", regex("("), json_schema({"type": "fruit"})])
def test_what_is_no_grammar_is_refused(compiler, grammar):
    with pytest.raises(GrammarError):
        compiler.start(grammar).result()


ENDLESS = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


@pytest.mark.parametrize("grammar", [json_schema(ENDLESS), context_free("root ::= root")])
def test_a_grammar_without_a_text_is_refused(compiler, grammar):
    with pytest.raises(GrammarError, match=r"^no text can follow it$"):
        compiler.compile(grammar)


def test_errors_do_not_repeat_a_whole_grammar(compiler):
    with pytest.raises(GrammarError) as caught:
        compiler.compile("start: " + 1000 * "(" + '"a"' + 1000 * ")")
    assert len(str(caught.value)) <= 300


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(tokenizer):
    engine = Engine(FakeRunner(vocab_size=330), tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
    engine.add([1], Sampling(5, ignore_eos=True, grammar="start: ("))
    engine.add([1, 2], Sampling(5, ignore_eos=True))
    found = run(engine)
    assert found[0][2].error.startswith("grammar: ")
    assert found[0][2].is_request_error
    assert (len(found[1][0]), found[1][2].error) == (5, None)
    assert (engine.stats().failed, engine.stats().used_pages) == (1, 0)


def test_an_unexpected_error_of_a_grammar_ends_its_request_without_text(tokenizer, monkeypatch):
    def fail(self, grammar):
        raise RuntimeError("out of threads")

    monkeypatch.setattr(GrammarCompiler, "compile", fail)
    engine = Engine(FakeRunner(vocab_size=330), tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
    constrained = engine.add([1], Sampling(5, ignore_eos=True, grammar=choice(["ab"])))
    other = engine.add([1, 2], Sampling(5, ignore_eos=True))
    found = run(engine)
    assert not found[constrained.id][0]
    assert found[constrained.id][2].error == "grammar: RuntimeError: out of threads"
    assert not found[constrained.id][2].is_request_error
    assert len(found[other.id][0]) == 5
    assert (engine.stats().failed, engine.stats().used_pages) == (1, 0)


class SlowCompiler(GrammarCompiler):
    """Compiles when it is told to."""

    may_end = Event()

    def compile(self, grammar):
        self.may_end.wait(30)
        return super().compile(grammar)


@pytest.fixture
def slow(monkeypatch):
    SlowCompiler.may_end.clear()
    monkeypatch.setattr(engine_module, "GrammarCompiler", SlowCompiler)
    yield SlowCompiler.may_end
    SlowCompiler.may_end.set()


def test_other_requests_run_while_a_grammar_is_compiled(tokenizer, slow):
    engine = Engine(FakeRunner(vocab_size=330, max_ahead=4), tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
    waiting = engine.add([1], Sampling(5, grammar=choice(["ab"])))
    other = engine.add([1, 2], Sampling(5, ignore_eos=True))
    while engine.get(other.id) is not None:
        engine.step()
    assert engine.step() == []
    assert waiting.n_generated == 0
    slow.set()
    assert run(engine)[waiting.id][1] == "ab"


def test_a_request_that_waits_for_its_grammar_can_be_canceled(tokenizer, slow):
    engine = Engine(FakeRunner(vocab_size=330), tokenizer, EngineConfig(max_batch=4, max_step_tokens=32))
    request = engine.add([1], Sampling(5, grammar=choice(["ab"])))
    engine.step()
    assert engine.cancel(request.id)
    assert not engine.has_work
    assert engine.stats().canceled == 1
