"""Fields of chats that OpenAI's client does not have: it sends them, and the server answers."""

import json

import openai
import pytest

from octile.serve.http.config import Parsers
from tests.chat.templates import R1, V31, with_tokens


@pytest.fixture
def chat(serve, tokenizer):
    """Ask for a chat completion of a server with a template."""

    def ask(template: str, content: str = "a", stream: bool = False, parsers=Parsers(), answer=None, **fields):  # noqa: B008
        served = serve(template=template, tokenizer=with_tokens(tokenizer), parsers=parsers, answer=answer)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            fields = {"max_tokens": 20 if answer is None else 1000, **fields}
            messages = fields.pop("messages", [{"role": "user", "content": content}])
            answered = client.chat.completions.create(model="micro", messages=messages, stream=stream, **fields)
            return list(answered) if stream else answered

    return ask


def text_of(answer) -> str:
    """The text of an answer, which begins with the prompt: the engine repeats it."""
    return answer.choices[0].message.content


def test_thinking_is_turned_on(chat):
    answer = chat(V31, extra_body={"chat_template_kwargs": {"thinking": True}})
    assert text_of(answer).startswith("<|begin|><｜User｜>a<｜Assistant｜><think><|begin|>")


def test_a_message_is_continued(chat):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = chat(V31, messages=messages, extra_body={"add_generation_prompt": False, "continue_final_message": True})
    assert text_of(answer).startswith("<|begin|><｜User｜>a<｜Assistant｜></think>b<|begin|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"continue_final_message": True}, "continue_final_message needs add_generation_prompt false"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message needs add_generation",
        ),
        ({"chat_template": "{{ messages }}"}, "chat_template is not taken from a request"),
        ({"documents": [{"text": "a"}]}, "documents must be empty, not a list of 1 items"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs must not have tools"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object, not []"),
        ({"reasoning_effort": "high"}, "reasoning_effort must be 'none' for this model: the chat template does not"),
        ({"reasoning_effort": "none"}, "reasoning_effort must not be 'none': the chat template does not read it"),
        (
            {"reasoning_effort": "huge"},
            "reasoning_effort must be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or",
        ),
    ],
)
def test_what_a_template_does_not_do_is_refused(chat, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(R1, extra_body=fields)
    assert caught.value.body["message"].startswith(message)
    assert caught.value.param == message.split()[0]


@pytest.mark.one_case
@pytest.mark.parametrize("fields", [{"documents": []}, {"reasoning_effort": "none"}, {"chat_template": None}])
def test_what_changes_nothing_is_accepted(chat, fields):
    assert text_of(chat(V31, extra_body=fields)) == text_of(chat(V31))


THINKING = {"chat_template_kwargs": {"thinking": True}}
R1_PARSER = Parsers(reasoning="deepseek_r1")


def joined(chunks, field: str) -> str:
    return "".join(getattr(chunk.choices[0].delta, field, None) or "" for chunk in chunks)


@pytest.mark.parametrize(
    ("fields", "text"),
    [(THINKING, "why</think>because"), ({}, "<think>why</think>because")],
    ids=["the prompt begins the thought", "the text begins it"],
)
def test_a_thought_is_reasoning_content(chat, fields, text):
    answer = chat(V31, answer=list(text), parsers=R1_PARSER, extra_body=fields).choices[0]
    assert (answer.message.reasoning_content, answer.message.content) == ("why", "because")
    assert answer.finish_reason == "stop"


def test_a_streamed_thought_is_in_deltas(chat):
    chunks = chat(R1, answer=list("why</think>because"), parsers=R1_PARSER, stream=True)
    assert (joined(chunks, "reasoning_content"), joined(chunks, "content")) == ("why", "because")
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_delta_that_the_parser_holds_back_is_no_chunk(chat):
    chunks = chat(R1, answer=list("</think>because"), parsers=R1_PARSER, stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks[1:]]
    assert all(delta.content for delta in deltas)


def test_a_held_delta_has_its_log_probabilities(chat):
    chunks = chat(R1, answer=list("</think>b"), parsers=R1_PARSER, stream=True, logprobs=True)
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks[1:]) == len("</think>b")


def test_a_thought_without_an_end_is_no_answer(chat):
    answer = chat(R1, answer=list("why</thi"), parsers=R1_PARSER, max_tokens=6).choices[0]
    assert (answer.message.reasoning_content, answer.message.content) == ("why</t", None)
    assert answer.finish_reason == "length"


def test_an_answer_without_a_thought(chat):
    message = chat(V31, answer=list("because"), parsers=R1_PARSER).choices[0].message
    assert (message.reasoning_content, message.content) == (None, "because")


def test_without_a_parser_tags_are_text(chat):
    message = chat(R1, answer=list("why</think>because")).choices[0].message
    assert message.content == "why</think>because"
    assert "reasoning_content" not in message.model_extra


def test_each_choice_has_its_thought(chat):
    choices = chat(R1, answer=list("why</think>because"), parsers=R1_PARSER, n=2).choices
    assert [(c.message.reasoning_content, c.message.content) for c in choices] == [("why", "because")] * 2


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_of_history_is_for_the_template(chat, name):
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.content }};{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "why"}]
    assert text_of(chat(source, messages=messages, max_tokens=30)).startswith("||a;why|why|b;")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": "a", "reasoning_content": "b"}, "reasoning_content is only for messages of the"),
        ({"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"}, "reasoning and reasoning_"),
    ],
    ids=["of a user", "two"],
)
def test_a_thought_in_a_wrong_place_is_refused(chat, message, problem):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(R1, messages=[message])
    assert caught.value.body["message"].startswith(f"messages.0.{problem}")


TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"type": "object"}}}
V31_PARSERS = Parsers("deepseek_r1", "deepseek_v31")
CALLS = (
    "<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": "é"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
NAMED = [("add", '{"x": "é"}'), ("sub", "{}")]


def named(calls) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls]


def test_calls_are_answered(chat):
    answer = chat(V31, answer=[f"I add.{CALLS}"], parsers=V31_PARSERS, tools=[TOOL]).choices[0]
    assert (answer.message.content, named(answer.message.tool_calls)) == ("I add.", NAMED)
    assert len({call.id for call in answer.message.tool_calls}) == 2
    assert {call.type for call in answer.message.tool_calls} == {"function"}
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("size", [1, 3, 1000], ids=["by characters", "by three", "at once"])
def test_calls_are_streamed(chat, size):
    text = f"why</think>I add.{CALLS}"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    chunks = chat(V31, answer=pieces, parsers=V31_PARSERS, tools=[TOOL], stream=True, extra_body=THINKING)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert (joined(chunks, "reasoning_content"), joined(chunks, "content")) == ("why", "I add.")
    assert (named(calls), [call.index for call in calls]) == (NAMED, [0, 1])
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


def test_tools_are_in_the_prompt(chat):
    text = text_of(chat(V31, parsers=V31_PARSERS, tools=[TOOL], max_tokens=200))
    assert f"## Tools\n{json.dumps(TOOL)}\n<｜User｜>a" in text


def test_the_first_call_alone_is_answered_without_parallel_calls(chat):
    answer = chat(V31, answer=[CALLS], parsers=V31_PARSERS, tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert (answer.message.content, named(answer.message.tool_calls)) == (None, NAMED[:1])


@pytest.mark.parametrize("fields", [{"tools": [TOOL], "tool_choice": "none"}, {}], ids=["none", "no tools"])
def test_a_call_that_nobody_asked_for_is_text(chat, fields):
    answer = chat(V31, answer=[CALLS], parsers=V31_PARSERS, **fields).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (CALLS, None, "stop")


def test_tool_choice_none_needs_no_parser(chat):
    assert chat(V31, answer=["a"], tools=[TOOL], tool_choice="none").choices[0].message.content == "a"


def test_a_malformed_call_is_text(chat):
    text = CALLS.replace('{"x": "é"}', '{"x": é}')
    answer = chat(V31, answer=list(text), parsers=V31_PARSERS, tools=[TOOL]).choices[0]
    assert (answer.message.content, answer.message.tool_calls, answer.finish_reason) == (text, None, "stop")


def test_an_answer_that_is_cut_off_after_a_call_has_ended_by_its_length(chat):
    text = CALLS.partition("<｜tool▁call▁begin｜>sub")[0]
    answer = chat(V31, answer=[*text, "a"], parsers=V31_PARSERS, tools=[TOOL], max_tokens=len(text)).choices[0]
    assert (named(answer.message.tool_calls), answer.finish_reason) == (NAMED[:1], "length")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_with_calls(chat, stream):
    first = chat(V31, answer=[CALLS], parsers=V31_PARSERS, tools=[TOOL]).choices[0].message
    results = [{"role": "tool", "content": "3", "tool_call_id": call.id} for call in first.tool_calls]
    messages = [{"role": "user", "content": "a"}, first, *results]
    answer = chat(V31, messages=messages, answer=["Three."], parsers=V31_PARSERS, tools=[TOOL], stream=stream)
    assert (joined(answer, "content") if stream else text_of(answer)) == "Three."


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("parsers", "fields", "message"),
    [
        (Parsers(), {}, "tools must be empty, or tool_choice 'none': this server has no --tool-call-parser"),
        (
            V31_PARSERS,
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice must be 'none', 'auto', 'required', or ",
        ),
        (V31_PARSERS, {"tool_choice": 1}, "tool_choice must be 'none', 'auto', 'required', or "),
        (V31_PARSERS, {"tools": [{"type": "custom"}]}, "tools.0.type must be 'function', not 'custom'"),
        (V31_PARSERS, {"tools": [{"type": "function"}]}, "tools.0.function is missing"),
        (
            V31_PARSERS,
            {"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]},
            "messages.0.tool_calls is only for messages of the role 'assistant', not of 'user'",
        ),
        (
            V31_PARSERS,
            {
                "messages": [{"role": "assistant", "content": "a", "tool_calls": [CALL]}],
                "extra_body": {"continue_final_message": True, "add_generation_prompt": False},
            },
            "continue_final_message must be false: the last message has tool_calls",
        ),
    ],
    ids=["no parser", "allowed", "number", "custom", "no function", "of a user", "continued"],
)
def test_tools_that_are_not_supported_are_refused(chat, parsers, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(V31, parsers=parsers, **{"tools": [TOOL], **fields})
    assert caught.value.body["message"].startswith(message)
    assert caught.value.param == message.split()[0]
