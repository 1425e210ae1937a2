"""Writing a whole answer: the same JSON in small pieces, between which the event loop goes on."""

import asyncio
import json

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.http.responses import PIECE_BYTES, event, json_bytes, json_pieces


def answer(n_tokens: int) -> dict:
    top = [{"token": "é", "logprob": -1.5, "bytes": [195, 169]}] * 20
    logprobs = {"content": [{"token": '"', "logprob": -0.5, "bytes": None, "top_logprobs": top}] * n_tokens}
    choices = [{"index": i, "message": {"content": "a\n"}, "logprobs": logprobs} for i in range(3)]
    return {"id": "chatcmpl-1", "choices": choices, "usage": {"total_tokens": n_tokens}}


@pytest.mark.parametrize(
    "value",
    [answer(0), answer(1), answer(256), answer(257), {}, [], {"a": {}}, [[], [1, [2, [3, [4, [5]]]]]], None, 1.5],
)
def test_the_pieces_are_one_json_value(value):
    assert "".join(json_pieces(value)) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("write", [event, lambda value: asyncio.run(json_bytes(value))], ids=["stream", "whole"])
def test_numbers_that_are_no_json_are_never_written(write, number):
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        write({"choices": [{"logprobs": {"content": [[number]]}}]})


def test_the_event_loop_goes_on_while_an_answer_is_written():
    async def main() -> tuple[int, bytes]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        content = await json_bytes(answer(2000))
        counting.cancel()
        return turns, content

    turns, content = asyncio.run(main())
    assert json.loads(content) == answer(2000)
    assert max(map(len, json_pieces(answer(2000)))) < len(content) / 20
    assert turns >= len(content) // (8 * PIECE_BYTES)
