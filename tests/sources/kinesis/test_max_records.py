"""The `max_records` option of a source URL limits the number of records per request."""

import pytest
from standins.wire_service import Service, listening

from leasehold.adapters.sources.dynamodb_streams import ChangePoller
from leasehold.adapters.sources.kinesis.faults import parse_max_records
from leasehold.adapters.sources.kinesis.poller import MAX_RECORDS
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import TRIM_HORIZON, Lease

TABLE_STREAM = "arn:aws:dynamodb:eu-west-1:123456789012:table/orders/stream/2026-01-01T00:00:00.000"


def test_request_asks_for_the_max_records_of_the_url() -> None:
    """The default is the service's own limit."""
    responses = {"ShardIterator": "i-1"}, {"Records": [], "NextShardIterator": "i-2", "MillisBehindLatest": 0}
    for option, limit in (("&max_records=7", 7), ("", MAX_RECORDS)):
        service = Service({"StreamDescriptionSummary": {}}, *responses)
        source = open_source(f"kinesis://orders?region=eu-west-1&endpoint={listening(service)}{option}")
        source.open(Lease("s-0"), TRIM_HORIZON).read()
        source.close()
        assert service.asked[-1]["Limit"] == limit


def test_request_for_changes_asks_for_the_max_records_of_the_url() -> None:
    """The default is the service's own limit."""
    for option, limit in (("&max_records=7", 7), ("", ChangePoller.max_records)):
        service = Service({"ShardIterator": "i-1"}, {"Records": [], "NextShardIterator": "i-2"})
        source = open_source(f"dynamodb-streams://{TABLE_STREAM}?endpoint={listening(service)}{option}")
        source.open(Lease("shardId-00000001700000000000-00000001"), TRIM_HORIZON).read()
        source.close()
        assert service.asked[-1]["Limit"] == limit


@pytest.mark.parametrize(("text", "limit"), [("1", 10), ("10", 10), ("1000", ChangePoller.max_records)])
def test_max_records_within_the_services_limit_is_accepted(text: str, limit: int) -> None:
    """Both bounds are themselves valid."""
    assert parse_max_records({"max_records": text}, limit) == int(text)


@pytest.mark.parametrize("text", ["0", "-1", "11", "1e1", "ten", "\u0664", "1" * 5000])
def test_max_records_beyond_the_services_limit_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"option 'max_records' must be 1 to 10, "):
        parse_max_records({"max_records": text}, 10)
