"""The paths of the server, as a FastAPI application."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from ipaddress import ip_address
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octile import __version__
from octile.serve.http.config import WRITE_SECONDS
from octile.serve.http.response_body import NOT_KEPT
from octile.serve.http.responses import NEVER_RETRY, ApiError
from octile.serve.http.service import Service
from octile.serve.http.tokenization import detokenize, tokenize
from octile.validation import quoted

NOT_FOUND, METHOD_NOT_ALLOWED, INTERNAL_ERROR = 404, 405, 500
READ = ["GET", "HEAD"]  # monitors ask with HEAD
UPDATES = {"/update_weights_from_disk", "/update_weights_from_tensor"}  # SGLang's names
HEADER = "X-Request-Id"
ID = re.compile(r"[!-~]{1,128}")  # visible characters of ASCII
OPEN_PATHS = {"/", "/health", "/ping", "/load", "/version", "/metrics"}
TOKENIZERS = {"/tokenize", "/detokenize"}
COUNTED_PATHS = {
    *OPEN_PATHS,
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    *TOKENIZERS,
    *UPDATES,
}


def create_app(
    service: Service,
    api_keys: Sequence[str] = (),
    hosts: Sequence[str] | None = None,
    weights_key: str | None = None,
) -> FastAPI:
    """Make the application.

    Args:
        service: the model.
        api_keys: one of them is needed, as a bearer token, for every path under /v1, /tokenize and /detokenize; none is
            needed if there are none.
        hosts: names under which requests may address the server, besides addresses and localhost; None: any name.
        weights_key: is needed, as a bearer token, to update the weights; None: they cannot be updated.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await service.engine.stop()

    async def report_defect(request: Request, _: Exception) -> Response:
        """The response to a request that raised what it should not; uvicorn prints the traceback."""
        _count(service, request.url.path, INTERNAL_ERROR)  # Starlette responds outside of all middleware
        message = "the server has a defect, which its log shows"
        return ApiError(INTERNAL_ERROR, message, headers=NEVER_RETRY).response()

    app = FastAPI(
        title="octile", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.add_exception_handler(ApiError, _api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, report_defect)
    app.include_router(_open_paths(service))
    app.include_router(_v1(service), prefix="/v1", dependencies=[Depends(_KeyCheck(api_keys))])
    app.include_router(_tokenizers(service), dependencies=[Depends(_KeyCheck(api_keys))])
    check = _refuse_updates if weights_key is None else _KeyCheck([weights_key], "weights")
    app.include_router(_updates(service), dependencies=[Depends(check)])
    if hosts is not None:
        app.add_middleware(_HostCheck, hosts=hosts)
    app.add_middleware(_CountResponses, service=service)
    app.add_middleware(_TimeLimit, seconds=service.limits.seconds)
    app.add_middleware(_StripSlashes)
    return app


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let browsers show the application's answers, also its errors, to scripts of other origins.

    Args:
        app: the application.
        origins: those that are allowed, as browsers send them; "*" is any.

    Source: the Fetch standard, "CORS protocol".
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=(*READ, "POST"),
        allow_headers=("*",),  # OpenAI's client sends a dozen
        expose_headers=("Retry-After", HEADER, *NEVER_RETRY),
    )


def _open_paths(service: Service) -> APIRouter:
    router = APIRouter()
    page = files("octile.serve.http").joinpath("page.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(page), "x-content-type-options": "nosniff"}

    @router.api_route("/", methods=READ)
    async def show_page() -> Response:
        return HTMLResponse(page, headers=headers)

    @router.api_route("/health", methods=READ)
    @router.api_route("/ping", methods=[*READ, "POST"])  # SageMaker's name; vLLM answers POST, too
    async def health() -> Response:
        why = service.why_closed() or service.why_hung()
        return JSONResponse({"status": why or "ok"}, 503 if why else 200)

    @router.api_route("/load", methods=READ)
    async def load() -> dict[str, int]:
        return {"server_load": service.in_flight}

    @router.api_route("/version", methods=READ)
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.api_route("/metrics", methods=READ)
    async def metrics(request: Request) -> Response:
        content, content_type = service.metrics.text(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})

    return router


def _v1(service: Service) -> APIRouter:
    router = APIRouter()

    @router.api_route("/models", methods=READ)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(service)]}

    @router.api_route("/models/{name:path}", methods=READ)
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _describe(service)

    router.add_api_route("/completions", service.complete, methods=["POST"])
    router.add_api_route("/chat/completions", service.chat_complete, methods=["POST"])
    router.add_api_route("/responses", service.respond, methods=["POST"])
    router.add_api_route("/responses/{response_id:path}", _refuse_kept_response, methods=["GET", "POST", "DELETE"])
    return router


def _refuse_kept_response(response_id: str) -> None:
    if response_id in ("input_tokens", "compact"):  # paths of OpenAI's, and no responses
        raise ApiError(NOT_FOUND, _no_path(f"/v1/responses/{response_id}"))
    raise ApiError(NOT_FOUND, f"the response {quoted(response_id)} is unknown: {NOT_KEPT}", "response_id")


def _tokenizers(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    async def tokens_of(request: Request) -> Response:
        return await service.compute(request, tokenize)

    @router.post("/detokenize")
    async def text_of(request: Request) -> Response:
        return await service.compute(request, detokenize)

    return router


def _updates(service: Service) -> APIRouter:
    router = APIRouter()
    router.add_api_route("/update_weights_from_disk", service.update_from_disk, methods=["POST"])
    router.add_api_route("/update_weights_from_tensor", service.update_from_tensor, methods=["POST"])
    return router


def _refuse_updates() -> None:
    message = (
        "the weights of this server cannot be updated: octile serve --weights-key KEY, or OCTILE_WEIGHTS_KEY in its "
        "environment, allows it to those who have the key"
    )
    raise ApiError(403, message, code="updates_not_allowed")


def _describe(service: Service) -> dict[str, Any]:
    """The model as OpenAI describes it, its context under vLLM's name, its chat template and its weights' version."""
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "octile",
        "max_model_len": service.context,
        "chat_template": "plain" if service.chat.is_plain else "tokenizer",
        "weights_version": service.engine.stats.weights_version,
    }


class _KeyCheck:
    """Raises ApiError, 401, unless a request has one of the keys.

    Args:
        keys: the keys; none is needed if there are none.
        name: what messages call them.
    """

    def __init__(self, keys: Sequence[str], name: str = "API"):
        self._digests, self._name = [_digest(key) for key in keys], name

    async def __call__(self, request: Request) -> None:  # FastAPI calls what is not async in a thread
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = _digest(key.strip() if scheme.lower() == "bearer" else "")
        if self._digests and not any(hmac.compare_digest(given, known) for known in self._digests):
            what = "is not one of this server's" if key else "is missing: Authorization: Bearer KEY"
            raise ApiError(401, f"the {self._name} key {what}", None, "invalid_api_key", {"www-authenticate": "Bearer"})


class _HostCheck:
    """Middleware that refuses requests to other names than the server's, with 403.

    A site can have its name resolve to 127.0.0.1 when its page is loaded, whose scripts then reach this server as if it
    were theirs. They cannot choose the Host that the browser sends, which is that name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]):
        self._app, self._hosts = app, {"localhost", *(host.lower() for host in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = _host_name(Headers(scope=scope).get("host", "")) if scope["type"] == "http" else "localhost"
        if name in self._hosts or name.endswith(".localhost") or _is_address(name):
            return await self._app(scope, receive, send)
        message = (
            f"host {name!r} is refused: without an API key, a server that only this machine reaches answers to "
            "localhost and to addresses"
        )
        await ApiError(403, message, code="host_not_allowed").response()(scope, receive, send)


class _StripSlashes:
    """Middleware that answers a path with slashes at its end as the path without them.

    FastAPI, and with it vLLM, redirects such requests. Clients that do not follow need one answer, and a redirect names
    the scheme and the host that the server sees, which are not the client's behind a proxy.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = scope["path"].rstrip("/") or scope["path"]
        await self._app(scope, receive, send)


class AddRequestId:
    """Middleware that gives each request an id, in `request.state.request_id`, and its response the same in a header.

    The id is that of the header `X-Request-Id`, or a new one where there is none or the header is no id. The ids of
    answers contain it, so that what a client, a proxy and this server write of a request can be found together.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application, as ASGI has it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if ID.fullmatch(given) else uuid.uuid4().hex

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        scope.setdefault("state", {})["request_id"] = request_id
        await self._app(scope, receive, with_id)


class _CountResponses:
    """Middleware that counts the responses of each path and status, and the errors that end a stream."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_failed = False

        async def counted(message: Message) -> None:
            nonlocal has_failed
            if message["type"] == "http.response.start":
                _count(self._service, scope["path"], message["status"])
            elif not has_failed and (error := _stream_error(scope)):  # before a client reads it
                has_failed = True
                self._service.metrics.stream_failed(scope["path"], error)
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


class _TimeLimit:
    """Middleware that ends the connection of a client that has not read its response in time."""

    def __init__(self, app: ASGIApp, seconds: float):
        self._app, self._seconds = app, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            async with asyncio.timeout(self._seconds + WRITE_SECONDS) as limit:
                await self._app(scope, receive, send)
        except TimeoutError:
            if not limit.expired():
                raise
            scope["state"]["connection"].abort()


async def _api_error(_: Request, error: ApiError) -> Response:
    return error.response()


def _stream_error(scope: Scope) -> int | None:
    """The status of the error that ends a stream, if one does."""
    answer = scope["state"].get("answer")
    return None if answer is None else answer.error_status


def _count(service: Service, path: str, status: int) -> None:
    service.metrics.responded(path if path in COUNTED_PATHS else "other", status)


async def _http_error(request: Request, error: HTTPException) -> Response:
    """An error of the router, such as an unknown path, in OpenAI's format; or the methods of a path, for OPTIONS."""
    if request.method == "OPTIONS" and error.status_code == METHOD_NOT_ALLOWED:
        return Response(status_code=204, headers={"allow": ", ".join([(error.headers or {})["Allow"], "OPTIONS"])})
    path, message = request.scope["path"], str(error.detail)
    if error.status_code == NOT_FOUND:
        message = _no_path(path)
    elif error.status_code == METHOD_NOT_ALLOWED:
        message = f"{path} has no method {request.method}, but {(error.headers or {})['Allow']}"
    return ApiError(error.status_code, message, headers=error.headers).response()


def _no_path(path: str) -> str:
    """Say that there is no path, and which one could be meant: with or without /v1, as a client's base_url has it."""
    asked = path.rstrip("/")
    alike = [known for known in sorted(COUNTED_PATHS - {"/"}) if known.endswith(asked) or asked.endswith(known)]
    meant = f"; perhaps you meant {' or '.join(alike)}" if asked and alike else ""
    return f"there is no path {quoted(path)} here{meant}"


def _host_name(host: str) -> str:
    """The name of a Host header, without its port."""
    return host.partition("]")[0].removeprefix("[").lower() if host.startswith("[") else host.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _policy(page: str) -> str:
    """The content security policy of the page: its own script and style, and requests to this server."""
    hashes = {}
    for tag in ("script", "style"):
        inside = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = hashlib.sha256(inside[1].encode()).digest() if inside else b""
        hashes[tag] = f"'sha256-{base64.b64encode(digest).decode()}'"
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
