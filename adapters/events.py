"""What happens to a worker's shards and records, as one JSON line each, for whoever watches from outside."""

import hashlib
import json
import time
from collections.abc import Callable
from threading import Lock
from typing import Any, TextIO

from adapters.handling import Delivery, Handling, Happening
from adapters.holding import Holding
from adapters.source import Record


class EventLines:
    """Writes lines of `t` (milliseconds since 1970), `worker`, `event`, `shard`, and what the event adds.

    Where one worker reads several streams, `stream` says which, as its leases do.

    A record's line is written as it is handed over, before its checkpoint; the data itself never is.
    """

    def __init__(self, worker: str, out: TextIO, wall: Callable[[], float] = time.time) -> None:
        self._worker, self._out, self._wall = worker, out, wall
        self._lock = Lock()

    def happened(self, happening: Happening, holding: Holding) -> None:
        """Reading of a shard began, or stopped."""
        self._write([self._line(happening, holding.lease.stream, holding.lease.shard)])

    def handle(self, delivery: Delivery) -> None:
        """Take a batch for handled once its lines are out."""
        self._write(
            [self._line("record", delivery.stream, delivery.shard, **_told(record)) for record in delivery.records]
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
            self._out.write("".join(lines))
            self._out.flush()


def _told(record: Record) -> dict[str, Any]:
    return {
        "sequence_number": record.sequence_number,
        "sub_sequence_number": record.sub_sequence_number,
        "partition_key": record.partition_key,
        "sha1": hashlib.sha1(record.data, usedforsecurity=False).hexdigest(),
    }
