"""A process that hangs; what it runs is in a file of its own, which imports nothing that takes long."""

from multiprocessing.connection import Connection


def never_answers(connection: Connection) -> None:
    """Receive for ever."""
    while True:
        connection.recv()
