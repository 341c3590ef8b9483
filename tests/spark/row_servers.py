"""A server of rows that answers in this process."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from leasehold.adapters.spark.fetching import (
    REQUEST,
    FetchedRows,
)


@contextmanager
def answering(answer: bytes) -> Iterator[FetchedRows]:
    """Run a driver that sends this much to a task and then goes away."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def send() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(REQUEST.size)
                connection.sendall(answer)

        thread = Thread(target=send)
        thread.start()
        yield FetchedRows("127.0.0.1", listening.getsockname()[1], bytes(32), 1, 0)
        thread.join()
