"""A dead letter: one record, where it came from, and why it is here; one JSON object on one line."""

import base64
import hashlib
import json
import re
from typing import Any

from attrs import evolve, frozen

from leasehold.adapters.consumer.handling import Delivery, Unhandled
from leasehold.adapters.sources.deduplication import own_token
from leasehold.adapters.sources.protocol import Record
from leasehold.stores.printable import text_of

TEXT_MOST = 2000
"""Characters of an error's text that a letter keeps: a record of a stream has a limit."""

WHOLE_MOST = 1 << 53
"""Whole numbers below it are numbers of JSON, wherever it is read."""

_NAME = re.compile(r"(\d+)-(\d+)-.*\.json", re.ASCII)


class BadDeadLetter(Exception):
    """A text that is no letter."""


@frozen
class DeadLetterEntry:
    """A record that no attempt could handle.

    table      the store of the leases, with the options that say which one it is; "" where nobody said
    stream, shard, lease
               what the record was read from, and the key of the lease
    record     the record itself
    error, text
               the type and the text of what its handler raised, the text cut after `TEXT_MOST` characters
    attempts   how often its whole batch had been handed over
    worker     the worker that put it there, at `time_ms`, milliseconds since 1970
    alone      how often it was handed over by itself: while the batch was searched for it, and by each replay
    source     where the stream is: its URL with the options that say which one it is; "" where nobody said
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
        """A name that no other record's letter has: a record that is dead-lettered twice has one letter.

        The digest is of the record's content too. Groups and streams that nobody has told apart may have shards and
        numbers in common: in emulators, and where a stream was made anew.
        """
        record = self.record
        digest = hashlib.sha256(json.dumps(self._of_record()).encode()).hexdigest()[:32]
        # Names of files and objects: the digest tells shards apart that look alike when they are cut.
        shard = re.sub(r"[^\w.-]", "_", self.shard, flags=re.ASCII)[-80:]
        return f"{record.sequence_number}-{record.sub_sequence_number}-{shard}-{digest}.json"

    @property
    def line(self) -> bytes:
        """The letter as a line of JSON."""
        told = self._of_record() | {
            "error": self.error,
            "text": self.text,
            "attempts": self.attempts,
            "alone": self.alone,
            "worker": self.worker,
            "time_ms": self.time_ms,
        }
        return json.dumps(told).encode() + b"\n"

    def _of_record(self) -> dict[str, str | int | None]:
        """The fields that every burial of the record says alike."""
        record = self.record
        return {
            "table": self.table,
            "source": self.source,
            "stream": self.stream,
            "shard": self.shard,
            "lease": self.lease,
            "sequence_number": record.sequence_number,
            "sub_sequence_number": record.sub_sequence_number,
            # Without what a position carries of rows that Spark wrote: that is no part of the record.
            "offset": own_token(record.token),
            "partition_key": record.partition_key,
            "explicit_hash_key": record.explicit_hash_key,
            "arrived_ms": None if record.arrived is None else round(record.arrived * 1000),
            "data": base64.b64encode(record.data).decode(),
        }


def place_of(name: str) -> tuple[int, int, str] | None:
    """The sort key of a letter: sequence number, sub-sequence number and name; None if it is no letter's name."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2]), name)


def dead_letter_for(
    delivery: Delivery, error: Exception, *, stream: str, table: str, source: str = "", now: float
) -> DeadLetterEntry:
    """The letter of the one record of a batch.

    stream  what it is called where the lease does not say
    now     seconds since 1970
    """
    # The handler's own fault, not what wraps it: it is what whoever opens the letter has to mend.
    cause = error.__cause__ if isinstance(error, Unhandled) and error.__cause__ is not None else error
    return DeadLetterEntry(
        table=table,
        stream=delivery.stream or stream,
        shard=delivery.shard,
        lease=delivery.lease,
        record=delivery.records[0],
        error=type(cause).__name__,
        text=text_of(cause, TEXT_MOST),
        # Counted apart: a record that failed by itself is at fault, and a batch only has it somewhere.
        attempts=delivery.attempts - delivery.in_parts,
        alone=min(1, delivery.in_parts),
        worker=delivery.worker,
        time_ms=round(now * 1000),
        source=source,
    )


def failed_again(dead_letter: DeadLetterEntry, error: Exception, *, worker: str, now: float) -> DeadLetterEntry:
    """The letter with one more attempt, by this worker, and with what that one failed of.

    now  seconds since 1970
    """
    return evolve(
        dead_letter,
        alone=dead_letter.alone + 1,
        error=type(error).__name__,
        text=text_of(error, TEXT_MOST),
        worker=worker,
        time_ms=round(now * 1000),
    )


def dead_letter_from(line: bytes) -> DeadLetterEntry:
    """The letter on this line. Raises BadLetter, naming the field that is wrong."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        raise BadDeadLetter("it is not JSON") from None
    if not isinstance(told, dict):
        raise BadDeadLetter("it is no object")
    arrived = _field(told, "arrived_ms", int, None)
    text, number = _field(told, "data", str), _field(told, "sequence_number", str)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise BadDeadLetter("data: it is not base64") from None
    # Letters are sorted by it, and the digits of other scripts pass for numbers, too.
    if not (number.isascii() and number.isdigit()):
        raise BadDeadLetter("sequence_number: it wants a decimal number, as a text")
    record = Record(
        data,
        number,
        _field(told, "sub_sequence_number", int, 0),
        partition_key=_field(told, "partition_key", str, None),
        explicit_hash_key=_field(told, "explicit_hash_key", str, None),
        arrived=None if arrived is None else arrived / 1000,
        token=_field(told, "offset", str, ""),
    )
    texts = {name: _field(told, name, str, "") for name in ("table", "source", "stream", "error", "text", "worker")}
    return DeadLetterEntry(
        shard=_field(told, "shard", str),
        lease=_field(told, "lease", str),
        record=record,
        attempts=_field(told, "attempts", int, 0),
        alone=_field(told, "alone", int, 0),
        time_ms=_field(told, "time_ms", int, 0),
        **texts,
    )


_NEEDED = object()


def _field(told: dict[str, Any], name: str, kind: type, default: object = _NEEDED) -> Any:  # noqa: ANN401  by `kind`
    value = told.get(name, default)
    if value is _NEEDED:
        raise BadDeadLetter(f"{name}: it is missing")
    # To Python true is a whole number, and to nobody else.
    if value is not default and (not isinstance(value, kind) or isinstance(value, bool)):
        raise BadDeadLetter(f"{name}: it wants {'a text' if kind is str else 'a whole number'}")
    # Python reads numbers of any length, and such a one may not fit where it is stored.
    if isinstance(value, int) and not 0 <= value < WHOLE_MOST:
        raise BadDeadLetter(f"{name}: it wants a whole number from 0 to {WHOLE_MOST - 1}")
    return value
