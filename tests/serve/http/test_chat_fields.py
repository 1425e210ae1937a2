"""Fields of chats that OpenAI's client does not have: it sends them, and the server answers."""

import openai
import pytest

from tests.serve.http.templates import R1, V31, with_tokens


@pytest.fixture
def chat(serve, tokenizer):
    """Ask for a chat completion of a server with a template."""

    def ask(template: str, content: str = "a", stream: bool = False, **fields):
        served = serve(template=template, tokenizer=with_tokens(tokenizer))
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0) as client:
            messages = fields.pop("messages", [{"role": "user", "content": content}])
            answer = client.chat.completions.create(
                model="micro", messages=messages, max_tokens=20, stream=stream, **fields
            )
            return list(answer) if stream else answer

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
        ({"reasoning_effort": "huge"}, "reasoning_effort must be 'none', 'minimal', 'low', 'medium' or 'high', not"),
    ],
)
def test_what_a_template_does_not_do_is_refused(chat, fields, message):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(R1, extra_body=fields)
    assert caught.value.body["message"].startswith(message)
    assert caught.value.param == message.split()[0]


@pytest.mark.parametrize("fields", [{"documents": []}, {"reasoning_effort": "none"}, {"chat_template": None}])
def test_what_changes_nothing_is_accepted(chat, fields):
    assert text_of(chat(V31, extra_body=fields)) == text_of(chat(V31))
