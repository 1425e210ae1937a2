"""An S3 server for tests: moto's, on a port of this machine, with uploads that can be made to stall or fail."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "octile",
    "AWS_SECRET_ACCESS_KEY": "octile",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class ObjectStore:
    """A running server with one bucket.

    Attributes:
        bucket: its URL.
        environment: what a client of it needs.
        stalled: set when an upload that is to stall has begun.
    """

    def __init__(self) -> None:
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._released = threading.Event()
        self._stalls, self._fails = "", ("", "")
        self.bucket, self.stalled = "s3://octile", threading.Event()
        self.environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.port}"}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def files(self) -> s3fs.S3FileSystem:
        """The file system of the server, whose listings are not cached."""
        return s3fs.S3FileSystem(use_listings_cache=False)

    def stall(self, part: str) -> None:
        """Let each upload to a path with this part stall when half of it has come, until it is released."""
        self.stalled.clear()
        self._released.clear()
        self._stalls = part

    def fail(self, part: str, method: str = "PUT") -> None:
        """Let each request of a method to a path with this part be refused, as by a policy."""
        self._fails = method, part

    def release(self) -> None:
        """Let uploads pass again. One that stalled is answered by an error."""
        self._stalls, self._fails = "", ("", "")
        self._released.set()

    def close(self) -> None:
        """Empty and end the server: moto keeps buckets for the next one of this process."""
        self.release()
        urlopen(Request(f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/reset", method="POST")).close()
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = f"{environ['PATH_INFO']}?{environ['QUERY_STRING']}", environ["REQUEST_METHOD"]
        if method == self._fails[0] and self._fails[1] in path:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return _refuse(start_response, "403 Forbidden", "AccessDenied")
        if method == "PUT" and self._stalls and self._stalls in path:
            environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]) // 2)
            self.stalled.set()
            self._released.wait()
            return _refuse(start_response, "400 Bad Request", "IncompleteBody")
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer


def _refuse(start_response: Callable[..., Any], status: str, code: str) -> list[bytes]:
    start_response(status, [("Content-Type", "application/xml"), ("Connection", "close")])
    return [f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()]


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Context manager that yields a server with an empty bucket, which clients of this process and its children use."""
    store = ObjectStore()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            if name in os.environ:
                patch.delenv(name)
        s3fs.S3FileSystem.clear_instance_cache()  # a client keeps the address that it began with
        try:
            store.files.mkdir(store.bucket)
            yield store
        finally:
            store.close()
            s3fs.S3FileSystem.clear_instance_cache()
