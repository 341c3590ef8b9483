"""The client that reads: what it makes of the times that Kinesis tells."""

import base64
import json
from collections.abc import Callable
from datetime import UTC, datetime
from io import BytesIO
from typing import cast

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.compat import HTTPHeaders

from adapters.kinesis.clients import reading_client, utc

ARRIVED = 1_767_312_000.25


class Raw(BytesIO):
    """A body as the connection hands it over."""

    def stream(self) -> list[bytes]:
        """All of it."""
        return [self.read()]


def test_a_records_time_is_read_as_utc_without_a_local_time_zone() -> None:
    """Without it more than half of the time that reading takes would go into looking the time zone up."""
    record = {"SequenceNumber": "5", "Data": base64.b64encode(b"data").decode(), "PartitionKey": "k"}
    body = {"Records": [{**record, "ApproximateArrivalTimestamp": ARRIVED}], "NextShardIterator": "i-2"}

    def answer(request: AWSPreparedRequest, **_event: object) -> AWSResponse:
        return AWSResponse(request.url, 200, HTTPHeaders(), Raw(json.dumps(body).encode()))

    client = reading_client("eu-west-1", None)
    # The stubs do not know that a handler of this event may answer in the service's place.
    client.meta.events.register("before-send.kinesis.GetRecords", cast("Callable[..., None]", answer))
    (row,) = client.get_records(ShardIterator="i-1")["Records"]
    arrived = row["ApproximateArrivalTimestamp"]
    assert (arrived, arrived.tzinfo) == (datetime.fromtimestamp(ARRIVED, UTC), UTC)


@pytest.mark.parametrize("told", [ARRIVED, str(ARRIVED), "2026-01-02T00:00:00.25Z"])
def test_every_form_of_a_time_is_understood(told: object) -> None:
    """Without it one answer in another form would end a shard."""
    assert utc(told) == datetime.fromtimestamp(ARRIVED, UTC)
