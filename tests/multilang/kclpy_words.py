"""Replaces the `utils` module of amazon_kclpy's tests, so that our encoder writes the daemon's messages.

The strings in those tests are the daemon's side of a conversation. Each message is replaced by the one that our encoder
writes, and the child's responses are simulated. A message that no daemon writes stays unchanged.
"""

import json
import os
from base64 import b64decode
from io import StringIO
from pathlib import Path
from typing import Any

from leasehold.adapters.multilang.protocol import CheckpointRequested, Conversation
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Position


def make_io_obj(text: str | None = None) -> StringIO:
    """Return a file with this content, in which our encoder's messages replace the original ones."""
    return StringIO("".join(_rewrite_messages([json.loads(line) for line in (text or "").splitlines()])))


def _rewrite_messages(messages: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    conversation: Conversation | None = None
    for message in messages:
        match message["action"]:
            case "initialize":
                conversation = Conversation(
                    message["shardId"], Position(message["sequenceNumber"], message["subSequenceNumber"])
                )
                conversation.send_initialize()
            case "processRecords" if conversation is not None:
                _receive_response(conversation)
                conversation.send_records(
                    [_record(record) for record in message["records"]], message["millisBehindLatest"] / 1000
                )
            case "shardEnded" if conversation is not None:
                _receive_response(conversation)
                conversation.send_shard_ended()
            case "checkpoint" if conversation is not None:
                _request_checkpoint(conversation, message)
            case _:
                lines.append(json.dumps(message))
                continue
        assert conversation is not None
        lines.append(conversation.data_to_send().decode())
        _append_action(message["action"])
    return lines


def _receive_response(conversation: Conversation) -> None:
    conversation.receive_data(
        json.dumps({"action": "status", "responseFor": conversation.pending_action}).encode() + b"\n"
    )
    assert conversation.next_event() is not None


def _request_checkpoint(conversation: Conversation, message: dict[str, Any]) -> None:
    """Simulate the child's request for a checkpoint. The request at the end of the shard has no sequence number."""
    number = None if conversation.pending_action == "shardEnded" else message["sequenceNumber"]
    conversation.receive_data(
        json.dumps({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": None}).encode()
    )
    conversation.receive_data(b"\n")
    if isinstance(conversation.next_event(), CheckpointRequested):
        if error := message.get("error"):
            conversation.checkpoint_failed(error)
        else:
            conversation.checkpoint_stored()


def _record(message: dict[str, Any]) -> Record:
    return Record(
        b64decode(message["data"]),
        message["sequenceNumber"],
        message["subSequenceNumber"],
        message["partitionKey"],
        arrived=message["approximateArrivalTimestamp"] / 1000,
    )


def _append_action(action: str) -> None:
    """Append the action of a message of ours to a file. The test that started this run reads the file."""
    with Path(os.environ["WRITTEN_BY_US"]).open("a") as notes:
        notes.write(f"{action}\n")
