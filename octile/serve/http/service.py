"""From the body of a request to its response: reading, admission, the engine, and the outputs as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from octile.chat.template import ChatTemplate, FieldError, Prompt
from octile.chat.thought import BEGIN, END, Thought
from octile.serve.engine.bad_words import token_sequences
from octile.serve.engine.grammar import GrammarCompiler
from octile.serve.engine.request import FinishReason, Output, Request, RequestFactory, Sampling
from octile.serve.engine.text import MARK
from octile.serve.http.config import BODY_SECONDS, FIRST_STEP_SECONDS, HUNG_SECONDS, Limits, Parsers
from octile.serve.http.grammars import Grammars
from octile.serve.http.message import MessageParser, without_marks
from octile.serve.http.metrics import Metrics
from octile.serve.http.protocol import (
    BufferUpdate,
    ChatBody,
    CompletionBody,
    Conversation,
    FolderUpdate,
    Generation,
    SampledBody,
    StreamOptions,
    parse,
)
from octile.serve.http.reasoning import ReasoningParser
from octile.serve.http.response_body import LOGPROBS, ResponseBody, own_names
from octile.serve.http.response_object import ResponseObject
from octile.serve.http.responses import (
    NEVER_RETRY,
    Answer,
    ApiError,
    ChatCompletion,
    Completion,
    Echo,
    PacedResponse,
    Shown,
    json_bytes,
    while_connected,
)
from octile.serve.http.tools.formats import FORMATS
from octile.serve.http.tools.parser import CallFormat, ToolParser
from octile.serve.process.client import EngineClient, EngineError, Stream
from octile.serve.process.messages import UpdateWeights, WeightsRefused, WeightsUpdated
from octile.text import format_count
from octile.tokenizer import Tokenizer, disable_word_cache
from octile.validation import quoted

B = TypeVar("B", bound=SampledBody)

RETRY = {"retry-after": "1"}
INVALID_LENGTH = "context_length_exceeded"


class Job(NamedTuple):
    """A request whose prompts are tokens.

    Attributes:
        answer: the response to fill.
        requests: one for each choice.
    """

    answer: Answer
    requests: Sequence[Request]


class _Slots:
    """The slots for choices in flight that a request holds."""

    def __init__(self, service: Service):
        self._service, self._held = service, 0

    def take(self, count: int) -> None:
        """Take further slots.

        Raises:
            ApiError: 503, there would be too many choices in flight; 400, there always would.
        """
        service, limit = self._service, self._service.limits.in_flight
        if self._held + count > limit:
            message = f"the request has {self._held + count} choices, but this server takes at most {limit} at once"
            raise ApiError(400, message, "n")
        if service.in_flight + count > limit:
            most = format_count(limit, "choice")
            message = f"the server has {service.in_flight} of at most {most} in flight: try again later"
            raise ApiError(503, message, code="overloaded", headers=RETRY)
        service.in_flight += count
        self._held += count

    def release(self) -> None:
        """Release all slots."""
        self._service.in_flight -= self._held
        self._held = 0


class Service:
    """One model that answers requests.

    Args:
        engine: the engine of the model; from now on only this object may use it.
        tokenizer: the tokenizer of the model. Its cache of encoded words is disabled, as is that of the template.
        vocab_size: tokens of the model.
        context: positions that a prompt and its new tokens may have together.
        chat: the chat template.
        limits: what is refused.
        model: the name under which the model is served.
        defaults: fields of `Sampling` of requests that do not give them; besides them OpenAI's.
        parsers: how what the model writes in chats is parsed.

    Attributes:
        engine: the engine.
        in_flight: choices that wait or run, and those whose response is not read yet.
        is_draining: whether the server is ending and takes no more requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        vocab_size: int,
        context: int,
        chat: ChatTemplate,
        limits: Limits,
        model: str,
        defaults: Mapping[str, Any] | None = None,
        parsers: Parsers = Parsers(),  # noqa: B008 - it is immutable
    ):
        self.metrics = Metrics(model, lambda: self.engine.stats, lambda: self.engine.step_age)
        self.engine, engine.observer = engine, self.metrics
        self.chat, self.limits, self.model, self.created = chat, limits, model, int(time.time())
        self.tokenizer, self.context = tokenizer, context
        disable_word_cache(tokenizer.backend)  # each of up to 32 threads has one of its own
        chat.disable_word_cache()
        self._parsers = parsers
        self._defaults, self._factory = defaults or {}, RequestFactory(vocab_size, context)
        compiler = GrammarCompiler(tokenizer, vocab_size, [tokenizer.end])  # to refuse what it cannot compile
        compiler.prepare()
        self._grammars = Grammars(compiler, parsers.reasoning is not None)
        self.in_flight, self.is_draining = 0, False

    def why_closed(self) -> str | None:
        """Say why no request is taken; None while requests are."""
        if self.engine.failure is not None:
            return "the engine has failed, and the server is ending"
        return "the server is ending: it answers the requests that it has, and takes no more" * self.is_draining or None

    def why_hung(self) -> str | None:
        """Say why the engine hangs; None while it does not."""
        engine = self.engine
        if engine.step_age > (HUNG_SECONDS if engine.has_stepped else FIRST_STEP_SECONDS):
            return f"the engine hangs: it has requests, and no step has ended for {engine.step_age:.0f} seconds"
        if engine.stats.silent_seconds > HUNG_SECONDS:
            seconds = f"{engine.stats.silent_seconds:.0f} seconds"
            return f"the engine hangs: a prefill or decode process has not answered for {seconds}"
        return None

    def check_model(self, name: str) -> None:
        """Raise ApiError, 404, if a model is not the one that is served."""
        if name != self.model:
            why = f"model {quoted(name)} is not served here; {self.model!r} is"
            raise ApiError(404, why, "model", "model_not_found")

    async def complete(self, request: HttpRequest) -> Response:
        """Answer POST /v1/completions."""
        return await self._respond(
            request, CompletionBody, self._completion, lambda body: len(body.prompts) * (body.n or 1)
        )

    async def chat_complete(self, request: HttpRequest) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._respond(request, ChatBody, self._chat_completion, lambda body: body.n or 1)

    async def respond(self, request: HttpRequest) -> Response:
        """Answer POST /v1/responses."""
        return await self._respond(request, ResponseBody, self._response, lambda body: 1)

    async def compute(self, request: HttpRequest, answer: Callable[[Service, bytes], dict[str, Any]]) -> Response:
        """Answer a request for which the engine has nothing to do, in a thread."""
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        slots = _Slots(self)
        slots.take(1)  # before the body is read, as for choices
        try:
            content = await _read_body(request, self.limits.body, deadline)
            body = await json_bytes(await asyncio.to_thread(answer, self, content))
        finally:
            slots.release()
        return Response(body, media_type="application/json")

    async def update_from_disk(self, request: HttpRequest) -> Response:
        """Answer POST /update_weights_from_disk."""
        return await self._update(request, FolderUpdate)

    async def update_from_tensor(self, request: HttpRequest) -> Response:
        """Answer POST /update_weights_from_tensor."""
        return await self._update(request, BufferUpdate)

    async def _update(self, request: HttpRequest, form: type[FolderUpdate] | type[BufferUpdate]) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        self._check_open()
        body = parse(form, await _read_body(request, self.limits.body, deadline))
        update = UpdateWeights(body.source, body.in_flight)
        updated = await while_connected(request.receive, self._updated(update, deadline))
        if isinstance(updated, WeightsRefused):
            raise ApiError(400, updated.why, code="weights_refused")
        self.metrics.updated(updated.seconds)
        answer = {
            "success": True,
            "message": f"the weights have version {updated.version}",
            "weights_version": updated.version,
            "seconds": updated.seconds,
            "write_seconds": updated.write_seconds,
            "bytes": updated.nbytes,
        }
        return JSONResponse(answer)

    async def _updated(self, update: UpdateWeights, deadline: float) -> WeightsUpdated | WeightsRefused:
        """What becomes of an update.

        Raises:
            ApiError: 409, another one runs; 500, the engine fails; 503, it is stopped; 504, time is over.
        """
        if self.engine.is_updating:  # nothing else runs between this and the begin of the update
            raise ApiError(409, "an update of the weights runs: wait for its answer", code="update_runs")
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self.engine.update_weights(update)
            except TimeoutError:
                ended = await self.engine.update_end()  # a client may free its buffer after the answer
        except EngineError as error:
            raise ApiError(500 if self.engine.failure else 503, str(error), headers=NEVER_RETRY) from None
        if isinstance(ended, WeightsUpdated):
            return ended
        message = (
            f"the update took longer than {self.limits.seconds:g} seconds, the limit of this server: the old weights "
            "stay in use"
        )
        raise ApiError(504, message, code="timeout", headers=NEVER_RETRY)

    def _completion(self, body: CompletionBody) -> Job:
        for text in body.prompts:
            if isinstance(text, str):
                self._check_length(text, "prompt")
        prompts = [self.tokenizer.encode_prompt(p) if isinstance(p, str) else list(p) for p in body.prompts]
        grammar = self._grammars.of_text(body) if body.format_field else ""
        given = self._defaults, self._bad_words(body), grammar
        requests = list[Request]()
        for prompt in prompts:
            if body.max_tokens == 0:
                self._new_tokens(prompt, "prompt", None)
            new_tokens = 1 if body.max_tokens == 0 else self._new_tokens(prompt, "prompt", body.max_tokens or 16)
            choices = [body.sampling(new_tokens, body.logprobs, i, *given) for i in range(body.n or 1)]
            requests += self._requests(prompt, choices)
        echo = None
        if body.echo:
            texts = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in body.prompts]
            before = [len(self.tokenizer.prefix) or (0 if p else 1) for p in texts]
            begins = [n if isinstance(p, str) else 0 for n, p in zip(before, body.prompts, strict=True)]
            echo = Echo(texts, begins, body.logprobs, body.max_tokens == 0)
        shown = _shown(body, body.logprobs is not None)
        answer = Completion(self.model, self.tokenizer, prompts, body.n or 1, shown, echo)
        return Job(answer, requests)

    def _chat_completion(self, body: ChatBody) -> Job:
        prompt, requests, make_parser = self._chat(body)
        shown = _shown(body, bool(body.logprobs))
        answer = ChatCompletion(self.model, self.tokenizer, [prompt], body.n or 1, shown, make_parser)
        return Job(answer, requests)

    def _response(self, body: ResponseBody) -> Job:
        with own_names():
            _, requests, make_parser = self._chat(body.chat())
        if make_parser is not None and body.shows_logprobs:
            why = "this server divides thoughts or calls from the text"
            raise ApiError(400, f"include must not have {LOGPROBS}: {why}", "include")
        parser = None if make_parser is None else make_parser()
        return Job(ResponseObject(body, self.tokenizer, requests[0], parser), requests)

    def _chat(self, body: ChatBody) -> tuple[list[int], list[Request], Callable[[], MessageParser] | None]:
        """The tokens of a chat's prompt, its requests, and what makes the parser of a text; None: it needs none."""
        form = self._call_format(body)
        rendered = self.render(body, lambda text: self._check_length(text, "messages"))
        prompt = rendered.tokens
        wanted = body.max_completion_tokens or body.max_tokens
        name = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        new_tokens = self._new_tokens(prompt, "messages", wanted, name)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        is_bound = body.format_field or body.has_bound_calls
        grammar = self._grammars.of_message(body, rendered, form) if is_bound else ""
        stop = () if grammar else self.chat.stop  # a text may follow its grammar to the end
        given = self._defaults, self._bad_words(body), grammar, stop
        choices = [body.sampling(new_tokens, logprobs, i, *given) for i in range(body.n or 1)]
        if tags := self._tags(form):
            choices = [replace(choice, shown_tokens=tags) for choice in choices]
        requests = self._requests(prompt, choices)

        divides = form is not None or self._parsers.reasoning is not None
        has_format = bool(body.format_field) and bool(getattr(body, body.format_field).grammar)

        thought_tags = self._tag(BEGIN), self._tag(END)
        calls = None if form is None else form.written(self._tag, without_marks)

        def make_parser() -> MessageParser:
            return MessageParser(
                ReasoningParser(rendered.thought is Thought.BEGUN, *thought_tags) if self._parsers.reasoning else None,
                ToolParser(calls, body.parallel_tool_calls is not False) if calls is not None else None,
                body.must_call,
                has_format,
            )

        return prompt, requests, make_parser if divides else None

    def render(self, body: Conversation, check: Callable[[str], object] = lambda text: None) -> Prompt:
        """Render a conversation by the chat template; check: called with the prompt's text before it is encoded.

        Raises:
            ApiError: 400, the chat template refuses the messages, or does not do what a field asks for.
        """
        try:
            return self.chat.prompt([message.plain() for message in body.messages], body.rendering(), check)
        except FieldError as error:
            raise ApiError(400, str(error), error.field) from None
        except ValueError as error:
            raise ApiError(400, str(error), "messages") from None

    def _bad_words(self, body: Generation) -> tuple[tuple[int, ...], ...]:
        return token_sequences(self.tokenizer, body.bad_words) if body.bad_words else ()

    def _call_format(self, body: ChatBody) -> CallFormat | None:
        """How the model writes the calls that a chat may have; None: it has none."""
        if not body.may_call:
            return None
        if self._parsers.tool_calls is None:
            message = "tools must be empty, or tool_choice 'none': this server has no --tool-call-parser"
            raise ApiError(400, message, "tools")
        return FORMATS[self._parsers.tool_calls]

    def _tags(self, form: CallFormat | None) -> tuple[int, ...]:
        """The tokens of the tags that a chat's parsers look for; a tag of several tokens has none."""
        texts = [*((BEGIN, END) if self._parsers.reasoning else ()), *(form.texts if form is not None else ())]
        found = (self.tokenizer.backend.token_to_id(text) for text in texts)
        return tuple(token for token in found if token is not None)

    def _tag(self, text: str) -> str:
        """A tag as it comes in the engine's text: as a token, or as text where there is none."""
        is_token = self.tokenizer.backend.token_to_id(text) is not None
        return f"{MARK}{text}" if is_token and self.tokenizer.token_bytes is not None else text

    def _requests(self, prompt: Sequence[int], choices: Sequence[Sampling]) -> list[Request]:
        """Make the requests of a prompt's choices; raise ApiError, 400, if the model cannot continue it."""
        try:
            return self._factory.make(prompt, *choices)
        except ValueError as error:
            raise ApiError(400, str(error), str(error).split()[0]) from None

    def _check_length(self, text: str, name: str) -> None:
        """Raise ApiError, 400, if a text is too long for the context whatever its tokens are."""
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest >= self.context:
            raise self._prompt_too_long(f"at least {fewest}", name)

    def _new_tokens(self, prompt: Sequence[int], field: str, wanted: int | None, name: str = "max_tokens") -> int:
        """The limit of a choice's tokens: what it asks for, or the rest of the context.

        Args:
            prompt: its tokens.
            field: the field that they come from.
            wanted: what the choice asks for; None: the rest of the context.
            name: the field that asks for it.

        Raises:
            ApiError: 400, prompt and new tokens exceed the context, or the limit of new tokens is exceeded.
        """
        limit, rest = self.limits.new_tokens or self.context, self.context - len(prompt)
        if rest < 1:
            raise self._prompt_too_long(str(len(prompt)), field)
        if wanted is not None and wanted > rest:
            raise self._exceeds_context(f"{name} is too large", f"{len(prompt)} and {name} is {wanted}", name)
        if wanted is not None and wanted > limit:
            raise ApiError(400, f"{name} must be at most {limit}, the limit of this server, not {wanted}", name)
        return min(limit, rest) if wanted is None else wanted

    def _prompt_too_long(self, tokens: str, name: str) -> ApiError:
        return self._exceeds_context("the prompt is too long", f"{tokens}, and one new token is needed", name)

    def _exceeds_context(self, wrong: str, given: str, name: str) -> ApiError:
        # LangChain, LiteLLM and others know this error by these words, and read the number without a comma
        limit = f"this model's maximum context length is {self.context} tokens"
        return ApiError(400, f"{wrong}: {limit}, but the prompt has {given}", name, INVALID_LENGTH)

    async def _respond(
        self, request: HttpRequest, form: type[B], read: Callable[[B], Job], count_choices: Callable[[B], int]
    ) -> Response:
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        self._check_open()
        async with AsyncExitStack() as held:
            slots = _Slots(self)
            held.callback(slots.release)
            slots.take(1)  # before the body is read, so that there are only so many in memory
            body = parse(form, await _read_body(request, self.limits.body, deadline))
            self.check_model(body.model)
            slots.take(count_choices(body) - 1)

            def named(body: B) -> Job:
                job = read(body)
                job.answer.request_id = body.request_id or request.state.request_id
                request.state.answer = job.answer  # for the access log
                return job

            if not body.stream:
                whole = await while_connected(request.receive, self._whole(body, named, deadline))
                return PacedResponse.of_json(whole, held.pop_all())
            events = self._events(body, named, deadline, request.state.connection.write)
            events = await held.enter_async_context(aclosing(events))
            first = await while_connected(request.receive, _next(events))
            return PacedResponse.of_events(_chain(first, events), held.pop_all())

    def _check_open(self) -> None:
        if why := self.why_closed():
            raise ApiError(503, why, headers=RETRY)

    async def _whole(self, body: B, read: Callable[[B], Job], deadline: float) -> bytes:
        """The body of a whole response."""
        job = await asyncio.to_thread(read, body)

        def add(new: Sequence[tuple[int, Output]]) -> bool:
            for index, output in new:
                job.answer.add(index, output)
            return True

        async with aclosing(self._outputs(job, deadline, lambda stream: add(stream.take()))) as outputs:
            async for new in outputs:
                add(new)
        return await json_bytes(job.answer.whole())

    async def _events(
        self, body: B, read: Callable[[B], Job], deadline: float, write: Callable[[Callable[[], bytes]], bool]
    ) -> AsyncGenerator[str, None]:
        """The events of a stream, but those that `write` can write at once.

        An error before the first event is raised; later it is an event.
        """
        has_begun = False
        try:
            job = await asyncio.to_thread(read, body)

            def write_new(stream: Stream) -> bool:
                return write(lambda: job.answer.events(stream.take()).encode())

            async with aclosing(self._outputs(job, deadline, write_new)) as outputs:
                async for new in outputs:
                    first = "" if has_begun else job.answer.first_events()
                    has_begun = True
                    yield first + job.answer.events(new)
            yield job.answer.last_events()
        except ApiError as error:
            if not has_begun:
                raise
            job.answer.error_status = error.status
            yield job.answer.error_event(error)

    async def _outputs(
        self, job: Job, deadline: float, write: Callable[[Stream], bool]
    ) -> AsyncGenerator[list[tuple[int, Output]], None]:
        """What is new about the choices of a request, until all have finished. Leaving it early cancels them.

        Args:
            job: the request.
            deadline: when its time is over.
            write: takes outputs after the first ones as they come, if it can; see `Stream.write`.

        Raises:
            ApiError: 400, no token can follow what the request asks for; 500, the engine fails; 503, it is stopped;
                504, time is over.
        """
        stream: Stream | None = None
        try:
            stream = self.engine.submit(job.requests, job.answer.request_id)
            while True:
                async with asyncio.timeout_at(deadline):
                    new = await stream.next()
                if not new:
                    return
                for index, output in new:
                    if output.is_request_error:
                        raise ApiError(400, f"choice {index} cannot be continued: {output.error}")
                    if output.finish_reason is FinishReason.ERROR:
                        raise ApiError(500, f"the engine failed in choice {index}: {output.error}", headers=NEVER_RETRY)
                yield new
                stream.write = write
        except TimeoutError:
            message = f"the request took longer than {self.limits.seconds:g} seconds, the limit of this server"
            raise ApiError(504, message, code="timeout", headers=NEVER_RETRY) from None
        except EngineError as error:
            raise ApiError(500 if self.engine.failure else 503, str(error), headers=RETRY) from None
        finally:
            if stream is not None:
                stream.close()


def _shown(body: Generation, logprobs: bool) -> Shown:
    options = body.stream_options or StreamOptions()
    usage = bool(options.include_usage), bool(options.continuous_usage_stats)
    return Shown(body.prompt_logprobs is not None, bool(body.return_token_ids), *usage, logprobs)


async def _next(events: AsyncGenerator[str, None]) -> str:
    return await anext(events)


async def _chain(first: str, others: AsyncIterator[str]) -> AsyncIterator[str]:
    yield first
    async for text in others:
        yield text


async def _read_body(request: HttpRequest, limit: int, deadline: float) -> bytes:
    """Read the body of a request.

    Args:
        request: the request.
        limit: bytes of the body.
        deadline: when the request's time is over, in the event loop's time.

    Raises:
        ApiError: 415, it is announced as something else than JSON, or as compressed; 413, it has more bytes than the
            limit; 408, it does not arrive in time.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a browser then asks before it sends another site's request
        raise ApiError(415, f"content-type must be application/json, not {kind or 'missing'}")
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"content-encoding must be identity, not {coding}: compressed bodies are not read")
    announced = request.headers.get("content-length", "0")
    if int(announced) > limit:
        raise _too_large(limit)
    content = bytearray()
    seconds = min(BODY_SECONDS, deadline - asyncio.get_running_loop().time())
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                content += piece
                if len(content) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:.3g} seconds") from None
    except ClientDisconnect:
        raise ApiError(499, "the client has closed the connection") from None
    return bytes(content)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body has more than {limit} bytes, which is the most that this server reads")
