"""The events of a worker's shards and records, as one JSON line each, for programs that watch from outside.

Log lines as JSON objects, one a line, for collectors of logs.
"""

import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from threading import Lock
from typing import Any, TextIO

from attrs import frozen

from leasehold.adapters.consumer.handling import Delivery, Handling, Happening
from leasehold.adapters.worker.holding import Holding

CLOSED_STATUS = 128 + signal.SIGPIPE
"""The exit status of a tool in a pipe whose reader has gone."""


@frozen
class NotTaken:
    """The bytes that a file did not take: `left` is to be written again, and begins with a whole line."""

    left: bytes
    why: OSError


class WholeLines:
    """Lines on their way into a file that may refuse some for a while, as a full disk does.

    Rule: a line of which a part was taken is finished before anything else is written, so none is ever torn or half
    there twice. Used by one thread at a time.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._torn = out, b""

    def write(self, data: bytes) -> NotTaken | None:
        """Write these lines; what the file refused of them, None where it took all. Raises BrokenPipeError."""
        binary = getattr(self._out, "buffer", None)
        raw = getattr(binary, "raw", binary)  # under PYTHONUNBUFFERED the one is the other
        if raw is None:  # in memory
            self._out.write(data.decode())
            self._out.flush()
            return None
        whole, taken, refused = self._torn + data, 0, None
        try:
            while taken < len(whole):
                taken += raw.write(whole[taken:]) or 0
        except BrokenPipeError:
            raise
        except OSError as why:
            refused = why
        finally:
            # Whether or not all was taken: of a line of which a part was, of this call or of one before, the rest is
            # kept here and goes first the next time. The caller is given back whole lines alone.
            torn = whole[taken - 1 : taken] != b"\n" if taken else bool(self._torn)
            self._torn = whole[taken : whole.find(b"\n", taken) + 1] if torn else b""
        return None if refused is None else NotTaken(whole[taken + len(self._torn) :], refused)


class EventLines:
    """Writes lines of `t` (milliseconds since 1970), `worker`, `event`, `shard`, and what the event adds.

    `stream` is the stream's name, as `Delivery.stream` has it.

    Where `out` takes no more for a while (a full disk), a call raises OSError, and its batch comes again.
    A record's line is written as it is handed over, before its checkpoint; the data itself never is. Once the reader of
    `out` has gone nothing more is written: each call raises SystemExit, which ends the worker in good order.
    """

    def __init__(self, worker: str, out: TextIO, wall: Callable[[], float] = time.time) -> None:
        self._worker, self._out, self._wall = worker, out, wall
        self._lines, self._kept = WholeLines(out), b""
        self._lock, self._closed = Lock(), False

    def happened(self, happening: Happening, holding: Holding) -> None:
        """Reading of a shard began, or stopped."""
        self._write([self._line(happening, holding.stream, holding.lease.shard)], keep=True)

    def handle(self, delivery: Delivery) -> None:
        """Take a batch for handled once its lines are out."""
        token = {} if delivery.epoch is None else {"epoch": delivery.epoch}
        lines = []
        for record in delivery.records:
            told = {
                "sequence_number": record.sequence_number,
                "sub_sequence_number": record.sub_sequence_number,
                "partition_key": record.partition_key,
                # Never the data itself: a log is read by more people than a stream.
                "sha1": hashlib.sha1(record.data, usedforsecurity=False).hexdigest(),
            }
            lines.append(self._line("record", delivery.stream, delivery.shard, **told, **token))
        self._write(lines)

    @property
    def handling(self) -> Handling:
        """The handling that does nothing but write."""
        return Handling(self.handle, observer=self.happened)

    def _line(self, event: str, stream: str, shard: str, **more: Any) -> str:  # noqa: ANN401  strings and numbers alike
        where = {"stream": stream, "shard": shard} if stream else {"shard": shard}
        line = {"t": int(self._wall() * 1000), "worker": self._worker, "event": event, **where, **more}
        return json.dumps(line) + "\n"

    def _write(self, lines: list[str], *, keep: bool = False) -> None:
        """Write these; if `keep`, with the next ones where they are refused."""
        data, refused = "".join(lines).encode(), None
        with self._lock:
            if not self._closed:
                try:
                    refused = self._lines.write(self._kept + data)
                    left = b"" if refused is None else refused.left
                    # Records are handed over again after a fault; of what happened to a shard nobody would tell again.
                    self._kept = left if keep else left[: max(0, len(left) - len(data))]
                except BrokenPipeError:
                    self._closed = True
                    # What is still buffered goes nowhere, or Python would fail on it once more as it ends.
                    with suppress(OSError):  # no file of the system's
                        file, nowhere = self._out.fileno(), os.open(os.devnull, os.O_WRONLY)
                        os.dup2(nowhere, file)
                        os.close(nowhere)
        if self._closed:
            raise SystemExit(CLOSED_STATUS)
        if refused is not None and not keep:
            raise refused.why  # the batch has failed, and comes again


FIELDS = ("lease", "rule", "outcome")
"""The fields of a line beside its message: the lease, the rule that asked, and the store's outcome."""


class JsonLines(logging.Formatter):
    """Formats records as JSON: at, level, logger, worker, message, and those of FIELDS that a line has."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Write the message as a single line, also where it holds several."""
        told = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
        }
        told |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info or record.exc_text:
            told["trace"] = record.exc_text or self.formatException(record.exc_info or (None, None, None))
        return json.dumps(told, default=str)
