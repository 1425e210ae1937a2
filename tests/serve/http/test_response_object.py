"""POST /v1/responses: OpenAI's client asks, and the server answers, whole and in events."""

import json

import httpx
import openai
import pytest

from octile.serve.http.config import Parsers
from tests.chat.templates import V31, with_tokens

PARSERS = Parsers("deepseek_r1", "deepseek_v31")
THINKING = {"extra_body": {"chat_template_kwargs": {"thinking": True}}}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
CALLS = (
    "<｜tool▁calls▁begin｜>"
    '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": "é"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>sub<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
WHOLE = f"why</think>\n\nI add.{CALLS}"


@pytest.fixture
def respond(serve, tokenizer):
    """Ask for a response of a server with a template; the engine repeats the prompt, or writes an answer."""

    def ask(answer=None, parsers=PARSERS, template=V31, **fields):
        served = serve(template=template, tokenizer=with_tokens(tokenizer), parsers=parsers, answer=answer)
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            response = client.responses.create(**{"model": "micro", "input": "a", **fields})
            return [*response] if fields.get("stream") else response

    return ask


def kinds(response) -> list[str]:
    return [item.type for item in response.output]


def test_a_text(respond):
    response = respond(list("because"), parsers=Parsers(), instructions="Be brief.", metadata={"who": "me"})
    (item,) = response.output
    assert (response.output_text, response.status, item.status) == ("because", "completed", "completed")
    assert (response.object, response.store, response.incomplete_details) == ("response", False, None)
    assert (response.instructions, response.metadata, response.model) == ("Be brief.", {"who": "me"}, "micro")
    assert response.id.startswith("resp_")
    assert response.model_extra["weights_version"] == 0
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens) == (7, 0)


def test_instructions_are_the_system_message(respond):
    text = respond(parsers=Parsers(), instructions="Be brief.", max_output_tokens=80).output_text
    assert text.startswith("<|begin|>Be brief.<｜User｜>a<｜Assistant｜>")


def test_a_response_that_is_cut_is_incomplete(respond):
    response = respond(list("because"), parsers=Parsers(), max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("bec", "incomplete")


def test_a_thought_text_and_calls_are_items(respond):
    response = respond([WHOLE], tools=[TOOL], **THINKING)
    thought, message, *calls = response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "why", [])
    assert message.content[0].text == "\n\nI add."
    assert [(call.type, call.name, call.arguments) for call in calls] == [
        ("function_call", "add", '{"x": "é"}'),
        ("function_call", "sub", "{}"),
    ]
    assert len({call.call_id for call in calls}) == len({item.id for item in response.output[1:]}) - 1 == 2
    assert response.usage.output_tokens_details.reasoning_tokens > 0


def test_blanks_before_a_call_are_no_message(respond):
    response = respond([f"why</think>\n\n{CALLS}"], tools=[TOOL], **THINKING)
    assert kinds(response) == ["reasoning", "function_call", "function_call"]


@pytest.mark.parametrize("answer", [[""], ["\n"], ["</think>"]], ids=["nothing", "blanks", "a thought without text"])
def test_a_response_without_text_has_an_item(respond, answer):
    response = respond(answer, **THINKING if answer == ["</think>"] else {})
    assert response.output
    assert response.output_text.strip() == ""


@pytest.mark.one_case
@pytest.mark.parametrize("size", [1, 3, 1000], ids=["by characters", "by three", "at once"])
def test_events_make_the_response(respond, size):
    answer = [WHOLE[i : i + size] for i in range(0, len(WHOLE), size)]
    events = respond(answer, tools=[TOOL], stream=True, **THINKING)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event.response.status for event in events[:2]] == ["in_progress"] * 2
    last = events[-1]
    assert (last.type, last.response.status) == ("response.completed", "completed")
    assert kinds(last.response) == ["reasoning", "message", "function_call", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.id, item.type, item.status) for item in added] == [
        (item.id, item.type, "in_progress") for item in done
    ]


def test_deltas_make_the_text_of_each_item(respond):
    events = respond(list(WHOLE), tools=[TOOL], stream=True, **THINKING)
    texts: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
    whole = {
        item.id: item.arguments if item.type == "function_call" else item.content[0].text
        for item in events[-1].response.output
    }
    assert texts == whole
    ends = {
        "response.output_text.done": "text",
        "response.reasoning_text.done": "text",
        "response.function_call_arguments.done": "arguments",
    }
    assert {event.item_id: getattr(event, ends[event.type]) for event in events if event.type in ends} == whole


def test_events_have_names(serve, tokenizer):
    served = serve(template=V31, tokenizer=with_tokens(tokenizer), answer=["a"])
    text = httpx.post(f"{served.url}/v1/responses", json={"model": "micro", "input": "a", "stream": True}).text
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


@pytest.mark.slow
def test_openais_helper_collects_a_stream(serve, tokenizer):
    served = serve(template=V31, tokenizer=with_tokens(tokenizer), parsers=PARSERS, answer=list(WHOLE))
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    with client, client.responses.stream(model="micro", input="a", tools=[TOOL], **THINKING) as stream:
        response = stream.get_final_response()
    assert kinds(response) == ["reasoning", "message", "function_call", "function_call"]


def test_a_stream_that_is_cut_is_incomplete(respond):
    *_, last = respond(list("because"), parsers=Parsers(), max_output_tokens=3, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", "bec")


def test_a_stream_that_fails_says_so(serve, tokenizer):
    served = serve(template=V31, tokenizer=with_tokens(tokenizer), fails_after=3)
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    with client:
        *others, last = client.responses.create(model="micro", input="a", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    text = "".join(event.delta for event in others if event.type == "response.output_text.delta")
    (item,) = last.response.output
    assert (item.status, last.response.output_text) == ("incomplete", text)
    assert others[-1].type == "response.output_item.done"
    assert last.response.error.message == "the engine has failed: RuntimeError: a kernel has failed"


def test_log_probabilities_are_those_of_the_text(respond):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "max_output_tokens": 3}
    fields |= {"parsers": Parsers(), "template": "{{ messages[0].content }}", "input": "import os"}
    part = respond(**fields).output[0].content[0]
    assert len(part.logprobs) == 3
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert all(len(entry.top_logprobs) == 1 for entry in part.logprobs)
    deltas = [event for event in respond(stream=True, **fields) if event.type == "response.output_text.delta"]
    assert [entry.token for event in deltas for entry in event.logprobs] == [entry.token for entry in part.logprobs]


TURNS = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
    "{% for call in m.tool_calls %}{{ call.id }}{% endfor %}|{{ m.tool_call_id }}]{% endfor %}"
)


def test_a_conversation_is_rendered_as_messages(respond):
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "developer", "content": [{"type": "input_text", "text": "e"}]},
    ]
    text = respond(template=TURNS, parsers=Parsers(), input=items, max_output_tokens=400).output_text
    assert text.startswith(
        "[user|a|||][assistant|b|why|c1c2|][tool|1|||c1][tool|2|||c2][assistant|c|||][assistant|d|||][system|e|||]"
    )


@pytest.mark.slow
def test_an_answer_can_be_sent_back(respond):
    first = respond([WHOLE], tools=[TOOL], **THINKING)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "3"}
        for item in first.output
        if item.type == "function_call"
    ]
    for output in (first.output, [item.model_dump() for item in first.output]):
        answer = respond(["Three."], tools=[TOOL], input=[{"role": "user", "content": "a"}, *output, *results])
        assert answer.output_text == "Three."


def test_a_response_repeats_its_settings(respond):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    response = respond(
        ["{}"], parsers=Parsers(), temperature=0.5, top_p=0.9, text={"format": form}, parallel_tool_calls=False
    )
    assert (response.temperature, response.top_p, response.parallel_tool_calls) == (0.5, 0.9, False)
    assert (response.text.format.type, response.text.format.schema_) == ("json_schema", {"type": "object"})
    assert (response.tool_choice, response.tools, response.truncation) == ("auto", [], "disabled")


def test_a_response_repeats_its_tools(respond):
    chosen = {"type": "function", "name": "add"}
    response = respond([CALLS], tools=[TOOL], tool_choice=chosen)
    assert (response.tools[0].name, response.tool_choice.name) == ("add", "add")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_response_repeats_the_tools_that_are_allowed(respond, mode):
    functions = [{"type": "function", "name": "add"}]
    chosen = {"type": "allowed_tools", "mode": mode, "tools": functions}
    response = respond([CALLS], tools=[TOOL], tool_choice=chosen)
    assert response.tool_choice.model_dump() == chosen


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id",
         "previous_response_id must be null: responses are not kept here: send the whole conversation as input"),
        ({"conversation": "conv_1"}, "conversation", "conversation must be null: responses are not kept here"),
        ({"store": True}, "store", "store must be false, not true"),
        ({"background": True}, "background", "background must be false, not true"),
        ({"truncation": "auto"}, "truncation", "truncation must be 'disabled', not 'auto'"),
        ({"input": []}, "input", "input must be a list of at least 1, not []"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0.type",
         "input.0.type must be 'message', 'reasoning', 'function_call', 'function_call_output', not 'item_reference'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
         "input.0.content.0.type", "input.0.content.0.type must be 'input_text' or 'output_text', not 'input_image'"),
        ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "tools.0.type must be 'function', not 'web_search'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "go"}}, "tool_choice",
         "tool_choice must name a function of tools, 'add', not 'go'"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "function", "name": "go"}]}}, "tool_choice",
         "tool_choice must name a function of tools, 'add', not 'go'"),
        ({"tools": [{**TOOL, "strict": True, "parameters": {"type": "fruit"}}]}, "tools.0.parameters",
         "tools.0.parameters must have the type 'object', not 'fruit'"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "fruit"}}}}, "text.format",
         "text.format cannot be followed: "),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema",
         "text.format.schema must be given"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "reasoning.effort must be 'none' for this model"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary",
         "reasoning.summary must be 'auto', 'concise' or 'detailed', not 'long'"),
        ({"max_output_tokens": 10**6}, "max_output_tokens",
         "max_output_tokens is too large: this model's maximum context length is "),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs include message.output_text.logprobs"),
        ({"include": ["file_search_call.results"]}, "include.0", "include.0 must be "),
        ({"include": ["message.output_text.logprobs"]}, "include",
         "include must not have message.output_text.logprobs: this server divides thoughts or calls from the text"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]}]}, "input.0.summary",
         "input.0.summary must be empty: no summary was written here"),
        ({"extra_body": {"messages": []}}, "messages",
         "messages is unknown, or not supported here; perhaps you meant input"),
        ({"extra_body": {"max_tokens": 3}}, "max_tokens",
         "max_tokens is unknown, or not supported here; perhaps you meant max_output_tokens"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, "response_format",
         "response_format is unknown, or not supported here; perhaps you meant text.format"),
        ({"extra_body": {"reasoning_effort": "low"}}, "reasoning_effort",
         "reasoning_effort is unknown, or not supported here; perhaps you meant reasoning.effort"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(respond, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(["a"], **fields)
    assert caught.value.body["message"].startswith(message)
    assert caught.value.param == param


@pytest.mark.one_case
@pytest.mark.parametrize(
    "fields",
    [
        {"store": False}, {"background": False}, {"truncation": "disabled"}, {"include": []}, {"tools": []},
        {"include": ["reasoning.encrypted_content"]}, {"reasoning": {"summary": "detailed"}}, {"service_tier": "auto"},
        {"reasoning": {"effort": "none"}}, {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"extra_body": {"seed": 1, "top_k": 1, "ignore_eos": False, "stop": ["x"]}},
        {"extra_body": {"stream_options": {"include_obfuscation": False}}},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_accepted(respond, fields):
    assert respond(list("ab"), **fields).output_text == "ab"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_response_is_not_kept(served, method):
    answer = httpx.request(method, f"{served.url}/v1/responses/resp_1")
    assert answer.status_code == 404
    message = "the response 'resp_1' is unknown: responses are not kept here: send the whole conversation as input"
    assert answer.json()["error"]["message"] == message


def test_a_request_has_the_id_of_its_header(serve, tokenizer):
    served = serve(template=V31, tokenizer=with_tokens(tokenizer), answer=["a"])
    body = {"model": "micro", "input": "a"}
    answer = httpx.post(f"{served.url}/v1/responses", json=body, headers={"X-Request-Id": "mine"})
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("resp_mine", "mine")
