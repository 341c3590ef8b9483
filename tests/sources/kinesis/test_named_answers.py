"""A response is rejected if its records come from a shard other than the requested one."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.balancer.model import TRIM_HORIZON

NUMBER_IN_SHARD_6 = "49590338271490256608559692538361571095921575989136588898"
"""A sequence number that belongs to shard 6."""


def read_both(poller: type[Poller], shard: str, **response: Any) -> tuple[Any, Any]:  # noqa: ANN401  a batch of either
    """Let a reader of this shard read this response, and then the correct response to the same request."""
    own_number = str(int(NUMBER_IN_SHARD_6) + (int(shard[-1]) - 6 << 4)) if shard[-1:].isdigit() else NUMBER_IN_SHARD_6
    correct_response = {"Records": [row(own_number)], "NextShardIterator": "next", "MillisBehindLatest": 0}
    responses = iter(
        [{"NextShardIterator": "other", "MillisBehindLatest": 0, "Records": [], **deepcopy(response)}, correct_response]
    )
    requested_iterators = list[str]()

    def get_records(*, ShardIterator: str, Limit: int) -> Any:  # noqa: ANN401, ARG001, N803  as boto3
        requested_iterators.append(ShardIterator)
        return next(responses)

    client = SimpleNamespace(get_records=get_records, get_shard_iterator=lambda **_: {"ShardIterator": "mine"})
    reader = poller(cast("Any", client), "orders", shard, TRIM_HORIZON, None)
    batches = reader.read(), reader.read()
    return batches[0], (batches[1].read_to, requested_iterators)


def row(number: str) -> dict[str, Any]:
    """Return the row of a record with this sequence number."""
    return {"Data": b"x", "SequenceNumber": number, "PartitionKey": "k", "ApproximateArrivalTimestamp": 1.0}


def child(*parents: str) -> dict[str, Any]:
    """Return a shard with these parents."""
    hash_range = {"StartingHashKey": "0", "EndingHashKey": "9"}
    return {"ShardId": "shardId-000000000009", "ParentShards": [*parents], "HashKeyRange": hash_range}


@pytest.mark.parametrize("poller", [Poller, ArrowPoller])
@pytest.mark.parametrize(
    "answer",
    [
        {"Records": [row(NUMBER_IN_SHARD_6)]},
        {"NextShardIterator": None, "ChildShards": [child("shardId-000000000006")]},
        {
            "Records": [row(NUMBER_IN_SHARD_6)],
            "NextShardIterator": None,
            "ChildShards": [child("shardId-000000000006")],
        },
    ],
    ids=["records", "end", "records and end"],
)
def test_response_about_another_shard_is_rejected(poller: type[Poller], answer: dict[str, Any]) -> None:
    """A response about another shard is recognized by its sequence numbers, or by the parents of its child shards.

    A response without records that does not end the shard can't be recognized, but a later one with its iterator can.
    """
    batch, (read_to, requested_iterators) = read_both(poller, "shardId-000000000004", **answer)
    assert (batch.read_to, batch.ended, batch.children) == (None, False, ())
    assert "another shard" in (batch.fault or "")
    assert (read_to.sequence, requested_iterators) == (str(int(NUMBER_IN_SHARD_6) - 32), ["mine", "mine"])


@pytest.mark.parametrize("poller", [Poller, ArrowPoller])
@pytest.mark.parametrize(
    ("shard", "number"),
    [("shardId-000000000006", NUMBER_IN_SHARD_6), ("shardId-000000000004", "12"), ("orders-a", NUMBER_IN_SHARD_6)],
    ids=["its own", "of a local service", "of another name"],
)
def test_response_that_names_no_other_shard_is_accepted(poller: type[Poller], shard: str, number: str) -> None:
    """Sequence numbers and shard names are checked only if they have the format of the service."""
    batch, _ = read_both(poller, shard, Records=[row(number)], ChildShards=[child(shard, "another")])
    assert (batch.read_to.sequence, batch.fault) == (number, "")
