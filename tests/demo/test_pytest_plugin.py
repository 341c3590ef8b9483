"""Tests the fixtures that pytest has if leasehold is installed."""

import pytest

from leasehold.balancer.model import Lease
from leasehold.stores.protocol import Done
from leasehold.stores.urls import open_store
from leasehold.stores.writes import CreateLease
from leasehold_lab.demo.stage import Stream


@pytest.mark.parametrize(
    "fixture",
    [
        "leasehold_sqlite",
        pytest.param("leasehold_dynamodb_table", marks=pytest.mark.services),
        pytest.param("leasehold_blob_container", marks=pytest.mark.services),
    ],
)
def test_the_table_fixtures_are_new_and_writable(fixture: str, request: pytest.FixtureRequest) -> None:
    store = open_store(request.getfixturevalue(fixture))
    assert store.list().leases == ()
    assert isinstance(store.write(CreateLease(Lease("s-0"))), Done)
    store.close()


@pytest.mark.services
def test_the_stream_fixture_can_be_split(leasehold_kinesis_stream: Stream) -> None:
    parent = leasehold_kinesis_stream.split()
    leasehold_kinesis_stream.put(("k", b"one"))
    assert sum(shard.parents == (parent,) for shard in leasehold_kinesis_stream.shards()) == 2
