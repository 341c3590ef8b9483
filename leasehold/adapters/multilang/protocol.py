"""The talk of the daemon with one child: a state machine over bytes, without I/O, clock or thread.

One JSON object a line goes each way. The daemon asks (`initialize`, `processRecords`, `leaseLost`, `shardEnded`,
`shutdownRequested`), and asks nothing more until the child has answered with a `status` for that action. In between the
child may ask for checkpoints, and each is answered before the next line is read.

    conversation.process_records(records, None)     a message of the daemon; raises ConversationError out of turn
    pipe.write(conversation.data_to_send())         what is to be written now, perhaps nothing
    conversation.receive_data(pipe.read())          b"" where the child has closed its pipe
    while event := conversation.next_event(): ...   what the child meant; None: read more

The events are `Answered`, `CheckpointWanted`, `NotUnderstood` and `Broken`. After `CheckpointWanted` there is no other
event until `checkpoint_stored` or `checkpoint_failed` has answered it.

Rule 1: `acknowledged` is what the row says, and moves only by `checkpoint_stored`; a status never moves it.
Rule 2: last checkpoint <= asked <= greatest delivered, by (number, sub-sequence number), delivered or not in between;
a bare request means the greatest delivered. What the row says already is answered without a write. Rule 3: at
`shardEnded` a bare request, or the last delivered record, means the end of the shard. Rule 4: in `initialize` and
`leaseLost` there is no checkpoint. Rule 5: `leaseLost` and `shardEnded` are the last messages; after their answer, or
after `Broken`, nothing is said or understood any more.

Children tell errors apart by their names, which are those of the Java classes.
"""

import json
from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import SHARD_END, Position

ChildAction = Literal["initialize", "processRecords", "leaseLost", "shardEnded", "shutdownRequested"]
FINAL: tuple[ChildAction, ...] = ("leaseLost", "shardEnded")
NO_CHECKPOINT: tuple[ChildAction, ...] = ("initialize", "leaseLost")

CheckpointError = Literal[
    "IllegalArgumentException",  # not within the range
    "InvalidStateException",  # no checkpoint in this state; or the lease table is gone
    "KinesisClientLibDependencyException",  # the store has failed
    "ShutdownException",  # the lease is not held any more
    "ThrottlingException",  # the store asks to slow down, or nobody knows whose the lease is: children try again
]

MOST_RECORDS = 10_000
"""KCL's own `maxRecords`."""

MOST_LINE_BYTES = 2**20
"""A line of a child that is longer is no message: the longest that a library writes has two numbers in it."""

MOST_DIGITS = 200
"""A sequence number has 56."""

_KEYS = {
    "status": {"action", "responseFor"},
    "checkpoint": {"action", "sequenceNumber", "subSequenceNumber", "error"},
}


class ConversationError(Exception):
    """A message out of turn: the last one is not answered yet, or the conversation is over."""


@frozen
class Answered:
    """The child has answered this action; after one of FINAL its pipe is to be closed."""

    action: ChildAction


@frozen
class CheckpointWanted:
    """Store this position, then say how that went."""

    position: Position


@frozen
class NotUnderstood:
    """The child wrote a line that is no message of the protocol, or answered what nobody had asked."""

    line: str
    why: str


@frozen
class Broken:
    """The conversation cannot go on, for this reason."""

    why: str


Event = Answered | CheckpointWanted | NotUnderstood | Broken


@frozen
class _Asked:
    """A request for a checkpoint, as the child has written it."""

    sequence: str | None
    sub: int | None

    def answer(self, error: CheckpointError | None) -> dict[str, Any]:
        """The answer: the request again, as text and number, with the error."""
        return {
            "action": "checkpoint",
            "sequenceNumber": self.sequence,
            "subSequenceNumber": self.sub,
            "error": error,
        }


class Conversation:
    """The talk with the child of this shard.

    at            the row's checkpoint
    most_records  no message has more
    asking        the action that is not answered yet; None: the next one may be sent
    over          whether nothing more is said or understood
    """

    def __init__(self, shard: str, at: Position, most_records: int = MOST_RECORDS) -> None:
        self.shard, self._most_records = shard, most_records
        self.acknowledged = self.delivered = at
        self.asking: ChildAction | None = None
        self.over = self._begun = self._closed = False
        self._ending = False  # whether `shardEnded` was said
        self._wanted: tuple[_Asked, Position] | None = None
        self._out: list[str] = []
        self._part, self._skipping = b"", False  # the line that has no end yet; whether it is too long already
        self._lines = deque[bytes]()

    # The daemon's messages

    def initialize(self) -> None:
        """Begin, at the row's checkpoint."""
        if self._begun:
            raise ConversationError("initialize: it is the first message, and was sent before")
        self._begun = True
        at = self.acknowledged
        sub = at.sub if at.numbered else 0  # the time of AT_TIMESTAMP is no sub-sequence number
        told = {"action": "initialize", "shardId": self.shard, "sequenceNumber": at.sequence, "subSequenceNumber": sub}
        self._ask("initialize", told)

    def process_records(self, records: Sequence[Record], behind_seconds: float | None) -> int:
        """Hand over the first of these, perhaps none; how many went into the message."""
        part = records[: self._most_records]
        behind = None if behind_seconds is None else int(behind_seconds * 1000)
        told = {"action": "processRecords", "records": [*map(_record, part)], "millisBehindLatest": behind}
        self._ask("processRecords", told)
        if part:
            self.delivered = part[-1].position
        return len(part)

    def shutdown_requested(self) -> None:
        """Ask for the last checkpoint before the lease goes to another worker."""
        self._ask("shutdownRequested", {"action": "shutdownRequested"})

    def lease_lost(self) -> None:
        """Say that the lease is gone. The child closes after it."""
        self._ask("leaseLost", {"action": "leaseLost"})

    def shard_ended(self) -> None:
        """Say that all records of the shard were handed over, and ask for the checkpoint that ends it."""
        self._ask("shardEnded", {"action": "shardEnded"})
        self._ending = True

    def data_to_send(self) -> bytes:
        """The bytes to be written to the child that were not taken yet."""
        data, self._out = "".join(self._out), []
        return data.encode("utf-8", "replace")

    # The child's messages

    def receive_data(self, data: bytes) -> None:
        """Take what the child has written; nothing, where it has closed its pipe."""
        if not data:
            self._closed = True
            return
        # Children end a line with LF, CR or both. A CR whose LF is in the next part makes an empty line more.
        *lines, rest = (self._part + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if not self._skipping and line.strip():
                self._lines.append(line)
            self._skipping = False
        if len(rest) > MOST_LINE_BYTES and not self._skipping:
            self._lines.append(rest)  # too long: said once, and its end is passed over
            self._skipping = True
        self._part = b"" if self._skipping else rest

    def next_event(self) -> Event | None:
        """The child's next message; None where more must be read, or a checkpoint is not stored yet."""
        while self._lines and not self.over and self._wanted is None:
            event = self._event(self._lines.popleft())
            if event is not None:
                return event
        if self._closed and not self.over and self._wanted is None:
            self.over = True
            return Broken("it has closed its standard output")
        return None

    def checkpoint_stored(self) -> None:
        """The row says what was wanted."""
        asked, position = self._taken()
        self.acknowledged = position
        self._say(asked.answer(None))

    def checkpoint_failed(self, error: CheckpointError) -> None:
        """The row does not say what was wanted, for this reason; the child decides what to do."""
        asked, _ = self._taken()
        self._say(asked.answer(error))

    # Their meaning

    def _ask(self, action: ChildAction, told: dict[str, Any]) -> None:
        if self.over or not self._begun:
            raise ConversationError(f"{action}: the conversation {'is over' if self.over else 'has not begun'}")
        if self.asking is not None:
            raise ConversationError(f"{action}: {self.asking} is not answered yet")
        self.asking = action
        self._say(told)

    def _say(self, told: dict[str, Any]) -> None:
        text = json.dumps(told, ensure_ascii=False, separators=(",", ":"))
        # Node takes these two for the end of a line. They stand in texts alone, where JSON may write them so.
        self._out.append(text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029") + "\n")

    def _taken(self) -> tuple[_Asked, Position]:
        if self._wanted is None:
            raise ConversationError("checkpoint: none is asked for")
        wanted, self._wanted = self._wanted, None
        return wanted

    def _event(self, line: bytes) -> Event | None:
        try:
            message = _message(line)
        except ValueError as error:
            return NotUnderstood(line.decode("utf-8", "replace"), str(error))
        if isinstance(message, _Asked):
            return self._checkpoint(message)
        if self.asking is None:
            # Java keeps it as the answer to its next message, and then runs ahead of the child.
            return NotUnderstood(line.decode(), "a status, and nothing was asked")
        if message != self.asking:
            self.over = True
            return Broken(f"it answered {message}, and {self.asking} was asked")
        answered, self.asking = self.asking, None
        self.over = answered in FINAL
        return Answered(answered)

    def _checkpoint(self, asked: _Asked) -> CheckpointWanted | None:
        """Answer what needs no write, or want one."""
        if not self._begun or self.asking in NO_CHECKPOINT:
            self._say(asked.answer("InvalidStateException"))
            return None
        last, number, sub = self.delivered, asked.sequence, asked.sub or 0
        position: Position | None = None  # where what is meant is outside of the range
        if number is None:
            position = SHARD_END if self._ending else last
        elif number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS and sub >= 0:
            meant = Position(str(int(number)), sub)
            if self._ending and meant.order == last.order:
                position = SHARD_END
            elif self.acknowledged.order <= meant.order <= last.order:
                position = meant
        if position is None:
            self._say(asked.answer("IllegalArgumentException"))
            return None
        if position.order == self.acknowledged.order:
            self._say(asked.answer(None))
            return None
        self._wanted = asked, position
        return CheckpointWanted(position)


def _record(record: Record) -> dict[str, Any]:
    return {
        "data": b64encode(record.data).decode(),
        "partitionKey": record.partition_key,
        "sequenceNumber": record.sequence_number,
        # kclpy takes int() of it, so it is never null; Kinesis always tells it.
        "approximateArrivalTimestamp": round((record.arrived or 0) * 1000),
        "subSequenceNumber": record.sub_sequence_number,
        "action": "record",  # kclpy decodes every object by its action, nested ones too
    }


def _message(line: bytes) -> _Asked | str:
    """A request for a checkpoint, or the action that a status answers. Raises ValueError for what is neither."""
    if len(line) > MOST_LINE_BYTES:
        raise ValueError(f"longer than {MOST_LINE_BYTES} bytes")
    try:
        told = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("no JSON") from None
    action = told.get("action") if isinstance(told, dict) else None
    keys = _KEYS.get(action) if isinstance(action, str) else None
    if keys is None:
        raise ValueError("no status and no checkpoint")
    if unknown := told.keys() - keys:
        raise ValueError(f"the unknown key {min(unknown)!r}")
    if action == "status":
        return _text(told, "responseFor") or ""
    number, sub = _text(told, "sequenceNumber"), _text(told, "subSequenceNumber")
    try:
        return _Asked(number, None if sub is None else int(sub))
    except ValueError:
        raise ValueError("subSequenceNumber is no whole number") from None


def _text(told: dict[str, Any], key: str) -> str | None:
    """A text or a whole number; Node writes numbers as texts, and others may not."""
    value = told.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{key} is neither a text nor a whole number")
