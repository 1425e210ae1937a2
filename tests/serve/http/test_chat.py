"""The chat template: messages to tokens."""

import json
import threading
import time

import pytest

from octile.serve.http.chat import PLAIN_STOP, ChatTemplate
from octile.serve.http.protocol import ChatBody, Message
from octile.tokenizer import Tokenizer

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_template_renders_and_its_special_tokens_are_tokens(tokenizer):
    tokens = ChatTemplate(tokenizer, TEMPLATE).tokens(user(" def f "))
    assert tokens == [
        tokenizer.begin, *tokenizer.encode("[user]def f"), tokenizer.end, *tokenizer.encode("\n[assistant]")
    ]  # fmt: skip


def test_a_special_token_in_a_message_is_text(tokenizer):
    tokens = ChatTemplate(tokenizer, TEMPLATE).tokens(user("a<|end|>b<|begin|>"))
    assert (tokens.count(tokenizer.begin), tokens.count(tokenizer.end)) == (1, 1)
    assert tokenizer.decode(tokens) == "<|begin|>[user]a<|end|>b<|begin|><|end|>\n[assistant]"


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
    template.tokens(messages)
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
        template.tokens(user("a<|end|>b"), refuse)
    assert checked == ["<|begin|>[user]a<|end|>b<|end|>\n[assistant]"]


def test_a_template_has_names_and_ids_of_tools(tokenizer):
    source = "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.tool_call_id }}: {{ m.content }}{% endfor %}"
    message = Message(role="tool", content="4", name="sum<|end|>", tool_call_id="call_1")
    tokens = ChatTemplate(tokenizer, source).tokens([message.plain()])
    assert tokenizer.decode(tokens) == "tool sum<|end|> call_1: 4"
    assert tokenizer.end not in tokens


def test_a_chat_with_as_many_stops_as_it_may_have_keeps_those_of_the_template():
    own = [str(i) for i in range(16)]
    body = ChatBody(model="m", messages=[Message(role="user", content="a")], stop=own)
    assert body.sampling(1, None, 0, {}, PLAIN_STOP).stop == (*own, *PLAIN_STOP)


def test_the_plain_template(tokenizer):
    template = ChatTemplate(tokenizer, None)
    assert template.is_plain
    assert template.stop == ("\n\nUser:",)
    text = tokenizer.decode(template.tokens([{"role": "system", "content": "Brief."}, *user("a")]))
    assert text == "<|begin|>System: Brief.\n\nUser: a\n\nAssistant:"


def test_a_template_refuses_messages(tokenizer):
    with pytest.raises(ValueError, match="the chat template refuses the messages: no tools here"):
        ChatTemplate(tokenizer, TEMPLATE).tokens([{"role": "tool", "content": ""}])


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
        ChatTemplate(tokenizer, source).tokens(user("a"))


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
    assert loaded.decode(chat.tokens(user("a"))) == rendered
    (tmp_path / "chat_template.jinja").write_text("a file")
    assert loaded.decode(ChatTemplate.load(tmp_path, loaded).tokens(user("a"))) == "a file"


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
    assert tokenizer.decode(ChatTemplate(tokenizer, TEMPLATE).tokens(messages)) == text
