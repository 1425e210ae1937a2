"""/tokenize and /detokenize: the tokens that a completion or a chat would read, and the text of tokens."""

import random

import httpx
import pytest

from tests.malloc_info import HAS_MALLOC_INFO, malloc_info

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

MESSAGES = [{"role": "user", "content": "Why?"}]


def post(served, path, headers=None, **body):
    return httpx.post(f"{served.url}/{path}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("model", [{}, {"model": "micro"}])
def test_a_text_has_the_tokens_of_a_completions_prompt(served, tokenizer, model):
    found = post(served, "tokenize", prompt="def f", **model).json()
    tokens = [tokenizer.begin, *tokenizer.encode("def f")]
    assert found == {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None}


def test_a_text_without_special_tokens_and_with_the_texts_of_its_tokens(served, tokenizer):
    found = post(served, "tokenize", prompt="def f", add_special_tokens=False, return_token_strs=True).json()
    assert found["tokens"] == tokenizer.encode("def f")
    assert "".join(found["token_strs"]) == "def f"


def test_a_conversation_has_the_tokens_of_a_chats_prompt(served):
    found = post(served, "tokenize", messages=MESSAGES).json()
    used = post(served, "v1/chat/completions", model="micro", messages=MESSAGES, max_tokens=1).json()["usage"]
    assert found["count"] == len(found["tokens"]) == used["prompt_tokens"]


def test_a_conversation_without_a_generation_prompt_is_shorter(served):
    counts = [post(served, "tokenize", messages=MESSAGES, add_generation_prompt=adds).json()["count"]
              for adds in (True, False)]  # fmt: skip
    assert counts[0] > counts[1]


def test_the_text_of_tokens(served, tokenizer):
    assert post(served, "detokenize", tokens=tokenizer.encode("def f")).json() == {"prompt": "def f"}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("tokenize", {}, 400, "prompt is missing"),
        ("tokenize", {"prompt": "messages", "temperature": 1}, 400, "temperature is unknown"),
        ("tokenize", {"prompt": "a", "model": "other"}, 404, "model 'other' is not served here"),
        ("tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens must be false"),
        ("tokenize", {"messages": MESSAGES, "chat_template": "a"}, 400, "chat_template is not taken from a request"),
        ("detokenize", {"tokens": [10**6]}, 400, "tokens must be from 0 to "),
        ("detokenize", {"tokens": [-1]}, 400, "tokens.0 must be at least 0, not -1"),
    ],
)
def test_what_cannot_be_answered_is_refused(served, path, body, status, message):
    response = post(served, path, **body)
    assert response.status_code == status
    assert response.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize("path", ["tokenize", "detokenize"])
def test_they_need_a_key_where_completions_do(serve, path):
    served, body = serve(api_keys=("secret",)), {"prompt": "a"} if path == "tokenize" else {"tokens": [70]}
    assert post(served, path, **body).status_code == 401
    assert post(served, path, {"Authorization": "Bearer secret"}, **body).status_code == 200


@pytest.mark.skipif(not HAS_MALLOC_INFO, reason="needs glibc 2.33")
@pytest.mark.slow
@pytest.mark.parametrize("is_chat", [True, False])
def test_the_words_of_texts_are_not_cached(served, is_chat):
    drawn, used = random.Random(0), list[int]()
    for _ in range(4):
        text = " ".join("".join(drawn.choices("abcdefgh", k=250)) for _ in range(500))
        body = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
        assert post(served, "tokenize", **body).status_code == 200
        used.append(malloc_info().uordblks)
    assert used[-1] - used[0] < 4 * 2**20  # a cache of words takes 12 MiB for 1,500 of them
