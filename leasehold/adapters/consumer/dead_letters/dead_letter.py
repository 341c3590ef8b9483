"""Defines a dead letter: one record, where it came from and why it failed, written as one line of JSON."""

import base64
import hashlib
import json
import re
from typing import Any

from attrs import evolve, frozen

from leasehold.adapters.consumer.handling import Delivery, Unhandled
from leasehold.adapters.sources.deduplication import strip_seen_rows
from leasehold.adapters.sources.protocol import Record
from leasehold.stores.printable import limited_error_text

MAX_ERROR_TEXT = 2000
"""The maximum length, in characters, of the error message in a dead letter. Longer messages are cut, because the size
of stream records is limited."""

INTEGER_LIMIT = 1 << 53
"""Every JSON parser reads non-negative integers below this limit exactly."""

_NAME_PATTERN = re.compile(r"(\d+)-(\d+)-.*\.json", re.ASCII)


class BadDeadLetter(Exception):
    """Raised if a line is not a valid dead letter."""


@frozen
class DeadLetterEntry:
    """A record whose handler kept failing.

    Attributes:
        table: The URL of the lease table with the options that identify it; "" if unknown.
        stream: The stream from which the record was read.
        shard: The shard from which the record was read.
        lease: The key of the lease.
        record: The record itself.
        error: The type of the exception that its handler raised.
        text: The exception's message, cut after `MAX_ERROR_TEXT` characters.
        attempts: How many times the whole batch was dispatched.
        worker: The worker that wrote the dead letter.
        time_ms: When the dead letter was written, in milliseconds since 1970.
        source: The URL of the stream with the options that identify it; "" if unknown.
        alone: How many times the record was dispatched on its own, either after its batch was split or in a replay.
    """

    table: str
    stream: str
    shard: str
    lease: str
    record: Record
    error: str
    text: str
    attempts: int
    worker: str
    time_ms: int
    source: str = ""
    alone: int = 0

    @property
    def name(self) -> str:
        """The name, which is derived from the record, so that a record cannot have two dead letters.

        The digest includes the record's content, because shard ids and sequence numbers may not be unique if the URLs
        of table and stream are unknown, for example in emulators or after a stream was recreated.
        """
        record = self.record
        digest = hashlib.sha256(json.dumps(self._record_fields()).encode()).hexdigest()[:32]
        # The name must be valid for files and objects, so other characters are replaced. If this makes two shard ids
        # equal, the digest still distinguishes the names.
        safe_shard = re.sub(r"[^\w.-]", "_", self.shard, flags=re.ASCII)[-80:]
        return f"{record.sequence_number}-{record.sub_sequence_number}-{safe_shard}-{digest}.json"

    @property
    def line(self) -> bytes:
        """The dead letter as a line of JSON."""
        fields = self._record_fields() | {
            "error": self.error,
            "text": self.text,
            "attempts": self.attempts,
            "alone": self.alone,
            "worker": self.worker,
            "time_ms": self.time_ms,
        }
        return json.dumps(fields).encode() + b"\n"

    def _record_fields(self) -> dict[str, str | int | None]:
        """Return the fields that are the same each time the record is dead-lettered."""
        record = self.record
        return {
            "table": self.table,
            "source": self.source,
            "stream": self.stream,
            "shard": self.shard,
            "lease": self.lease,
            "sequence_number": record.sequence_number,
            "sub_sequence_number": record.sub_sequence_number,
            # Leave out the part of the token that describes rows written by Spark, because that part does not belong to
            # the record.
            "offset": strip_seen_rows(record.token),
            "partition_key": record.partition_key,
            "explicit_hash_key": record.explicit_hash_key,
            "arrived_ms": None if record.arrived is None else round(record.arrived * 1000),
            "data": base64.b64encode(record.data).decode(),
        }


def sort_key_of(name: str) -> tuple[int, int, str] | None:
    """Return the key by which dead letters are sorted, or None if this is not the name of a dead letter."""
    match = _NAME_PATTERN.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]), name)


def dead_letter_for(
    delivery: Delivery, error: Exception, *, stream: str, table: str, source: str = "", now: float
) -> DeadLetterEntry:
    """Return the dead letter of a batch's only record.

    Args:
        delivery: The batch.
        error: The exception with which the record failed.
        stream: The stream's name, used if the lease does not contain it.
        table: The URL of the lease table, with only the options that identify the table.
        source: The URL of the stream, with only the options that identify the stream.
        now: The time in seconds since 1970.
    """
    # Report the handler's own exception instead of its wrapper, because it is the one to fix.
    cause = error.__cause__ if isinstance(error, Unhandled) and error.__cause__ is not None else error
    return DeadLetterEntry(
        table=table,
        stream=delivery.stream or stream,
        shard=delivery.shard,
        lease=delivery.lease,
        record=delivery.records[0],
        error=type(cause).__name__,
        text=limited_error_text(cause, MAX_ERROR_TEXT),
        # Count attempts on the whole batch separately from attempts on this record alone. Only the latter show that
        # the record is at fault.
        attempts=delivery.attempts - delivery.in_parts,
        alone=min(1, delivery.in_parts),
        worker=delivery.worker,
        time_ms=round(now * 1000),
        source=source,
    )


def with_failed_attempt(dead_letter: DeadLetterEntry, error: Exception, *, worker: str, now: float) -> DeadLetterEntry:
    """Return a copy of the dead letter that counts one more attempt, which failed with this error on this worker.

    `now` is in seconds since 1970.
    """
    return evolve(
        dead_letter,
        alone=dead_letter.alone + 1,
        error=type(error).__name__,
        text=limited_error_text(error, MAX_ERROR_TEXT),
        worker=worker,
        time_ms=round(now * 1000),
    )


def dead_letter_from(line: bytes) -> DeadLetterEntry:
    """Parse the dead letter on this line. Raises BadDeadLetter, naming the field that is wrong."""
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        raise BadDeadLetter("it is not JSON") from None
    if not isinstance(document, dict):
        raise BadDeadLetter("it is no object")
    arrived_ms = _field(document, "arrived_ms", int, None)
    encoded_data, sequence_number = _field(document, "data", str), _field(document, "sequence_number", str)
    try:
        data = base64.b64decode(encoded_data, validate=True)
    except ValueError:
        raise BadDeadLetter("data: it is not base64") from None
    # Dead letters are sorted by this number, so it must consist of ASCII digits. `isdigit` alone would also accept the
    # digits of other scripts.
    if not (sequence_number.isascii() and sequence_number.isdigit()):
        raise BadDeadLetter("sequence_number: it must be a decimal number, as a string")
    record = Record(
        data,
        sequence_number,
        _field(document, "sub_sequence_number", int, 0),
        partition_key=_field(document, "partition_key", str, None),
        explicit_hash_key=_field(document, "explicit_hash_key", str, None),
        arrived=None if arrived_ms is None else arrived_ms / 1000,
        token=_field(document, "offset", str, ""),
    )
    text_fields = {
        name: _field(document, name, str, "") for name in ("table", "source", "stream", "error", "text", "worker")
    }
    return DeadLetterEntry(
        shard=_field(document, "shard", str),
        lease=_field(document, "lease", str),
        record=record,
        attempts=_field(document, "attempts", int, 0),
        alone=_field(document, "alone", int, 0),
        time_ms=_field(document, "time_ms", int, 0),
        **text_fields,
    )


_REQUIRED = object()


def _field(document: dict[str, Any], name: str, kind: type, default: object = _REQUIRED) -> Any:  # noqa: ANN401  depends on `kind`
    value = document.get(name, default)
    if value is _REQUIRED:
        raise BadDeadLetter(f"{name}: it is missing")
    # Reject bools, which are ints in Python.
    if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise BadDeadLetter(f"{name}: it must be {'a string' if kind is str else 'a whole number'}")
    # Python parses integers of any length, but the services that store them have limits.
    if isinstance(value, int) and not 0 <= value < INTEGER_LIMIT:
        raise BadDeadLetter(f"{name}: it must be a whole number from 0 to {INTEGER_LIMIT - 1}")
    return value
