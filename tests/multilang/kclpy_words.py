"""What the tests of amazon_kclpy ask their `utils` for: files, whose messages of the daemon are written by our encoder.

Their texts are the daemon's half of a conversation. Each message in them becomes the one that our side says in that
place, with the child's half written as its library writes it. A message that no daemon writes stays as it is.
"""

import json
import os
from base64 import b64decode
from io import StringIO
from pathlib import Path
from typing import Any

from leasehold.adapters.multilang.protocol import CheckpointWanted, Conversation
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Position


def make_io_obj(text: str | None = None) -> StringIO:
    """A file with this text, its messages written anew."""
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
    talk.receive_data(json.dumps({"action": "status", "responseFor": talk.asking}).encode() + b"\n")
    assert talk.next_event() is not None


def _checkpoint(talk: Conversation, message: dict[str, Any]) -> None:
    """The child has asked for a checkpoint, by number or, at the shard's end, for all."""
    number = None if talk.asking == "shardEnded" else message["sequenceNumber"]
    talk.receive_data(
        json.dumps({"action": "checkpoint", "sequenceNumber": number, "subSequenceNumber": None}).encode()
    )
    talk.receive_data(b"\n")
    if isinstance(talk.next_event(), CheckpointWanted):
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
    """Keep which messages were written by us, for whoever has started these tests."""
    with Path(os.environ["WRITTEN_BY_US"]).open("a") as notes:
        notes.write(f"{action}\n")
