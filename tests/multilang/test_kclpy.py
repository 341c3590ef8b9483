"""Tests amazon_kclpy as the child: it reads the messages that our encoder writes, and we parse its responses."""

import json
from io import StringIO
from typing import Any

import pytest

from leasehold.adapters.multilang.protocol import CheckpointRequested, Conversation
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import SHARD_END, Position

kcl = pytest.importorskip("amazon_kclpy.kcl", reason="test_samples runs these where amazon_kclpy is")
v2 = pytest.importorskip("amazon_kclpy.v2.processor")
v3 = pytest.importorskip("amazon_kclpy.v3.processor")


class _Pipe:
    """Both pipes of the child. A message is sent after the child has responded to the previous one."""

    def __init__(self, conversation: Conversation, steps: list[Any], rejection_count: int) -> None:
        self.conversation, self._steps, self._refused = conversation, steps, rejection_count
        self.wanted, self.heard = list[Position](), list[dict[str, Any]]()
        self._lines = list[str]()

    def readline(self) -> str:
        if not self._lines and self.conversation.pending_action is None and self._steps:
            self._steps.pop(0)(self.conversation)
            self._take()
        return self._lines.pop(0) if self._lines else ""

    def write(self, text: str) -> None:
        self.heard += [json.loads(line) for line in text.splitlines() if line.strip()]
        self.conversation.receive_data(text.encode())
        while (event := self.conversation.next_event()) is not None:
            if isinstance(event, CheckpointRequested):
                self.wanted.append(event.position)
                if self._refused:
                    self._refused -= 1
                    self.conversation.checkpoint_failed("ThrottlingException")
                else:
                    self.conversation.checkpoint_stored()
        self._take()

    def flush(self) -> None:
        pass

    def _take(self) -> None:
        self._lines += self.conversation.data_to_send().decode().splitlines(keepends=True)


def _converse(processor: Any, steps: list[Any], rejected_checkpoints: int = 0) -> tuple[_Pipe, str]:  # noqa: ANN401  it has no types
    pipe, errors = (
        _Pipe(
            Conversation("shardId-123", Position("400")), [Conversation.send_initialize, *steps], rejected_checkpoints
        ),
        StringIO(),
    )
    kcl.KCLProcess(processor, input_file=pipe, output_file=pipe, error_file=errors).run()
    return pipe, errors.getvalue()


def _send_one_record(conversation: Conversation) -> None:
    conversation.send_records([Record(b"meow", "456", 0, "cat", arrived=1.5)], 1.0)


def _checkpoint(number: str | None) -> dict[str, Any]:
    return {"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": None}


def _status(action: str) -> dict[str, Any]:
    return {"action": "status", "responseFor": action}


class _FirstVersion(kcl.RecordProcessorBase):  # type: ignore[misc, name-defined]
    """A processor of the first version."""

    def initialize(self, shard_id: str) -> None:
        assert shard_id == "shardId-123"

    def process_records(self, records: Any, checkpointer: Any) -> None:  # noqa: ANN401
        assert (records[0].get("sequenceNumber"), records[0].get("data")) == ("456", "bWVvdw==")
        with pytest.raises(kcl.CheckpointError) as exception_info:
            checkpointer.checkpoint("456")
        assert exception_info.value.value == "ThrottlingException"
        checkpointer.checkpoint("456")

    def shutdown(self, checkpointer: Any, reason: str) -> None:  # noqa: ANN401
        assert reason == "TERMINATE"
        checkpointer.checkpoint()


def test_conversation_continues_after_a_rejected_checkpoint() -> None:
    """A rejected checkpoint reaches user code as the error that it expects."""
    pipe, errors = _converse(_FirstVersion(), [_send_one_record, Conversation.send_shard_ended], rejected_checkpoints=1)
    assert pipe.heard == [
        _status("initialize"),
        _checkpoint("456"),
        _checkpoint("456"),
        _status("processRecords"),
        _checkpoint(None),
        _status("shardEnded"),
    ]
    assert (pipe.wanted, errors) == ([Position("456"), Position("456"), SHARD_END], "")


class _SecondVersion(v2.RecordProcessorBase):  # type: ignore[misc, name-defined]
    """A processor of the second version, which the library of the third version runs through an adapter."""

    version = 2

    def __init__(self) -> None:
        self.told = list[str]()

    def initialize(self, message: Any) -> None:  # noqa: ANN401
        self.told.append(f"{message.shard_id} {message.sequence_number} {message.sub_sequence_number}")

    def process_records(self, message: Any) -> None:  # noqa: ANN401
        (record,) = message.records
        self.told.append(f"{record.binary_data!r} {record.partition_key} {record.sub_sequence_number}")

    def shutdown_requested(self, message: Any) -> None:  # noqa: ANN401
        message.checkpointer.checkpoint()

    def shutdown(self, message: Any) -> None:  # noqa: ANN401
        self.told.append(message.reason)
        if message.reason == "TERMINATE":
            message.checkpointer.checkpoint()
            return
        with pytest.raises(kcl.CheckpointError):
            message.checkpointer.checkpoint()


def test_second_version_processor_gets_third_version_messages_in_its_form() -> None:
    """The processor receives its records and `leaseLost` in the form of its own version."""
    processor = _SecondVersion()
    steps = [_send_one_record, Conversation.send_shutdown_requested, Conversation.send_lease_lost]
    pipe, errors = _converse(v3.V2toV3Processor(processor), steps)
    assert processor.told == ["shardId-123 400 0", "b'meow' cat 0", "ZOMBIE"]
    assert (pipe.wanted, errors) == ([Position("456")], "")


def test_second_version_processor_ends_its_shard() -> None:
    """The processor receives `shardEnded` as the end of a shard, not as a lost lease."""
    processor = _SecondVersion()
    pipe, errors = _converse(v3.V2toV3Processor(processor), [_send_one_record, Conversation.send_shard_ended])
    assert processor.told == ["shardId-123 400 0", "b'meow' cat 0", "TERMINATE"]
    assert (pipe.wanted, errors) == ([SHARD_END], "")
