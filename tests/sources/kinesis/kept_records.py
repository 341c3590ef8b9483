"""An in-memory stream that stores what a producer puts."""

from collections.abc import Callable
from typing import Any, cast

from botocore.exceptions import ClientError
from one_shard import SHARD, AcceptingShard

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer


class RecordingClient(AcceptingShard):
    """A client that passes the data of each request to `before_put`, and then stores it.

    halves  whether the stream has two shards, the first with ten hash keys
    """

    def __init__(
        self, before_put: Callable[[list[bytes]], object] = lambda _data: None, *, halves: bool = False
    ) -> None:
        self.data, self.before, self.halves = list[bytes](), before_put, halves

    def list_shards(self, **_: object) -> dict[str, Any]:
        if not self.halves:
            return super().list_shards()
        keys = ("0", "9"), ("10", str((1 << 128) - 1))
        return {
            "Shards": [
                SHARD | {"ShardId": f"s-{index}", "HashKeyRange": {"StartingHashKey": first, "EndingHashKey": last}}
                for index, (first, last) in enumerate(keys)
            ]
        }

    def put_records(self, **request: object) -> dict[str, Any]:
        rows = cast("list[dict[str, Any]]", request["Records"])
        data = [user_record.data for row in rows for user_record in deaggregate(row["Data"], row["PartitionKey"])]
        self.before(data)
        self.data += data
        shards = ["s-1" if self.halves and int(row["ExplicitHashKey"]) > 9 else "s-0" for row in rows]
        return {"Records": [{"ShardId": shard, "SequenceNumber": "7"} for shard in shards]}


def producing(client: object, **settings: Any) -> Producer:  # noqa: ANN401  any setting
    """Return a producer that uses this client."""
    return Producer(cast("Any", client), "orders", Settings(**({"linger_seconds": 0.0} | settings)))


def rejection(code: str) -> ClientError:
    """Return the error with which the service rejects a whole request."""
    response: Any = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    return ClientError(response, "PutRecords")
