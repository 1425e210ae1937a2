"""A process that hangs and one that answers; they are in a file of their own, which imports nothing that takes long."""

from multiprocessing.connection import Connection


def never_answers(connection: Connection) -> None:
    """Receive for ever."""
    while True:
        connection.recv()


def answers(connection: Connection) -> None:
    """Send that it has started."""
    connection.send("started")
