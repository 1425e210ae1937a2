"""The server's address, which is bound before the model is loaded."""

from __future__ import annotations

import errno
import socket

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Bind an address. Connections are refused until a server listens.

    Raises:
        ValueError: the host is unknown, or the address is in use or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host {host!r} is not an address of this machine: {error.strerror}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ValueError(f"host {host!r} is not an address of this machine: {error.strerror}") from None
        raise ValueError(f"port {port} of {host} cannot be used: {error.strerror}") from None
    return bound


def url_of(bound: socket.socket, is_tls: bool = False) -> str:
    """The URL of a bound address."""
    host, port = bound.getsockname()[:2]
    return f"http{'s' * is_tls}://{f'[{host}]' if ':' in host else host}:{port}"


def listen(bound: socket.socket) -> None:
    """Have connections to a bound address wait for a server.

    Raises:
        ValueError: another server listens there, which has bound the address, too, before one of them listened.
    """
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise ValueError(f"port {port} of {host} cannot be used: {error.strerror}") from None
