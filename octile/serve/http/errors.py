"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

NEVER_RETRY = {"x-should-retry": "false"}  # to OpenAI's clients, which retry every status from 500 on


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: the HTTP status.
        message: what came and what is needed.
        param: the field of the body that is wrong.
        code: the word by which a program knows the error.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that represents the error, in a response or in an event of a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response with the error's status."""
        return JSONResponse(self.body(), self.status, self.headers)
