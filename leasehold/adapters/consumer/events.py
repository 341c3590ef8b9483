"""Writes a worker's events and log lines as JSON, one object per line, for other programs and for log collectors."""

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
from typing import Any, TextIO, cast

from attrs import frozen

from leasehold.adapters.consumer.handling import Delivery, Handling, ShardEvent
from leasehold.adapters.worker.holding import Holding

CLOSED_PIPE_STATUS = 128 + signal.SIGPIPE
"""The exit status of a program that ends because the reader of its output has closed the pipe."""


@frozen
class PartialWrite:
    """A partial write. Retry `unwritten`, which starts on a line boundary."""

    unwritten: bytes
    error: Exception


class LineWriter:
    """Writes whole lines to a file that may reject writes for a while, for example because the disk is full.

    If only a part of a line was written, its rest is written before the next line. The output therefore never contains
    a broken line or a repeated part of a line. Only one thread may use an instance at a time.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._unwritten_rest = out, b""

    def write(self, data: bytes) -> PartialWrite | None:
        """Write these lines, and return the part that was not written, or None if all of them were written.

        Raises BrokenPipeError if the reader of the output has closed the pipe.
        """
        binary_file = getattr(self._out, "buffer", None)
        raw_file = getattr(binary_file, "raw", binary_file)  # with PYTHONUNBUFFERED the buffer itself is raw
        if raw_file is None:  # `out` is in memory
            try:
                self._out.write(data.decode())
                self._out.flush()
            except BrokenPipeError:
                raise
            except Exception as error:  # noqa: BLE001  a file of another library may raise anything
                return PartialWrite(data, error)
            return None
        data_to_write, written_bytes, write_error = self._unwritten_rest + data, 0, cast("Exception | None", None)
        try:
            while written_bytes < len(data_to_write):
                written_bytes += raw_file.write(data_to_write[written_bytes:]) or 0
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001  a file may raise anything, even after writing a part
            write_error = error
        finally:
            # Store the rest of a line that was partly written, in this call or an earlier one, so that the next call
            # writes it first. Return only whole lines to the caller.
            is_line_cut = (
                data_to_write[written_bytes - 1 : written_bytes] != b"\n"
                if written_bytes
                else bool(self._unwritten_rest)
            )
            self._unwritten_rest = (
                data_to_write[written_bytes : data_to_write.find(b"\n", written_bytes) + 1] if is_line_cut else b""
            )
        return (
            None
            if write_error is None
            else PartialWrite(data_to_write[written_bytes + len(self._unwritten_rest) :], write_error)
        )


class EventLines:
    """Writes events as lines with `t` (milliseconds since 1970), `worker`, `event`, `stream`, `shard` and event data.

    `stream` is the stream's name, as in `Delivery.stream`.

    The line of a record is written when its batch is dispatched, before the checkpoint. It contains no record data.
    If writing to `out` fails, for example because the disk is full, the exception propagates and the batch is
    dispatched again. If `out` is a pipe and its reader has closed it, nothing more is written, and each call raises
    SystemExit, which drains and ends the worker.
    """

    def __init__(self, worker: str, out: TextIO, wall: Callable[[], float] = time.time) -> None:
        self._worker, self._out, self._wall = worker, out, wall
        self._line_writer, self._pending_lines = LineWriter(out), b""
        self._lock, self._closed = Lock(), False

    def write_shard_event(self, event: ShardEvent, holding: Holding) -> None:
        """Write a line to report that reading of a shard has begun or stopped."""
        self._write([self._line(event, holding.stream, holding.lease.shard)], keep_unwritten=True)

    def handle(self, delivery: Delivery) -> None:
        """Write a line for each record of the batch."""
        epoch_field = {} if delivery.epoch is None else {"epoch": delivery.epoch}
        lines = []
        for record in delivery.records:
            fields = {
                "sequence_number": record.sequence_number,
                "sub_sequence_number": record.sub_sequence_number,
                "partition_key": record.partition_key,
                # Never write the data itself, because more people can read the log than the stream.
                "sha1": hashlib.sha1(record.data, usedforsecurity=False).hexdigest(),
            }
            lines.append(self._line("record", delivery.stream, delivery.shard, **fields, **epoch_field))
        self._write(lines)

    @property
    def handling(self) -> Handling:
        """A `Handling` whose handler only writes these lines."""
        return Handling(self.handle, observer=self.write_shard_event)

    def _line(self, event: str, stream: str, shard: str, **event_fields: Any) -> str:  # noqa: ANN401  strings and numbers
        location = {"stream": stream, "shard": shard} if stream else {"shard": shard}
        line = {"t": int(self._wall() * 1000), "worker": self._worker, "event": event, **location, **event_fields}
        return json.dumps(line) + "\n"

    def _write(self, lines: list[str], *, keep_unwritten: bool = False) -> None:
        """Write these lines.

        If `keep_unwritten` is true, lines that cannot be written now are written before the next ones.
        """
        new_lines, partial_write = "".join(lines).encode(), None
        with self._lock:
            if not self._closed:
                try:
                    partial_write = self._line_writer.write(self._pending_lines + new_lines)
                    unwritten = b"" if partial_write is None else partial_write.unwritten
                    # If the events of a shard cannot be written, keep their lines, because each event occurs only once.
                    # Drop the lines of records, because their batch is dispatched again.
                    self._pending_lines = (
                        unwritten if keep_unwritten else unwritten[: max(0, len(unwritten) - len(new_lines))]
                    )
                except BrokenPipeError:
                    self._closed = True
                    # Discard the data that is still buffered, so that Python does not try to write it again at exit.
                    with suppress(OSError):  # raised if `out` has no file descriptor
                        output_descriptor, null_device = self._out.fileno(), os.open(os.devnull, os.O_WRONLY)
                        os.dup2(null_device, output_descriptor)
                        os.close(null_device)
        if self._closed:
            raise SystemExit(CLOSED_PIPE_STATUS)
        if partial_write is not None and not keep_unwritten:
            raise partial_write.error  # the error fails the batch, which is then dispatched again


FIELDS = ("lease", "rule", "outcome")
"""The optional fields of a log line: the lease, the rule that caused an action, and the outcome of the action."""


class JsonLines(logging.Formatter):
    """Formats log records as JSON objects.

    Each object contains `at`, `level`, `logger`, `worker` and `message`. It also contains those of the `FIELDS` that
    the log record has, and `trace` if there is an exception.
    """

    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        """Format the record as a single line, even if its message has several lines."""
        fields = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "worker": self._worker,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info or record.exc_text:
            fields["trace"] = record.exc_text or self.formatException(record.exc_info or (None, None, None))
        return json.dumps(fields, default=str)
