"""Implements the daemon's conversation with one child as a state machine over bytes, without I/O, clocks or threads.

Both sides send JSON objects, one per line. After the daemon has sent an action (`initialize`, `processRecords`,
`leaseLost`, `shardEnded`, `shutdownRequested`), it sends no other action until the child responds with a `status` for
this one. In between, the child may request checkpoints. The daemon responds to each request before it reads the next
line.

    conversation.send_records(records, None)        send an action; raises ConversationError if one is pending
    pipe.write(conversation.data_to_send())         write the bytes that are due, if any
    conversation.receive_data(pipe.read())          pass b"" once the child has closed its pipe
    while event := conversation.next_event(): ...   handle an event of the child; None means to read more

The events are `StatusReceived`, `CheckpointRequested`, `InvalidLine` and `ConversationBroken`. After
`CheckpointRequested` there is no other event until `checkpoint_stored` or `checkpoint_failed` is called.

Rule 1: `acknowledged` is the stored checkpoint. Only `checkpoint_stored` moves it, never a status.
Rule 2: A requested checkpoint must lie between the last checkpoint and the last delivered position, inclusive, in the
order of (number, sub-sequence number). It need not be the position of a delivered record. A request without a number
means the last delivered position. A request for the current checkpoint succeeds without a write.
Rule 3: At `shardEnded`, a request without a number, or for the last delivered record, means the end of the shard.
Rule 4: There are no checkpoints during `initialize` and `leaseLost`.
Rule 5: `leaseLost` and `shardEnded` are the last actions. After the status for one of them, or after
`ConversationBroken`, the daemon sends no further messages and ignores the child's messages.

Children distinguish errors by name. The names are those of the Java classes.
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
FINAL_ACTIONS: tuple[ChildAction, ...] = ("leaseLost", "shardEnded")
ACTIONS_WITHOUT_CHECKPOINT: tuple[ChildAction, ...] = ("initialize", "leaseLost")

CheckpointError = Literal[
    "IllegalArgumentException",  # the position is out of range
    "InvalidStateException",  # no checkpoint in this state, or the lease table is gone
    "KinesisClientLibDependencyException",  # the store has failed
    "ShutdownException",  # the lease is no longer held
    "ThrottlingException",  # the store throttles, or the outcome is unknown; children try again
]

DEFAULT_MAX_RECORDS = 10_000
"""The default of KCL's `maxRecords`."""

MAX_LINE_BYTES = 2**20
"""The maximum length of a message. Longer lines from a child are reported as invalid. Valid messages are far shorter,
because even the longest kind contains only two numbers."""

MAX_DIGITS = 200
"""The maximum number of digits of a sequence number in a request. Sequence numbers of Kinesis have 56 digits."""

_MESSAGE_KEYS = {
    "status": {"action", "responseFor"},
    "checkpoint": {"action", "sequenceNumber", "subSequenceNumber", "error"},
}


class ConversationError(Exception):
    """An action must not be sent now, because the previous one is still pending, or the conversation has ended."""


@frozen
class StatusReceived:
    """The child has completed this action. After one of FINAL_ACTIONS, close the child's pipe."""

    action: ChildAction


@frozen
class CheckpointRequested:
    """The child requests this checkpoint. Store it, then call `checkpoint_stored` or `checkpoint_failed`."""

    position: Position


@frozen
class InvalidLine:
    """The child wrote a line that is not a message of the protocol, or a status although no action was pending."""

    line: str
    reason: str


@frozen
class ConversationBroken:
    """The conversation cannot continue, for this reason."""

    reason: str


Event = StatusReceived | CheckpointRequested | InvalidLine | ConversationBroken


@frozen
class _CheckpointRequest:
    """A request for a checkpoint, as the child wrote it."""

    sequence: str | None
    sub: int | None

    def make_response(self, error: CheckpointError | None) -> dict[str, Any]:
        """Return the response, which repeats the request and adds the error."""
        return {
            "action": "checkpoint",
            "sequenceNumber": self.sequence,
            "subSequenceNumber": self.sub,
            "error": error,
        }


class Conversation:
    """The conversation with the child of a shard.

    Args:
        shard: The id of the shard.
        checkpoint: The stored checkpoint.
        max_records: The maximum number of records in a message.

    Attributes:
        acknowledged: The stored checkpoint.
        delivered: The position of the last record that was sent.
        pending_action: The action to which the child has not responded yet; None if the next action may be sent.
        ended: Whether the conversation has ended (rule 5).
    """

    def __init__(self, shard: str, checkpoint: Position, max_records: int = DEFAULT_MAX_RECORDS) -> None:
        self.shard, self._max_records = shard, max_records
        self.acknowledged = self.delivered = checkpoint
        self.pending_action: ChildAction | None = None
        self.ended = self._initialized = self._pipe_closed = False
        self._shard_ended_sent = False  # whether `shardEnded` was sent
        self._checkpoint_request: tuple[_CheckpointRequest, Position] | None = None
        self._outgoing_messages: list[str] = []
        # Keep the incomplete line at the end of the received data, and whether that line is already too long.
        self._incomplete_line, self._line_too_long = b"", False
        self._received_lines = deque[bytes]()

    # The daemon's messages

    def send_initialize(self) -> None:
        """Send the first action, which contains the stored checkpoint."""
        if self._initialized:
            raise ConversationError("initialize: it was already sent")
        self._initialized = True
        checkpoint = self.acknowledged
        sub = checkpoint.sub if checkpoint.numbered else 0  # the time of AT_TIMESTAMP is not a sub-sequence number
        message = {
            "action": "initialize",
            "shardId": self.shard,
            "sequenceNumber": checkpoint.sequence,
            "subSequenceNumber": sub,
        }
        self._queue_action("initialize", message)

    def send_records(self, records: Sequence[Record], behind_seconds: float | None) -> int:
        """Send as many of these records as fit into one message, and return how many were sent."""
        sent_records = records[: self._max_records]
        behind_ms = None if behind_seconds is None else int(behind_seconds * 1000)
        message = {
            "action": "processRecords",
            "records": [*map(_convert_to_json, sent_records)],
            "millisBehindLatest": behind_ms,
        }
        self._queue_action("processRecords", message)
        if sent_records:
            self.delivered = sent_records[-1].position
        return len(sent_records)

    def send_shutdown_requested(self) -> None:
        """Request the child's final checkpoint before the lease moves to another worker."""
        self._queue_action("shutdownRequested", {"action": "shutdownRequested"})

    def send_lease_lost(self) -> None:
        """Notify the child that the lease is lost."""
        self._queue_action("leaseLost", {"action": "leaseLost"})

    def send_shard_ended(self) -> None:
        """Notify the child that all records of the shard were sent, and request the checkpoint at the shard's end."""
        self._queue_action("shardEnded", {"action": "shardEnded"})
        self._shard_ended_sent = True

    def data_to_send(self) -> bytes:
        """Return the bytes that must be written to the child and were added since the last call."""
        data, self._outgoing_messages = "".join(self._outgoing_messages), []
        return data.encode("utf-8", "replace")

    # The child's messages

    def receive_data(self, data: bytes) -> None:
        """Add bytes that the child has written, or b"" if it has closed its pipe."""
        if not data:
            self._pipe_closed = True
            return
        # Children end lines with LF, CR or both. A CR that arrives before its LF adds an empty line, which is skipped.
        *lines, incomplete_line = (self._incomplete_line + data).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if not self._line_too_long and line.strip():
                self._received_lines.append(line)
            self._line_too_long = False
        if len(incomplete_line) > MAX_LINE_BYTES and not self._line_too_long:
            self._received_lines.append(incomplete_line)  # too long: reported once, and the rest of the line is skipped
            self._line_too_long = True
        self._incomplete_line = b"" if self._line_too_long else incomplete_line

    def next_event(self) -> Event | None:
        """Return the next event, or None if more must be read, or a checkpoint is still being stored."""
        while self._received_lines and not self.ended and self._checkpoint_request is None:
            event = self._parse_event(self._received_lines.popleft())
            if event is not None:
                return event
        if self._pipe_closed and not self.ended and self._checkpoint_request is None:
            self.ended = True
            return ConversationBroken("it has closed its standard output")
        return None

    def checkpoint_stored(self) -> None:
        """Respond that the requested checkpoint was stored."""
        request, position = self._take_request()
        self.acknowledged = position
        self._queue_message(request.make_response(None))

    def checkpoint_failed(self, error: CheckpointError) -> None:
        """Respond that the checkpoint was not stored, with the error's name. The child decides what to do."""
        request, _ = self._take_request()
        self._queue_message(request.make_response(error))

    # Helpers

    def _queue_action(self, action: ChildAction, message: dict[str, Any]) -> None:
        if self.ended or not self._initialized:
            raise ConversationError(f"{action}: the conversation {'is over' if self.ended else 'has not begun'}")
        if self.pending_action is not None:
            raise ConversationError(f"{action}: {self.pending_action} is not answered yet")
        self.pending_action = action
        self._queue_message(message)

    def _queue_message(self, message: dict[str, Any]) -> None:
        json_text = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
        # Escape these two characters, because Node treats them as line ends. They occur only in JSON strings.
        self._outgoing_messages.append(json_text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029") + "\n")

    def _take_request(self) -> tuple[_CheckpointRequest, Position]:
        if self._checkpoint_request is None:
            raise ConversationError("checkpoint: none is requested")
        request, self._checkpoint_request = self._checkpoint_request, None
        return request

    def _parse_event(self, line: bytes) -> Event | None:
        try:
            message = _parse_message(line)
        except ValueError as error:
            return InvalidLine(line.decode("utf-8", "replace"), str(error))
        if isinstance(message, _CheckpointRequest):
            return self._handle_checkpoint_request(message)
        if self.pending_action is None:
            # Java accepts such a status as the response to its next action. From then on, it sends each action before
            # the child has completed the previous one.
            return InvalidLine(line.decode(), "a status, although no action is pending")
        if message != self.pending_action:
            self.ended = True
            return ConversationBroken(f"it sent a status for {message}, although {self.pending_action} is pending")
        action, self.pending_action = self.pending_action, None
        self.ended = action in FINAL_ACTIONS
        return StatusReceived(action)

    def _handle_checkpoint_request(self, request: _CheckpointRequest) -> CheckpointRequested | None:
        """Respond to the request if no checkpoint must be written. Otherwise, return an event for the request."""
        if not self._initialized or self.pending_action in ACTIONS_WITHOUT_CHECKPOINT:
            self._queue_message(request.make_response("InvalidStateException"))
            return None
        last_delivered, number, sub = self.delivered, request.sequence, request.sub or 0
        position: Position | None = None  # stays None if the request is out of range
        if number is None:
            position = SHARD_END if self._shard_ended_sent else last_delivered
        elif number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and sub >= 0:
            requested_position = Position(str(int(number)), sub)
            if self._shard_ended_sent and requested_position.order == last_delivered.order:
                position = SHARD_END
            elif self.acknowledged.order <= requested_position.order <= last_delivered.order:
                position = requested_position
        if position is None:
            self._queue_message(request.make_response("IllegalArgumentException"))
            return None
        if position.order == self.acknowledged.order:
            self._queue_message(request.make_response(None))
            return None
        self._checkpoint_request = request, position
        return CheckpointRequested(position)


def _convert_to_json(record: Record) -> dict[str, Any]:
    return {
        "data": b64encode(record.data).decode(),
        "partitionKey": record.partition_key,
        "sequenceNumber": record.sequence_number,
        # The arrival time must not be null, because kclpy calls int() on it. Kinesis itself always sends a time.
        "approximateArrivalTimestamp": round((record.arrived or 0) * 1000),
        "subSequenceNumber": record.sub_sequence_number,
        "action": "record",  # kclpy decodes every object by its action, even nested objects
    }


def _parse_message(line: bytes) -> _CheckpointRequest | str:
    """Parse a line. Return a request for a checkpoint, or the action that a status belongs to. Raises ValueError."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
    try:
        document = json.loads(line.decode())
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    action = document.get("action") if isinstance(document, dict) else None
    keys = _MESSAGE_KEYS.get(action) if isinstance(action, str) else None
    if keys is None:
        raise ValueError("neither a status nor a checkpoint")
    if unknown := document.keys() - keys:
        raise ValueError(f"the unknown key {min(unknown)!r}")
    if action == "status":
        return _as_string(document, "responseFor") or ""
    number, sub = _as_string(document, "sequenceNumber"), _as_string(document, "subSequenceNumber")
    try:
        return _CheckpointRequest(number, None if sub is None else int(sub))
    except ValueError:
        raise ValueError("subSequenceNumber is not an integer") from None


def _as_string(message: dict[str, Any], key: str) -> str | None:
    """Return a string or integer as a string. Node writes sequence numbers as strings; other languages may not."""
    value = message.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise ValueError(f"{key} is neither a string nor an integer")
