"""Tests of the grammars of messages: which texts they take."""

import json
from itertools import product

import pytest

pytest.importorskip("llguidance", reason="octile[serve] is not installed")

import llguidance

from octile.chat.thought import Thought
from octile.serve.engine.grammar import GrammarCompiler, choice, context_free, json_schema, regex
from octile.serve.http.message_grammar import CalledFunction, Calls, message_grammar
from octile.serve.http.tools.formats import FORMATS
from octile.serve.http.tools.parser import ToolParser
from tests.chat.templates import with_tokens

ADD = CalledFunction("add", {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False})
SUB = CalledFunction("sub")
ARE_TOKENS = pytest.mark.parametrize("are_tokens", [True, False], ids=["tags are tokens", "tags are text"])
EACH_FORMAT = pytest.mark.parametrize("name", FORMATS)


class Text:
    """Texts of a vocabulary with the tags of all formats, or with none of them."""

    def __init__(self, tokenizer, are_tokens: bool):
        self.tokenizer = with_tokens(tokenizer) if are_tokens else tokenizer
        self.vocab_size = self.tokenizer.vocab_size
        self.special_token = GrammarCompiler(self.tokenizer, self.vocab_size, [self.tokenizer.end]).special_token

    def is_whole(self, grammar: str, text: str) -> bool:
        """Whether a grammar takes a text, and its end."""
        tokens = [*self.tokenizer.backend.encode(text, add_special_tokens=False).ids, self.tokenizer.end]
        vocabulary = llguidance.LLTokenizer(self.tokenizer.backend.to_str(), self.vocab_size, [self.tokenizer.end])
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.validate_tokens(tokens) == len(tokens)


@pytest.fixture
def text(tokenizer, are_tokens):
    return Text(tokenizer, are_tokens)


def section(name: str, *calls: tuple[str, str]) -> str:
    """Calls as a format writes them."""
    form = FORMATS[name]
    written = []
    for i, (function, arguments) in enumerate(calls):
        between = "".join(f":{i}" if not isinstance(piece, str) else piece for piece in form.before_arguments)
        before, after = "".join(form.before_name), "".join(form.after_arguments)
        written.append(f"{form.call_begin}{before}{function}{between}{arguments}{after}{form.call_end}")
    return form.begin + form.separator.join(written) + form.end


ONE = (("add", '{"x": 1}'),)
TWO = (*ONE, ("sub", '{"any": "é"}'))
WRONG = (("add", '{"y": 1}'),)


@EACH_FORMAT
@ARE_TOKENS
def test_needed_calls_are_all_of_a_message(text, name):
    grammar = message_grammar("", Calls(FORMATS[name], [ADD, SUB], True, True), Thought.NONE, text.special_token)
    assert text.is_whole(grammar, section(name, *ONE))
    assert text.is_whole(grammar, section(name, *TWO))
    for other in ("", "a", section(name, *WRONG), section(name, ("mul", "{}")), f"a{section(name, *ONE)}"):
        assert not text.is_whole(grammar, other)


@EACH_FORMAT
@ARE_TOKENS
def test_the_parser_reads_the_calls_that_the_grammar_takes(text, name):
    parser = ToolParser(FORMATS[name])
    called = parser.push(section(name, *TWO))
    assert [(call.name, call.arguments) for call in called.calls] == [*TWO]
    assert called.content == ""


@EACH_FORMAT
@ARE_TOKENS
def test_without_parallel_calls_there_is_one(text, name):
    grammar = message_grammar("", Calls(FORMATS[name], [ADD, SUB], True, False), Thought.NONE, text.special_token)
    assert text.is_whole(grammar, section(name, *ONE))
    assert not text.is_whole(grammar, section(name, *TWO))


@EACH_FORMAT
@ARE_TOKENS
def test_possible_calls_come_after_any_text(text, name):
    grammar = message_grammar("", Calls(FORMATS[name], [ADD, SUB], False, True), Thought.NONE, text.special_token)
    for whole in ("", "I add.\n<b>", section(name, *ONE), f"I\nadd.{section(name, *TWO)}"):
        assert text.is_whole(grammar, whole)
    for wrong in (section(name, *WRONG), f"I add.{section(name, *WRONG)}", f"{section(name, *ONE)}b"):
        assert not text.is_whole(grammar, wrong)


@ARE_TOKENS
def test_possible_calls_stand_in_the_place_of_content_with_a_grammar(text):
    calls = Calls(FORMATS["deepseek_v31"], [ADD], False, True)
    grammar = message_grammar(json_schema({"type": "integer"}), calls, Thought.NONE, text.special_token)
    assert text.is_whole(grammar, "12")
    assert text.is_whole(grammar, section("deepseek_v31", *ONE))
    for wrong in ("", "a", f"12{section('deepseek_v31', *ONE)}"):
        assert not text.is_whole(grammar, wrong)


@ARE_TOKENS
def test_a_thought_that_has_begun_comes_first(text):
    grammar = message_grammar(regex("[a-c]{2}"), None, Thought.BEGUN, text.special_token)
    for whole in ("</think>ab", "why\n<b></think>\n\nca"):
        assert text.is_whole(grammar, whole)
    for wrong in ("ab", "why</think>", "why</think>ad", "why</think>b</think>ab", "why</think>\n\n\nab"):
        assert not text.is_whole(grammar, wrong)


@ARE_TOKENS
def test_a_possible_thought_has_both_tags(text):
    grammar = message_grammar(regex("[a-c]{2}"), None, Thought.POSSIBLE, text.special_token)
    for whole in ("ab", "<think>why</think>\nab"):
        assert text.is_whole(grammar, whole)
    for wrong in ("why</think>ab", "<think>ab", "<think></think>"):
        assert not text.is_whole(grammar, wrong)


@ARE_TOKENS
@pytest.mark.parametrize(("thought", "is_needed"), [*product(Thought, (True, False))])
def test_calls_follow_a_thought(text, thought, is_needed):
    calls = Calls(FORMATS["deepseek_v3"], [ADD], is_needed, True)
    grammar = message_grammar("", calls, thought, text.special_token)
    before = {Thought.NONE: "", Thought.BEGUN: "why</think>\n", Thought.POSSIBLE: "<think>why</think>"}[thought]
    assert text.is_whole(grammar, before + section("deepseek_v3", *ONE))
    assert not text.is_whole(grammar, before + section("deepseek_v3", *WRONG))


@ARE_TOKENS
@pytest.mark.parametrize(
    ("content", "written"),
    [
        (regex("ab?"), "ab"),
        (choice(["a", "ab"]), "ab"),
        (context_free('start: "a" "b"?'), "ab"),
        (json_schema({"enum": ["a", "ab"]}), '"ab"'),
    ],
    ids=["regex", "choice", "Lark", "JSON"],
)
def test_every_grammar_can_follow_a_thought(text, content, written):
    grammar = message_grammar(content, None, Thought.BEGUN, text.special_token)
    assert text.is_whole(grammar, f"why</think>{written}")
    assert not text.is_whole(grammar, f"why</think>{written}b")


@ARE_TOKENS
def test_content_without_thought_and_calls_has_its_own_grammar(text):
    grammar = regex("[a-c]{2}")
    assert message_grammar(grammar, None, Thought.NONE, text.special_token) == grammar


@ARE_TOKENS
def test_any_text_needs_no_grammar(text):
    assert message_grammar("", None, Thought.BEGUN, text.special_token) == ""


@ARE_TOKENS
def test_a_name_is_no_grammar(text):
    name = 'a"b\\c/d<[0]>'
    calls = Calls(FORMATS["deepseek_v31"], [CalledFunction(name)], True, True)
    grammar = message_grammar("", calls, Thought.NONE, text.special_token)
    assert text.is_whole(grammar, section("deepseek_v31", (name, "{}")))
    assert json.loads(grammar)["grammars"]
