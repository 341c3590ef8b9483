"""Tests recorded conversations with one child. `test_protocol.py --rewrite` updates the expected responses."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from leasehold.adapters.multilang.protocol import (
    ACTIONS_WITHOUT_CHECKPOINT,
    FINAL_ACTIONS,
    MAX_LINE_BYTES,
    CheckpointError,
    CheckpointRequested,
    Conversation,
    ConversationBroken,
    ConversationError,
    InvalidLine,
    StatusReceived,
)
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import TRIM_HORIZON, Position

CASES = Path(__file__).with_name("conversations.txt")


class RecordedConversation:
    """A recorded case. Each line is a message from the daemon, a line from the child, or a result of the store."""

    def __init__(self) -> None:
        self.conversation = Conversation("shard-1", TRIM_HORIZON)
        self.told: list[str] = []

    def run(self, line: str) -> None:
        """Execute one line of the case."""
        name, _, argument = line.partition(" ")
        steps: dict[str, Callable[[str], object]] = {
            "initialize": self._initialize,
            "records": self._records,
            "shutdown": lambda _: self.conversation.send_shutdown_requested(),
            "lost": lambda _: self.conversation.send_lease_lost(),
            "ended": lambda _: self.conversation.send_shard_ended(),
            "->": lambda text: self._hear(f"\n{text}\n".encode()),
            "part": lambda text: self._hear(text.encode()),
            "bytes": lambda text: self._hear(bytes.fromhex(text) + b"\n"),
            "long": lambda count: self._hear(*[b"x" * 1000] * (int(count) // 1000), b"\n"),
            "status": lambda action: self._hear(status(action)),
            "checkpoint": self._checkpoint,
            "store": lambda _: self.conversation.checkpoint_stored(),
            "fail": lambda error: self.conversation.checkpoint_failed(cast("CheckpointError", error)),
            "close": lambda _: self._hear(b""),
        }
        try:
            steps[name](argument)
        except ConversationError as error:
            self.told.append(f"out of turn: {error}")
        self._tell()

    def _initialize(self, argument: str) -> None:
        position, *options = argument.split()
        if self.conversation.pending_action is None:
            limits = (int(option.removeprefix("most=")) for option in options)
            self.conversation = Conversation("shard-1", _position(position), *limits)
        self.conversation.send_initialize()

    def _records(self, argument: str) -> None:
        words = argument.split()
        key = words.pop()[4:] if words and words[-1].startswith("key=") else "k"
        records = [_record(item, key.replace("\\u2028", "\u2028")) for item in words]
        count = self.conversation.send_records(records, 0.25)
        self.told += [f"{count} of {len(words)}"] if count < len(words) else []

    def _checkpoint(self, argument: str) -> None:
        sequence, *sub_sequence = argument.split()
        message = {"action": "checkpoint", "sequenceNumber": sequence if sequence.isdigit() else json.loads(sequence)}
        self._hear(
            json.dumps(message | ({"subSequenceNumber": json.loads(*sub_sequence)} if sub_sequence else {})).encode()
            + b"\n"
        )

    def _hear(self, *parts: bytes) -> None:
        for part in parts:
            self.conversation.receive_data(part)

    def _tell(self) -> None:
        talk = self.conversation
        while True:
            event = talk.next_event()
            self.told += [f"<- {line}" for line in talk.data_to_send().decode().splitlines()]
            match event:
                case None:
                    return
                case StatusReceived(action):
                    self.told.append(f"answered {action}")
                case CheckpointRequested(position):
                    self.told.append(f"wants {position.sequence} {position.sub}")
                case InvalidLine(line, why):
                    self.told.append(f"not understood: {why}: {line if len(line) < 100 else f'{len(line)} letters'}")
                case ConversationBroken(why):
                    self.told.append(f"broken: {why}")

    def end(self) -> str:
        """Return the results of all lines, and the position up to which the child has acknowledged records."""
        result = f"acknowledged {self.conversation.acknowledged.sequence} {self.conversation.acknowledged.sub}"
        return "\n".join([*self.told, result + (", over" if self.conversation.ended else "")])


def _position(text: str) -> Position:
    sequence, _, sub = text.partition(".")
    return Position(sequence, int(sub or 0))


def _record(text: str, key: str = "k") -> Record:
    position = _position(text)
    return Record(f"d{text}".encode(), position.sequence, position.sub, key, arrived=1_700_000_000.25)


def status(action: str) -> bytes:
    """Return the line with which a child responds to this action."""
    return b'{"action":"status","responseFor":"%s"}\n' % action.encode()


def with_current_responses(text: str) -> str:
    """Return the cases with the responses of the current code."""
    blocks = []
    for case in re.split(r"\n\n(?=# )|\n(?=# )", text.strip()):
        script = case.partition("\n----")[0]
        conversation = RecordedConversation()
        for line in script.splitlines()[1:]:
            conversation.run(line)
        blocks.append(f"{script}\n----\n{conversation.end()}\n")
    return "\n".join(blocks)


def test_conversations_match_the_recorded_ones() -> None:
    """Child processes that use the KCL's libraries rely on these exact bytes and responses."""
    assert with_current_responses(CASES.read_text()) == CASES.read_text()


CHILD_LINES = st.sampled_from([
    *(status(action) for action in ("initialize", "processRecords", "shutdownRequested", *FINAL_ACTIONS)),
    b"garbage\n",
    b"null\n",
    *(
        json.dumps({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": sub}).encode() + b"\n"
        for number in (None, *"123456789", "SHARD_END", "-1", "1e3")
        for sub in (None, 0, 1)
    ),
])  # fmt: skip


class TalkMachine(RuleBasedStateMachine):
    """Checks a conversation in any order of events.

    Only stored checkpoints move `acknowledged`. It never decreases, and never exceeds the delivered records. A message
    is sent only after the response to the previous one. Nothing is sent or parsed after the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conversation = Conversation("s", TRIM_HORIZON, max_records=3)
        self.conversation.send_initialize()
        self.pending_action: str | None = "initialize"
        self.wanted: Position | None = None
        self.number, self.ended = 0, False
        self._look()

    @rule(count=st.integers(0, 4))
    def records(self, count: int) -> None:
        """Deliver a batch, which may be larger than one message."""
        records = [_record(str(self.number + 1 + offset)) for offset in range(count)]
        if self._asks(lambda: setattr(self, "number", self.number + self.conversation.send_records(records, None))):
            assert (
                self.conversation.delivered.order >= self.conversation.acknowledged.order
                or self.conversation.acknowledged.ended
            )

    @rule(which=st.sampled_from(["send_shutdown_requested", "send_lease_lost", "send_shard_ended"]))
    def end(self, which: str) -> None:
        """Send a message that asks the child to end, or tells it that its lease or its shard is gone."""
        self._asks(getattr(self.conversation, which))

    @rule(stored=st.booleans())
    def store(self, stored: bool) -> None:
        """Store the requested checkpoint, or report that the store rejected it."""
        previous_position, requested_position, self.wanted = self.conversation.acknowledged, self.wanted, None
        respond = (
            self.conversation.checkpoint_stored
            if stored
            else partial(self.conversation.checkpoint_failed, "ThrottlingException")
        )
        assert _is_rejected(respond) == (requested_position is None)
        assert self.conversation.acknowledged == (
            requested_position if stored and requested_position else previous_position
        )
        self._look()

    @rule(line=CHILD_LINES, cut=st.integers(0, 99))
    def line(self, line: bytes, cut: int) -> None:
        """Receive a line from the child, in one part or in two."""
        for part in filter(None, (line[:cut], line[cut:])):
            self.conversation.receive_data(part)
        self._look()

    @rule()
    def answer(self) -> None:
        """Receive the response that the daemon is waiting for."""
        self.conversation.receive_data(status(self.conversation.pending_action or "initialize"))
        self._look()

    @rule()
    def close(self) -> None:
        """Receive the end of the child's output."""
        self.conversation.receive_data(b"")
        self._look()

    def _asks(self, step: Callable[[], object]) -> bool:
        was_rejected = _is_rejected(step)
        assert was_rejected == (self.ended or self.pending_action is not None)
        self.pending_action = self.conversation.pending_action
        self._look()
        return not was_rejected

    def _look(self) -> None:
        conversation, previous_position, was_over = self.conversation, self.conversation.acknowledged, self.ended
        while (event := conversation.next_event()) is not None:
            assert not was_over
            match event:
                case CheckpointRequested(position):
                    assert self.wanted is None
                    assert self.pending_action not in ACTIONS_WITHOUT_CHECKPOINT
                    assert previous_position.order < position.order
                    assert position.ended or position.order <= conversation.delivered.order
                    self.wanted = position
                case StatusReceived(action):
                    assert action == self.pending_action
                    self.pending_action, self.ended = None, action in FINAL_ACTIONS
                case ConversationBroken():
                    self.ended = True
                case InvalidLine():
                    pass
        assert conversation.acknowledged == previous_position
        assert conversation.ended == self.ended
        for line in conversation.data_to_send().splitlines():
            message = json.loads(line)
            assert message["action"] == "checkpoint" or message["action"] == self.pending_action
            assert len(message.get("records", ())) <= 3


def _is_rejected(step: Callable[[], object]) -> bool:
    try:
        step()
    except ConversationError:
        return True
    return False


TestTalk = TalkMachine.TestCase


@pytest.mark.parametrize("arrived", [None, 1_700_000_000.0005])
def test_time_is_a_whole_number_of_milliseconds(arrived: float | None) -> None:
    """amazon_kclpy converts the time with `int()`."""
    conversation = Conversation("s", TRIM_HORIZON)
    conversation.send_initialize()
    conversation.receive_data(b'{"action":"status","responseFor":"initialize"}\n')
    conversation.next_event()
    conversation.data_to_send()
    conversation.send_records([Record(b"", "1", arrived=arrived, partition_key="k")], None)
    (record,) = json.loads(conversation.data_to_send())["records"]
    assert record["approximateArrivalTimestamp"] == (0 if arrived is None else 1_700_000_000_000)


def _start_conversation() -> Conversation:
    conversation = Conversation("shard-1", TRIM_HORIZON)
    conversation.send_initialize()
    return conversation


@pytest.mark.parametrize(
    "line",
    [b'{"action": "checkpoint", "sequenceNumber": true}', b"[" * 100_000],
    ids=["a truth value", "deeply nested"],
)
def test_malformed_line_is_not_understood(line: bytes) -> None:
    """A malformed line from a child does not end the daemon, and `true` is not parsed as a number."""
    conversation = _start_conversation()
    conversation.receive_data(line + b"\n")
    assert isinstance(conversation.next_event(), InvalidLine)


def test_overlong_number_is_rejected() -> None:
    """The number has more digits than Python's `int()` accepts."""
    conversation = _start_conversation()
    conversation.receive_data(status("initialize"))
    conversation.next_event()
    conversation.data_to_send()
    conversation.receive_data(json.dumps({"action": "checkpoint", "sequenceNumber": "9" * 5000}).encode() + b"\n")
    assert conversation.next_event() is None
    assert b"IllegalArgumentException" in conversation.data_to_send()


def test_carriage_return_ends_a_line() -> None:
    conversation = _start_conversation()
    conversation.receive_data(status("initialize").strip() + b"\r")
    assert conversation.next_event() == StatusReceived("initialize")


def test_overlong_line_is_reported_once() -> None:
    """A child that never ends its line does not fill the log."""
    conversation = _start_conversation()
    for _ in range(2):
        conversation.receive_data(b"x" * (MAX_LINE_BYTES + 1))
    assert isinstance(conversation.next_event(), InvalidLine)
    assert conversation.next_event() is None


def test_end_of_the_pipe_follows_the_checkpoint_before_it() -> None:
    """A child may close its pipe immediately after requesting its last checkpoint."""
    conversation = _start_conversation()
    conversation.receive_data(status("initialize"))
    conversation.next_event()
    conversation.send_records([Record(b"", "7", 0, "k")], None)
    conversation.receive_data(b'{"action": "checkpoint", "sequenceNumber": "7"}\n')
    conversation.receive_data(b"")
    assert conversation.next_event() == CheckpointRequested(Position("7"))
    assert conversation.next_event() is None
    conversation.checkpoint_stored()
    assert isinstance(conversation.next_event(), ConversationBroken)


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    CASES.write_text(with_current_responses(CASES.read_text()))
