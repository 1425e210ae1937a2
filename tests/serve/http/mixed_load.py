"""Requests of all kinds, drawn by a seed, and clients that send many at once; some leave in the middle."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from octile.tokenizer import Tokenizer
from tests.serve.http.trip import STOP, STRICT, is_trip, schema_format

PATTERN = "[a-c]{3}-[0-9]{2}"
TEXTS = ["left", "right"]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PREFIXES = ["Of the first text all requests share much. ", "def parse_args(self, args=None, namespace=None): ", ""]


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        kind: a key of `KINDS`.
        path, body: what is sent.
        leaves: whether its client closes the connection when the first bytes of the answer have come.
    """

    kind: str
    path: str
    body: dict[str, Any]
    leaves: bool = False


KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # path, and fields
    "greedy": (COMPLETIONS, {"temperature": 0}),
    "seeded": (COMPLETIONS, {}),
    "text": (COMPLETIONS, {}),
    "tokens": (COMPLETIONS, {"logprobs": 2}),
    "echo": (COMPLETIONS, {"echo": True, "logprobs": 1}),
    "choices": (COMPLETIONS, {"n": 2}),
    "stops": (COMPLETIONS, {"stop": ["e", "ar"], "min_tokens": 2}),
    "penalties": (COMPLETIONS, {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.2}),
    "pattern": (COMPLETIONS, {"structured_outputs": {"regex": PATTERN}}),
    "one of several": (COMPLETIONS, {"structured_outputs": {"choice": TEXTS}}),
    "chat": (CHATS, {}),
    "scored chat": (CHATS, {"logprobs": True, "top_logprobs": 2}),
    "schema": (CHATS, {"response_format": schema_format()}),
    "tools": (CHATS, {"tools": [STRICT, STOP], "tool_choice": "required", "parallel_tool_calls": False}),
}
PLAIN = ("greedy", "seeded")  # kinds that decode steps sample
FOLLOWING = ("pattern", "one of several", "schema", "tools")  # kinds whose answers follow a grammar
HOW = ({"temperature": 0}, {}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 20, "min_p": 0.01})


def draw(
    n: int,
    seed: int,
    tokenizer: Tokenizer,
    kinds: Sequence[str] = tuple(KINDS),
    longest: int = 40,
    leaving: float = 0.15,
) -> list[Asked]:
    """Draw requests whose answers are determined, since each has a seed.

    Args:
        n: how many; each kind occurs as often as others.
        seed: chooses them.
        tokenizer: of the model.
        kinds: keys of `KINDS`.
        longest: tokens of the longest answers.
        leaving: share of the clients that leave.
    """
    drawn, found = random.Random(seed), list[Asked]()
    (brace,) = tokenizer.encode("}")
    for i in range(n):
        kind = kinds[i % len(kinds)]
        path, fields = KINDS[kind]
        text = drawn.choice(PREFIXES) + "".join(drawn.choices(LETTERS, k=drawn.randint(1, 20)))
        how = {} if kind in PLAIN else drawn.choice(HOW)
        body = {"model": "micro", "seed": drawn.randrange(1000), "return_token_ids": True, **how, **fields}
        if kind in FOLLOWING:
            body |= {"max_tokens": drawn.choice((5, 200, 200)), "logit_bias": {str(brace): 6}}  # strings come to an end
        else:
            body["max_tokens"] = drawn.randint(3, longest)
        if path == CHATS:
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = tokenizer.encode(text) if kind == "tokens" else text
        if drawn.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append(Asked(kind, path, body, leaves=drawn.random() < leaving))
    drawn.shuffle(found)
    return found


def answers_alone(url: str, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """The whole answer to each request, one after the other."""
    found = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for request in asked:
            body = {name: value for name, value in request.body.items() if not name.startswith("stream")}
            response = client.post(request.path, json=body)
            assert response.status_code == 200, response.text
            found.append(read_whole(response.json()))
    return found


async def answers_together(
    url: str, asked: Sequence[Asked], n_clients: int, refused: threading.Event | None = None
) -> list[dict[str, Any] | int | None]:
    """The answer to each request, or its status if that is not 200; None for one whose client has left.

    Args:
        url: of the server.
        asked: the requests.
        n_clients: how many there are at a time.
        refused: set when a request is refused because too many are in flight.
    """
    waiting, found = iter(enumerate(asked)), dict[int, dict[str, Any] | int | None]()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client, asyncio.TaskGroup() as clients:

        async def run() -> None:
            for i, request in waiting:
                found[i] = await (leave(url, request) if request.leaves else _answer(client, request))
                if refused is not None and found[i] == 503:
                    refused.set()

        for _ in range(min(n_clients, len(asked))):
            clients.create_task(run())
    return [found[i] for i in range(len(asked))]


async def _answer(client: httpx.AsyncClient, request: Asked) -> dict[str, Any] | int:
    response = await client.post(request.path, json=request.body)
    if response.status_code != 200:
        return response.status_code
    return read_stream(response.text) if request.body.get("stream") else read_whole(response.json())


async def leave(url: str, request: Asked) -> None:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(request.body).encode()
    head = f"POST {request.path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    assert await reader.read(1)  # of the answer, or of 100 Continue before it
    writer.close()


def read_whole(answer: dict[str, Any]) -> dict[str, Any]:
    """What a whole answer says, without what differs between two that are the same."""
    return {"usage": _counts(answer["usage"]), "choices": [_choice(choice) for choice in answer["choices"]]}


def read_stream(text: str) -> dict[str, Any]:
    """The same of a stream, whose chunks are joined."""
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    assert events[-1] == "[DONE]", events[-1]
    joined: dict[int, dict[str, Any]] = {}
    usage = None
    for event in map(json.loads, events[:-1]):
        assert "error" not in event, event
        usage = event["usage"] or usage
        for choice in map(_choice, event["choices"]):
            before = joined.setdefault(choice["index"], choice)
            if before is not choice:
                for name, value in choice.items():
                    if name == "logprobs" and before[name] and value:
                        before[name] = {key: before[name][key] + values for key, values in value.items()}
                    elif name in ("text", "reasoning", "calls", "tokens"):
                        before[name] += value
                    else:
                        before[name] = value or before[name]
    return {"usage": _counts(usage), "choices": [joined[i] for i in sorted(joined)]}


def _counts(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice, or a part of it, with the same names for completions, chats and their chunks."""
    message = choice.get("message") or choice.get("delta") or {}
    logprobs = choice["logprobs"] and {name: values for name, values in choice["logprobs"].items() if name != "refusal"}
    return {
        "index": choice["index"],
        "text": choice.get("text") or message.get("content") or "",
        "reasoning": message.get("reasoning_content") or "",
        "calls": [
            [call["function"][name] for name in ("name", "arguments")] for call in message.get("tool_calls") or ()
        ],
        "tokens": choice.get("token_ids") or [],
        "logprobs": logprobs,
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
    }


def follows(kind: str, choice: dict[str, Any]) -> bool:
    """Whether a complete choice of a kind in `FOLLOWING` follows its grammar."""
    text, calls = choice["text"], choice["calls"]
    if kind == "tools":
        ((name, arguments),) = calls
        return choice["finish_reason"] == "tool_calls" and (
            is_trip(arguments) if name == "trip" else json.loads(arguments) == {}
        )
    if kind == "schema":
        return is_trip(text)
    return text in TEXTS if kind == "one of several" else re.fullmatch(PATTERN, text) is not None
