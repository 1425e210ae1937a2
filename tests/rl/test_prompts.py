"""The prompts of a step: a function of seed and step."""

import json

import pytest

from octile.chat.template import ChatTemplate, Rendering
from octile.rl.prompts import ArithmeticPrompts, FilePrompts, Prompt

TEMPLATE = "<|begin|>{{ messages[0].role }}: {{ messages[0].content }}{% if tools %}{{ tools[0].name }}{% endif %}>"
QUESTION = {"role": "user", "content": "1 + 1 <|begin|>"}


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(tokenizer, TEMPLATE)


def write(path, prompts):
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a, _ in prompts))
    return path


def test_additions_of_a_step_depend_on_seed_and_step_alone():
    first = ArithmeticPrompts(3)
    steps = [first.of_step(step, 8) for step in range(3)]
    assert steps[2] == ArithmeticPrompts(3).of_step(2, 8)
    assert len({tuple(step) for step in steps} | {tuple(ArithmeticPrompts(4).of_step(0, 8))}) == 4


def test_the_longest_addition_is_as_long_as_any():
    prompts = ArithmeticPrompts(0)
    lengths = [len(prompt.prompt) for step in range(20) for prompt in prompts.of_step(step, 8)]
    assert max(lengths) == len(prompts.longest()[0].prompt)


def test_each_prompt_of_a_file_comes_once_in_an_epoch_in_another_order(tmp_path, template):
    there = [Prompt(f"p{i}", str(i)) for i in range(10)]
    prompts = FilePrompts(write(tmp_path / "prompts.jsonl", there), 0, template)
    epochs = [[p for step in range(first, first + 5) for p in prompts.of_step(step, 2)] for first in (0, 5)]
    assert all(sorted(epoch) == sorted(there) for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert FilePrompts(tmp_path / "prompts.jsonl", 1, template).of_step(0, 10) != prompts.of_step(0, 10)
    assert prompts.of_step(3, 2) == FilePrompts(tmp_path / "prompts.jsonl", 0, template).of_step(3, 2)
    assert prompts.longest() == there


def test_a_conversation_is_what_the_chat_template_writes_with_its_special_tokens(tmp_path, tokenizer, template):
    tools = [{"name": "add"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [QUESTION], "tools": tools, "prompt": None, "answer": "2"}) + "\n")
    (prompt,) = FilePrompts(file, 0, template).of_step(0, 1)
    assert (prompt.prompt, prompt.answer) == ("<|begin|>user: 1 + 1 <|begin|>add>", "2")
    assert [*prompt.tokens] == template.prompt([QUESTION], Rendering(tools)).tokens
    assert prompt.tokens.count(tokenizer.begin) == 1  # what a message spells is text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no line: each is a JSON object with prompt or messages, and answer"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a"}\n', "line 2: answer must be text, but it is missing"),
        ('{"prompt": 1, "answer": "b"}\n', "line 1: prompt must be text, but it is 1"),
        ('{"prompt": "a", "answer": "\\ud800"}\n', "line 1: answer must be text that UTF-8 can encode"),
        (
            '{"prompt": [], "answer": "b"}\n',
            r"line 1: prompt must be text, but it is \[\]; a conversation is called messages",
        ),
        ('{"answer": "b"}\n', "line 1: prompt must be text, but it is missing; a conversation is called messages"),
        ('{"prompt": "a", "messages": [], "answer": "b"}\n', "line 1: must have prompt or messages, not both"),
        ('{"messages": [], "answer": "b"}\n', r"line 1: messages must be a list of at least one message, not \[\]"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "line 1: answer must be text, but it is missing"),
        (
            '{"messages": [{"role": "user", "content": 1}], "answer": ""}\n',
            r"line 1: messages\[0\].content must be a text, not 1",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "a"}], "answer": ""}\n',
            "line 1: messages must end before the assistant's answer, which is sampled",
        ),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}], "answer": ""}\n',
            "line 1: messages must be text that UTF-8 can encode",
        ),
        ("[1]\n", r"line 1 must hold a JSON object, not \[1\]"),
        ("\n\n{\n", "line 3 is damaged: not JSON at byte"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path, template, content, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        FilePrompts(file, 0, template)


def test_a_line_that_is_too_long_is_refused_before_it_is_read(tmp_path, template):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n')
    with file.open("r+b") as content:
        content.truncate(2**40)  # zeros without a line end, which take no space
    with pytest.raises(ValueError, match=r"prompts\.jsonl', line 2: must have at most 16,777,216 bytes, but has more"):
        FilePrompts(file, 0, template)


def test_a_byte_order_mark_is_skipped(tmp_path, template):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n', encoding="utf-8-sig")
    assert FilePrompts(file, 0, template).longest() == [Prompt("a", "b")]


def test_a_file_that_does_not_exist_is_refused(tmp_path, template):
    with pytest.raises(FileNotFoundError, match="does not exist: name a JSONL file"):
        FilePrompts(tmp_path / "none", 0, template)
