"""What the HTTP process runs. It imports no torch, and reads what it serves when the engine has been loaded."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from octile.serve.engine.stats import Stats
from octile.serve.http.address import listen
from octile.serve.http.config import HttpConfig
from octile.serve.process.messages import Failed
from octile.serve.process.signals import signals_ignored


class Start(NamedTuple):
    """What is served, once the engine is loaded.

    Attributes:
        folder: the Hugging Face folder, with the tokenizer.
        vocab_size, context: tokens of the model, and the positions that a prompt and its new tokens may have together.
        stats: counts of the engine.
        defaults: argument of `Service`.
        hosts: argument of `Server`.
        config: how it is served.
    """

    folder: Path
    vocab_size: int
    context: int
    stats: Stats
    defaults: Mapping[str, Any]
    hosts: tuple[str, ...] | None
    config: HttpConfig


class Listening(NamedTuple):
    """Connections wait for the server, which begins now."""


@signals_ignored()  # the process of the engine has them, too, and asks this one to end
def answer(connection: Connection, bound: socket.socket) -> None:
    """Answer requests at a bound address until the process of the engine asks for the end, or has ended."""
    # late: the process of the engine imports this module, too, and needs no FastAPI
    from octile.chat.template import ChatTemplate
    from octile.serve.http.server import Server
    from octile.serve.http.service import Service
    from octile.serve.process.client import EngineClient
    from octile.serve.process.signals import freeze_loaded
    from octile.tokenizer import Tokenizer

    try:
        start: Start = connection.recv()
    except EOFError:  # the engine cannot be loaded
        return
    tokenizer = Tokenizer.load(start.folder)
    engine = EngineClient(connection, start.stats)
    chat, config = ChatTemplate.load(start.folder, tokenizer), start.config
    service = Service(
        engine, tokenizer, start.vocab_size, start.context, chat, config.limits, config.model_name, start.defaults,
        config.parsers,
    )  # fmt: skip
    try:
        tls = config.tls.context() if config.tls else None
        server = Server(
            service, config.api_keys, start.hosts, config.weights_key, tls, config.origins, config.has_access_log
        )
        engine.on_drain = server.drain
        freeze_loaded()
        listen(bound)
    except ValueError as error:
        connection.send(Failed(error))
        return
    connection.send(Listening())
    try:
        server.run([bound])
    except Exception as error:
        if engine.failure is None:
            raise
        if engine.has_ended:  # otherwise its process reports the error
            sys.exit(f"octile: {error}")
