"""The `utils` module of amazon_kclpy's tests, with the daemon's messages written by our encoder.

The tests' strings are the daemon's half of a conversation. Each message is replaced by ours, and the child's half is
written as its library writes it. A message that no daemon writes stays unchanged.
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
    """Return a file with this content, its messages replaced by ours."""
    return StringIO("".join(_written([json.loads(line) for line in (text or "").splitlines()])))


def _written(messages: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    talk: Conversation | None = None
    for message in messages:
        match message["action"]:
            case "initialize":
                talk = Conversation(
                    message["shardId"], Position(message["sequenceNumber"], message["subSequenceNumber"])
                )
                talk.initialize()
            case "processRecords" if talk is not None:
                _answered(talk)
                talk.process_records(
                    [_record(each) for each in message["records"]], message["millisBehindLatest"] / 1000
                )
            case "shardEnded" if talk is not None:
                _answered(talk)
                talk.shard_ended()
            case "checkpoint" if talk is not None:
                _checkpoint(talk, message)
            case _:
                lines.append(json.dumps(message))
                continue
        assert talk is not None
        lines.append(talk.data_to_send().decode())
        _note(message["action"])
    return lines


def _answered(talk: Conversation) -> None:
    talk.receive_data(json.dumps({"action": "status", "responseFor": talk.pending_action}).encode() + b"\n")
    assert talk.next_event() is not None


def _checkpoint(talk: Conversation, message: dict[str, Any]) -> None:
    """Handle the child's request for a checkpoint, by number or, at the end of the shard, of everything."""
    number = None if talk.pending_action == "shardEnded" else message["sequenceNumber"]
    talk.receive_data(
        json.dumps({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": None}).encode()
    )
    talk.receive_data(b"\n")
    if isinstance(talk.next_event(), CheckpointRequested):
        if error := message.get("error"):
            talk.checkpoint_failed(error)
        else:
            talk.checkpoint_stored()


def _record(told: dict[str, Any]) -> Record:
    return Record(
        b64decode(told["data"]),
        told["sequenceNumber"],
        told["subSequenceNumber"],
        told["partitionKey"],
        arrived=told["approximateArrivalTimestamp"] / 1000,
    )


def _note(action: str) -> None:
    """Record which messages were written by us, for the caller of these tests."""
    with Path(os.environ["WRITTEN_BY_US"]).open("a") as notes:
        notes.write(f"{action}\n")
