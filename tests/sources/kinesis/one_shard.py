"""Clients of a stream with one shard, for tests of producers."""

from typing import Any, cast

SHARD = {
    "ShardId": "s-0",
    "HashKeyRange": {"StartingHashKey": "0", "EndingHashKey": str((1 << 128) - 1)},
    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
}


class OneShard:
    """A client of a stream with one shard. Its writes raise an exception that no real client raises."""

    def describe_stream_summary(self, **_: object) -> dict[str, Any]:
        return {"StreamDescriptionSummary": {}}

    def list_shards(self, **_: object) -> dict[str, Any]:
        return {"Shards": [SHARD]}

    def put_records(self, **_: object) -> dict[str, Any]:
        raise SystemExit(3)


class AcceptingShard(OneShard):
    """A client of a stream with one shard. Its writes succeed."""

    def put_records(self, **request: object) -> dict[str, Any]:
        rows = cast("list[object]", request["Records"])
        return {"Records": [{"ShardId": "s-0", "SequenceNumber": "7"}] * len(rows)}
