"""The events of a worker's shards and records, as one JSON line each, for programs that watch from outside."""

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TextIO

from leasehold.adapters.reading.handlers.handling import Delivery, Handling, Happening
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.worker.holding import Holding

CLOSED_STATUS = 128 + signal.SIGPIPE
"""The exit status of a tool in a pipe whose reader has gone."""


class EventLines:
    """Writes lines of `t` (milliseconds since 1970), `worker`, `event`, `shard`, and what the event adds.

    Where one worker reads several streams, `stream` says which, as its leases do.

    A record's line is written as it is handed over, before its checkpoint; the data itself never is. Once the reader of
    `out` has gone nothing more is written: each call raises SystemExit, which ends the worker in good order.
    """

    def __init__(self, worker: str, out: TextIO, wall: Callable[[], float] = time.time) -> None:
        self._worker, self._out, self._wall = worker, out, wall
        self._lock = Lock()
        self._closed = False

    def happened(self, happening: Happening, holding: Holding) -> None:
        """Reading of a shard began, or stopped."""
        self._write([self._line(happening, holding.lease.stream, holding.lease.shard)])

    def handle(self, delivery: Delivery) -> None:
        """Take a batch for handled once its lines are out."""
        token = {} if delivery.epoch is None else {"epoch": delivery.epoch}
        self._write(
            [
                self._line("record", delivery.stream, delivery.shard, **_told(record), **token)
                for record in delivery.records
            ]
        )

    @property
    def handling(self) -> Handling:
        """The handling that does nothing but write."""
        return Handling(self.handle, observer=self.happened)

    def _line(self, event: str, stream: str, shard: str, **more: Any) -> str:  # noqa: ANN401  strings and numbers alike
        where = {"stream": stream, "shard": shard} if stream else {"shard": shard}
        line = {"t": int(self._wall() * 1000), "worker": self._worker, "event": event, **where, **more}
        return json.dumps(line) + "\n"

    def _write(self, lines: list[str]) -> None:
        with self._lock:
            if not self._closed:
                try:
                    self._out.write("".join(lines))
                    self._out.flush()
                except BrokenPipeError:
                    self._closed = True
                    _discard(self._out)
        if self._closed:
            raise SystemExit(CLOSED_STATUS)


def _discard(out: TextIO) -> None:
    """Send what is still buffered nowhere, or Python would fail on it once more as it ends."""
    with suppress(OSError):  # no file of the system's
        file, nowhere = out.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, file)
        os.close(nowhere)


def _told(record: Record) -> dict[str, Any]:
    return {
        "sequence_number": record.sequence_number,
        "sub_sequence_number": record.sub_sequence_number,
        "partition_key": record.partition_key,
        "sha1": hashlib.sha1(record.data, usedforsecurity=False).hexdigest(),
    }
