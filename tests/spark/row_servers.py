"""A server of rows that responds in this process."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from leasehold.adapters.spark.fetching import (
    REQUEST_FORMAT,
    FetchedRows,
)


@contextmanager
def serving_bytes(response: bytes) -> Iterator[FetchedRows]:
    """Run a driver that sends these bytes to a task and then closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(REQUEST_FORMAT.size)
                connection.sendall(response)

        thread = Thread(target=serve)
        thread.start()
        yield FetchedRows("127.0.0.1", listener.getsockname()[1], bytes(32), 1, 0)
        thread.join()
