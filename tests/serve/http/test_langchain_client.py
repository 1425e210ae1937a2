"""LangChain's chat model talks to the server."""

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")
pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from octile.serve.http.config import Limits, Parsers
from tests.chat.templates import V31, with_tokens
from tests.serve.http.conftest import Served
from tests.serve.http.test_formats import EngineOfRandomLogits

MESSAGES = [SystemMessage("Be brief."), HumanMessage("a")]
PROMPT = "System: Be brief.\n\nUser: a\n\nAssistant:"
CALL = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"x": 1, "y": 2}<｜tool▁call▁end｜>'
CALLS = f"<｜tool▁calls▁begin｜>{CALL}<｜tool▁calls▁end｜>"


class Trip(BaseModel):
    """A trip."""

    city: str = Field(pattern="^[A-Z][a-z]{1,8}$")
    days: int = Field(ge=1, le=9)


def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y


def chat_model(served, **options) -> ChatOpenAI:
    return ChatOpenAI(model="micro", base_url=f"{served.url}/v1", api_key="any", max_retries=0, **options)


def joined(chunks):
    first, *others = chunks
    return sum(others, start=first)


@pytest.fixture(scope="module")
def random_text(tokenizer):
    served = Served(EngineOfRandomLogits(tokenizer), Limits(), (), None)
    yield served
    served.stop()


def test_an_answer(served):
    answer = chat_model(served, max_tokens=30).invoke(MESSAGES)
    assert f"<|begin|>{PROMPT}".startswith(answer.content)
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 30


def test_a_prompt_that_is_too_long_is_the_error_that_fallbacks_catch(served):
    with pytest.raises(ContextOverflowError):
        chat_model(served).invoke("x(" * served.service.context)


def test_a_stream_has_the_text_of_the_answer_and_its_usage(served):
    model = chat_model(served, max_tokens=30, stream_usage=True)
    answer = joined(model.stream(MESSAGES))
    assert answer.content == model.invoke(MESSAGES).content
    assert answer.usage_metadata["output_tokens"] == 30


def test_answers_of_a_batch_are_in_its_order(served):
    answers = chat_model(served, max_tokens=30).batch(["a", "b"])
    assert [answer.content[:18] for answer in answers] == ["<|begin|>User: a\n\n", "<|begin|>User: b\n\n"]


def test_structured_output_is_an_object_of_the_model(random_text):
    model = chat_model(random_text, max_tokens=200, seed=1)
    trip = model.with_structured_output(Trip, method="json_schema").invoke("Where to, and how long?")
    assert isinstance(trip, Trip)


@pytest.mark.one_case
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_and_its_result(serve, tokenizer, stream):
    of_v31 = {"template": V31, "tokenizer": with_tokens(tokenizer)}
    calling, repeating = serve(**of_v31, parsers=Parsers(None, "deepseek_v31"), answer=CALLS), serve(**of_v31)
    model = chat_model(calling).bind_tools([add])
    answer = joined(model.stream("1 + 2?")) if stream else model.invoke("1 + 2?")
    (call,) = answer.tool_calls
    assert (call["name"], call["args"], answer.invalid_tool_calls) == ("add", {"x": 1, "y": 2}, [])
    result = ToolMessage(str(add(**call["args"])), tool_call_id=call["id"])
    prompt = chat_model(repeating, max_tokens=300).invoke([HumanMessage("1 + 2?"), answer, result]).content
    assert f"{CALLS}<｜end▁of▁sentence｜><｜tool▁output▁begin｜>3<｜tool▁output▁end｜>" in prompt
