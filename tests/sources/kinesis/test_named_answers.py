"""Responses whose records belong to another shard than the requested one are rejected."""

from copy import deepcopy
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.balancer.model import TRIM_HORIZON

SIX = "49590338271490256608559692538361571095921575989136588898"
"""A sequence number of shard 6."""


def read_both(poller: type[Poller], shard: str, **answer: Any) -> tuple[Any, Any]:  # noqa: ANN401  a batch of either
    """Return what a reader of this shard makes of this response, and of the correct one to the same request."""
    mine = str(int(SIX) + (int(shard[-1]) - 6 << 4)) if shard[-1:].isdigit() else SIX
    right = {"Records": [row(mine)], "NextShardIterator": "next", "MillisBehindLatest": 0}
    answers = iter([{"NextShardIterator": "other", "MillisBehindLatest": 0, "Records": [], **deepcopy(answer)}, right])
    questions = list[str]()

    def get_records(*, ShardIterator: str, Limit: int) -> Any:  # noqa: ANN401, ARG001, N803  as boto3
        questions.append(ShardIterator)
        return next(answers)

    client = SimpleNamespace(get_records=get_records, get_shard_iterator=lambda **_: {"ShardIterator": "mine"})
    reader = poller(cast("Any", client), "orders", shard, TRIM_HORIZON, None)
    batches = reader.read(), reader.read()
    return batches[0], (batches[1].read_to, questions)


def row(number: str) -> dict[str, Any]:
    """Return a record with this sequence number."""
    return {"Data": b"x", "SequenceNumber": number, "PartitionKey": "k", "ApproximateArrivalTimestamp": 1.0}


def child(*parents: str) -> dict[str, Any]:
    """Return a shard that follows these."""
    ends = {"StartingHashKey": "0", "EndingHashKey": "9"}
    return {"ShardId": "shardId-000000000009", "ParentShards": [*parents], "HashKeyRange": ends}


@pytest.mark.parametrize("poller", [Poller, ArrowPoller])
@pytest.mark.parametrize(
    "answer",
    [
        {"Records": [row(SIX)]},
        {"NextShardIterator": None, "ChildShards": [child("shardId-000000000006")]},
        {"Records": [row(SIX)], "NextShardIterator": None, "ChildShards": [child("shardId-000000000006")]},
    ],
    ids=["records", "end", "records and end"],
)
def test_response_about_another_shard_is_rejected(poller: type[Poller], answer: dict[str, Any]) -> None:
    """Such a response is recognized by its sequence numbers and by the parents of the children.

    A response without records that does not end the shard names nothing, but its iterator returns the next response,
    which does.
    """
    batch, (read_to, questions) = read_both(poller, "shardId-000000000004", **answer)
    assert (batch.read_to, batch.ended, batch.children) == (None, False, ())
    assert "another shard" in (batch.fault or "")
    assert (read_to.sequence, questions) == (str(int(SIX) - 32), ["mine", "mine"])


@pytest.mark.parametrize("poller", [Poller, ArrowPoller])
@pytest.mark.parametrize(
    ("shard", "number"),
    [("shardId-000000000006", SIX), ("shardId-000000000004", "12"), ("orders-a", SIX)],
    ids=["its own", "of a local service", "of another name"],
)
def test_response_that_names_no_other_shard_is_accepted(poller: type[Poller], shard: str, number: str) -> None:
    """Only sequence numbers and names in the service's own format are checked."""
    batch, _ = read_both(poller, shard, Records=[row(number)], ChildShards=[child(shard, "another")])
    assert (batch.read_to.sequence, batch.fault) == (number, "")
