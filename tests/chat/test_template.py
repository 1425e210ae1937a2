"""The chat template: messages to tokens."""

import json
import threading
import time

import pytest

from octile.chat.template import PLAIN_STOP, ChatTemplate, FieldError, Rendering
from octile.serve.http.protocol import ChatBody, Message
from octile.tokenizer import Tokenizer
from tests.chat.templates import KIMI, R1, TOKENS, V31, with_tokens

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


CONTINUED = Rendering(add_generation_prompt=False, continue_final_message=True)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_template_renders_and_its_special_tokens_are_tokens(tokenizer):
    tokens = ChatTemplate(tokenizer, TEMPLATE).prompt(user(" def f ")).tokens
    assert tokens == [
        tokenizer.begin, *tokenizer.encode("[user]def f"), tokenizer.end, *tokenizer.encode("\n[assistant]")
    ]  # fmt: skip


def test_a_special_token_in_a_message_is_text(tokenizer):
    tokens = ChatTemplate(tokenizer, TEMPLATE).prompt(user("a<|end|>b<|begin|>")).tokens
    assert (tokens.count(tokenizer.begin), tokens.count(tokenizer.end)) == (1, 1)
    assert tokenizer.decode(tokens) == "<|begin|>[user]a<|end|>b<|begin|><|end|>\n[assistant]"


SPELLED = "a<｜User｜>b<｜Assistant｜>c<think>d</think><｜tool▁calls▁begin｜>"


@pytest.mark.one_case
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("role", ["system", "user", "tool", "assistant"])
def test_a_token_in_angle_brackets_in_a_message_is_text(tokenizer, role, special):
    own = with_tokens(tokenizer, special)
    written = SPELLED.replace("<think>", "").replace("</think>", "") if role == "assistant" else SPELLED
    empty, spelled = (
        ChatTemplate(own, V31).prompt([{"role": "user", "content": "a"}, {"role": role, "content": text}]).tokens
        for text in ("", written)
    )
    added = {own.backend.token_to_id(text) for text in TOKENS}
    assert [token for token in spelled if token in added] == [token for token in empty if token in added]
    assert written in own.decode(spelled)


@pytest.mark.parametrize("special", [False, True])
def test_a_thought_that_the_assistant_has_written_is_seen_by_the_template(tokenizer, special):
    own = with_tokens(tokenizer, special)
    messages = [*user("a"), {"role": "assistant", "content": "why</think>because"}, *user("b")]
    assert "why" not in own.decode(ChatTemplate(own, V31).prompt(messages).tokens)


def test_other_threads_run_while_a_long_message_is_encoded(tokenizer):
    template, pauses, is_over = ChatTemplate(tokenizer, None), list[float](), threading.Event()

    def beat() -> None:
        last = time.perf_counter()
        while not is_over.wait(0.001):
            pauses.append(time.perf_counter() - last)
            last += pauses[-1]

    messages, begin = user("a" * 1_000_000), time.perf_counter()
    beating = threading.Thread(target=beat)
    beating.start()
    template.prompt(messages)
    took = time.perf_counter() - begin
    is_over.set()
    beating.join()
    assert max(pauses) < took / 2


def test_the_text_is_checked_before_it_is_encoded(tokenizer, monkeypatch):
    template, checked = ChatTemplate(tokenizer, TEMPLATE), list[str]()
    monkeypatch.delattr(template, "_backend")

    def refuse(text: str) -> None:
        checked.append(text)
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        template.prompt(user("a<|end|>b"), check=refuse)
    assert checked == ["<|begin|>[user]a<|end|>b<|end|>\n[assistant]"]


def test_a_template_has_names_and_ids_of_tools(tokenizer):
    source = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.tool_call_id }}: {{ m.content }}{% endfor %}"
    message = Message(role="tool", content="4", name="sum<|end|>", tool_call_id="call_1")
    tokens = ChatTemplate(tokenizer, source).prompt([message.plain()]).tokens
    assert tokenizer.decode(tokens) == "tool sum<|end|> call_1: 4"
    assert tokenizer.end not in tokens


def test_a_chat_with_as_many_stops_as_it_may_have_keeps_those_of_the_template():
    own = [str(i) for i in range(16)]
    body = ChatBody(model="m", messages=[Message(role="user", content="a")], stop=own)
    assert body.sampling(1, None, 0, {}, (), "", PLAIN_STOP).stop == (*own, *PLAIN_STOP)


def test_the_plain_template(tokenizer):
    template = ChatTemplate(tokenizer, None)
    assert template.is_plain
    assert template.stop == ("\n\nUser:",)
    text = tokenizer.decode(template.prompt([{"role": "system", "content": "Brief."}, *user("a")]).tokens)
    assert text == "<|begin|>System: Brief.\n\nUser: a\n\nAssistant:"


def test_a_template_refuses_messages(tokenizer):
    with pytest.raises(ValueError, match="the chat template refuses the messages: no tools here"):
        ChatTemplate(tokenizer, TEMPLATE).prompt([{"role": "tool", "content": ""}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_is_confined(tokenizer, source):
    with pytest.raises(ValueError, match="the chat template refuses the messages"):
        ChatTemplate(tokenizer, source).prompt(user("a"))


def test_a_template_that_is_not_jinja_is_refused(tokenizer):
    with pytest.raises(ValueError, match="the tokenizer's chat_template is not jinja"):
        ChatTemplate(tokenizer, "{% for %}")


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}], "three"),
    ],
    ids=["one", "named"],
)
def test_the_template_of_a_folder(tokenizer, tmp_path, template, rendered):
    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    loaded = Tokenizer.load(tmp_path)
    chat = ChatTemplate.load(tmp_path, loaded)
    assert not chat.is_plain
    assert loaded.decode(chat.prompt(user("a")).tokens) == rendered
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert loaded.decode(ChatTemplate.load(tmp_path, loaded).prompt(user("a")).tokens) == "a file"


def test_a_template_that_is_not_utf_8_is_refused(tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"abc\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is damaged: byte 3 is not UTF-8"):
        ChatTemplate.load(tmp_path, tokenizer)


def test_a_folder_without_a_template_has_the_plain_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    assert ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path)).is_plain


def test_a_template_without_a_default_is_refused(tokenizer, tmp_path):
    tokenizer.config["chat_template"] = [{"name": "tool_use", "template": ""}]
    try:
        with pytest.raises(ValueError, match="none named default: there are tool_use"):
            ChatTemplate.load(tmp_path, tokenizer)
    finally:
        del tokenizer.config["chat_template"]


def test_the_template_of_transformers_gives_the_same_text(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [*user("x"), {"role": "assistant", "content": "y"}, *user("z\n")]
    text = theirs.apply_chat_template(messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ChatTemplate(tokenizer, TEMPLATE).prompt(messages).tokens) == text


def rendered(tokenizer, source, messages, **fields) -> str:
    prompt = ChatTemplate(with_tokens(tokenizer), source).prompt(messages, Rendering(**fields))
    return with_tokens(tokenizer).decode(prompt.tokens)


@pytest.mark.parametrize(("thinking", "end"), [(True, "<think>"), (False, "</think>"), (None, "</think>")])
def test_thinking_is_a_variable_of_the_template(tokenizer, thinking, end):
    variables = {} if thinking is None else {"thinking": thinking, "enable_thinking": thinking}
    assert rendered(tokenizer, V31, user("a"), variables=variables) == f"<|begin|><｜User｜>a<｜Assistant｜>{end}"


def test_tags_of_a_template_are_their_tokens(tokenizer):
    own = with_tokens(tokenizer)
    prompt = ChatTemplate(own, V31).prompt(user("a"), Rendering(variables={"thinking": True}))
    assert prompt.tokens[-1] == own.backend.token_to_id("<think>")


def test_a_special_token_in_a_variable_is_text(tokenizer):
    variables = {"style": {"<|end|>": ["a<|begin|>"]}}
    prompt = ChatTemplate(tokenizer, "{{ style | tojson }}").prompt(user(""), Rendering(variables=variables))
    assert tokenizer.decode(prompt.tokens) == '{"<|end|>": ["a<|begin|>"]}'
    assert not {tokenizer.begin, tokenizer.end} & set(prompt.tokens)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "bos_token", "chat_template"])
def test_a_variable_that_the_server_gives_is_refused(tokenizer, name):
    with pytest.raises(FieldError, match=f"chat_template_kwargs must not have {name}: octile gives it"):
        rendered(tokenizer, V31, user("a"), variables={name: []})


@pytest.mark.parametrize("source", [V31, R1, KIMI, None], ids=["V3.1", "R1", "Kimi-K2", "plain"])
def test_without_a_generation_prompt_no_message_begins(tokenizer, source):
    without = rendered(tokenizer, source, user("a"), add_generation_prompt=False)
    begun = rendered(tokenizer, source, user("a"))
    assert begun.startswith(without)
    assert "assistant" in begun.removeprefix(without).lower()


@pytest.mark.parametrize(
    ("source", "begun"),
    [
        (V31, "<|begin|><｜User｜>a<｜Assistant｜></think>"),
        (R1, "<|begin|><｜User｜>a<｜Assistant｜>"),
        (KIMI, "<|im_user|>user<|im_middle|>a<|im_end|><|im_assistant|>assistant<|im_middle|>"),
        (None, "<|begin|>User: a\n\nAssistant: "),
        (TEMPLATE, "<|begin|>[user]a<|end|>\n[assistant]"),
    ],
    ids=["V3.1", "R1", "Kimi-K2", "plain", "trimmed"],
)
def test_a_final_message_is_continued(tokenizer, source, begun):
    messages = [*user("a"), {"role": "assistant", "content": "one, two,"}]
    assert rendered(tokenizer, source, messages, **CONTINUED._asdict()) == f"{begun}one, two,"


@pytest.mark.parametrize("source", [TEMPLATE, V31, R1], ids=["trimmed", "V3.1", "R1"])
def test_transformers_continues_a_final_message_with_the_same_text(tokenizer, tmp_path, source):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [*user("x"), {"role": "assistant", "content": " y "}]
    text = theirs.apply_chat_template(messages, chat_template=source, continue_final_message=True, tokenize=False)
    assert rendered(tokenizer, source, messages, **CONTINUED._asdict()) == text


def test_a_final_message_that_a_template_leaves_out_cannot_be_continued(tokenizer):
    with pytest.raises(FieldError, match="continue_final_message must be false: the chat template does not show"):
        rendered(tokenizer, "{{ messages[0].content }}", [*user("a"), *user("b")], **CONTINUED._asdict())


EFFORT = "{{ messages[0].content }}{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high"])
def test_a_template_that_reads_the_effort_gets_it(tokenizer, effort):
    assert rendered(tokenizer, EFFORT, user("a"), reasoning_effort=effort) == f"a[{effort}]"
    assert rendered(tokenizer, EFFORT, user("a"), variables={"reasoning_effort": effort}) == f"a[{effort}]"


def test_an_effort_that_is_given_twice_is_refused(tokenizer):
    with pytest.raises(FieldError, match="reasoning_effort must not be in chat_template_kwargs, too"):
        rendered(tokenizer, EFFORT, user("a"), reasoning_effort="low", variables={"reasoning_effort": "low"})


def test_an_effort_that_the_template_does_not_read_is_refused(tokenizer):
    with pytest.raises(FieldError, match="reasoning_effort must be 'none' for this model: the chat template does not"):
        rendered(tokenizer, V31, user("a"), reasoning_effort="high")


def test_no_effort_is_refused_only_where_the_template_begins_a_thought(tokenizer):
    assert rendered(tokenizer, V31, user("a"), reasoning_effort="none") == rendered(tokenizer, V31, user("a"))
    with pytest.raises(FieldError, match=r"reasoning_effort must not be 'none': .* begins a thought for this request"):
        rendered(tokenizer, R1, user("a"), reasoning_effort="none")


def test_the_template_for_tools_is_used_when_there_are_tools(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    chat = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    assert tokenizer.decode(chat.prompt(user("a")).tokens) == "one"
    assert tokenizer.decode(chat.prompt(user("a"), Rendering(tools=[TOOL])).tokens) == "add"


def test_the_template_for_tools_may_be_a_file_as_transformers_writes_it(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("one")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].function.name }}")
    chat = ChatTemplate.load(tmp_path, Tokenizer.load(tmp_path))
    assert tokenizer.decode(chat.prompt(user("a")).tokens) == "one"
    assert tokenizer.decode(chat.prompt(user("a"), Rendering(tools=[TOOL])).tokens) == "add"


def test_a_template_may_write_what_a_function_leaves_out(tokenizer):
    source = (
        "{% set f = tools[0].function %}{{ '#' + f.description }}{{ f['parameters'] | tojson }}{{ tools | tojson }}"
    )
    tools = [{"type": "function", "function": {"name": "now"}}]
    text = tokenizer.decode(ChatTemplate(tokenizer, source).prompt(user("a"), Rendering(tools)).tokens)
    schema = {"type": "object", "properties": {}}
    assert text == f"#{json.dumps(schema)}{json.dumps(tools)}"


def test_tools_are_written_as_the_template_asks(tokenizer):
    spaced, compact = json.dumps(TOOL), json.dumps([TOOL], separators=(",", ":"))
    assert f"## Tools\n{spaced}\n<｜User｜>" in rendered(tokenizer, V31, user("a"), tools=[TOOL])
    assert f"tool_declare<|im_middle|>{compact}<|im_end|>" in rendered(tokenizer, KIMI, user("a"), tools=[TOOL])


@pytest.mark.parametrize("source", [R1, None], ids=["R1", "plain"])
def test_tools_that_the_template_does_not_read_are_refused(tokenizer, source):
    with pytest.raises(FieldError, match="tools must be empty: the chat template does not read them"):
        rendered(tokenizer, source, user("a"), tools=[TOOL])


def called(*arguments: str, content: str | None = None) -> dict:
    """A message with calls, as a client sends it."""
    calls = [
        {"id": f"functions.add:{i}", "type": "function", "function": {"name": "add", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    return Message.model_validate({"role": "assistant", "content": content, "tool_calls": calls}).plain()


RESULT = {"role": "tool", "content": "3", "tool_call_id": "functions.add:0"}


def test_calls_of_history_are_written_as_v31_has_them(tokenizer):
    messages = [*user("a"), called('{"x": 1}', "", content="I add."), RESULT]
    calls = (
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    )
    assert rendered(tokenizer, V31, messages) == (
        f"<|begin|><｜User｜>a<｜Assistant｜></think>I add.<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>"
    )


def test_calls_of_history_are_written_as_kimi_has_them(tokenizer):
    messages = [*user("a"), called('{"x": 1}'), RESULT]
    assert (
        '<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.add:0'
        '<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
        "<|im_system|>tool<|im_middle|>## Return of functions.add:0\n3<|im_end|>"
    ) in rendered(tokenizer, KIMI, messages)  # fmt: skip


@pytest.mark.parametrize("value", ["tool_calls[0].function.arguments", "tool_calls[0].function", "tool_calls"])
def test_arguments_are_written_as_an_object_at_any_depth(tokenizer, value):
    text = rendered(tokenizer, f"{{{{ messages[1].{value} | tojson }}}}", [*user("a"), called('{"x":1}')])
    assert '{"x": 1}' in text
    json.loads(text)


@pytest.mark.parametrize(
    "source",
    [
        "{% for key, value in call.items() %}{{ key }}={{ value }}{% endfor %}",
        "{% for key, value in call | items %}{{ key }}={{ value }}{% endfor %}",
        "x={{ call['x'] }}",
        "x={{ call.x if call is mapping }}",
    ],
)
def test_a_template_reads_the_members_of_arguments(tokenizer, source):
    source = "{% set call = messages[1].tool_calls[0].function.arguments %}" + source
    assert rendered(tokenizer, source, [*user("a"), called('{"x":1}')]) == "x=1"


@pytest.mark.parametrize(
    "source", ["{{ '<' + call + '>' }}", "{{ '<' ~ call ~ '>' }}", "<{{ call }}>", "<{{ [call] | join }}>"]
)
def test_a_template_concatenates_arguments_as_they_were_written(tokenizer, source):
    source = "{% set call = messages[1].tool_calls[0].function.arguments %}" + source
    assert rendered(tokenizer, source, [*user("a"), called('{"x":1}')]) == '<{"x":1}>'


@pytest.mark.parametrize("text", ['{"x": ', "[1]", '{"x": "\\ud800"}', '{"x": ' + "[" * 99 + "]" * 99 + "}"])
def test_arguments_that_cannot_be_read_as_an_object_stay_a_text(tokenizer, text):
    source = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert rendered(tokenizer, source, [*user("a"), called(text)]) == text


@pytest.mark.parametrize("filter_", ["", " | tojson"])
def test_arguments_that_spell_a_special_token_stay_text(tokenizer, filter_):
    source = f"{{{{ messages[1].tool_calls[0].function.arguments{filter_} }}}}"
    chat = ChatTemplate(with_tokens(tokenizer), source)
    prompt = chat.prompt([*user("a"), called('{"x": "<|end|>"}')])
    assert prompt.text == '{"x": "<|end|>"}'
    assert with_tokens(tokenizer).end not in prompt.tokens


@pytest.mark.parametrize("content", [None, ""], ids=["null", "empty"])
def test_the_content_of_a_message_with_calls_alone_is_none(content):
    assert called("{}", content=content)["content"] is None


@pytest.mark.parametrize("source", [R1, None], ids=["R1", "plain"])
def test_calls_that_the_template_does_not_read_are_refused(tokenizer, source):
    with pytest.raises(FieldError, match="messages must have no tool_calls: the chat template does not read them"):
        rendered(tokenizer, source, [*user("a"), called("{}")])


# whole conversations, for training

TALK = [
    {"role": "system", "content": "be <|end|> good"},
    *user("hi"),
    {"role": "assistant", "content": "hello"},
    *user("two"),
    {"role": "assistant", "content": "world"},
]
MARKED = """\
{{ bos_token }}{% for message in messages %}[{{ message.role }}]{% if message.role == 'assistant' %}\
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def answers(tokenizer, source, messages=TALK) -> list[str]:
    """The texts of the answers of a conversation, one after the other."""
    tokens, is_answer = ChatTemplate(tokenizer, source).conversation(messages, (), {})
    runs, before = [], False
    for token, answer in zip(tokens, is_answer, strict=True):
        if answer and not before:
            runs.append([])
        if answer:
            runs[-1].append(token)
        before = answer
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (None, [" hello\n\n", " world\n\n"]),
        (MARKED, ["hello<|end|>", "world<|end|>"]),
        (KIMI, ["hello<|im_end|>", "world<|im_end|>"]),
        (V31, ["hello<｜end▁of▁sentence｜>", "world<｜end▁of▁sentence｜>"]),
    ],
    ids=["plain", "marked", "Kimi", "V3.1"],
)
def test_the_answers_of_a_conversation_are_found(tokenizer, source, expected):
    assert answers(tokenizer, source) == expected


@pytest.mark.parametrize("source", [None, MARKED, KIMI, V31], ids=["plain", "marked", "Kimi", "V3.1"])
def test_a_conversation_has_the_text_of_its_prompt(tokenizer, source):
    template = ChatTemplate(tokenizer, source)
    prompt = template.prompt(TALK, Rendering(add_generation_prompt=False))
    assert tokenizer.decode(template.conversation(TALK, (), {}).tokens) == tokenizer.decode(prompt.tokens)


def test_what_precedes_an_answer_has_the_tokens_of_its_prompt(tokenizer):
    template = ChatTemplate(tokenizer, V31)
    tokens, is_answer = template.conversation(TALK[:3], (), {})
    assert tokens[: is_answer.index(True)] == template.prompt(TALK[:2]).tokens


def test_a_template_that_writes_answers_otherwise_in_history_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"messages\[2\]: the chat template writes this answer, .*{% generation %}"):
        answers(tokenizer, R1)


def test_a_template_that_never_begins_an_answer_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"does not read add_generation_prompt, .*{% generation %}"):
        answers(
            tokenizer, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{# add_generation_prompt #}"
        )


def test_thoughts_that_the_template_does_not_read_are_refused(tokenizer):
    message = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    with pytest.raises(FieldError, match="messages must have no reasoning_content: the chat template does not read it"):
        answers(tokenizer, MARKED, [*user("a"), message])


def test_the_tag_of_answers_changes_no_prompt(tokenizer):
    unmarked = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    texts = [ChatTemplate(tokenizer, source).prompt(TALK).text for source in (MARKED, unmarked)]
    assert texts[0] == texts[1]
