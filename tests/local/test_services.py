"""Tests that every local service starts, responds, listens only on loopback, and is gone afterwards."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

import boto3
import pytest
from azure.storage.blob import BlobServiceClient
from standins.dynamodb_local import OPT_IN, dynamodb_local, opted_in
from standins.ferrokinesis import ferrokinesis
from standins.versitygw import versitygw
from waiters import AT_ONCE

from leasehold.adapters.toolchain import ServiceError
from leasehold_lab.standins.node import Service, accepts_connections
from leasehold_lab.standins.services import (
    azurite_connection_string,
    run_azurite,
    run_dynalite,
    run_kinesis_local,
    run_moto,
)


def _tables(service: Service) -> object:
    client = boto3.client("dynamodb", endpoint_url=service.url)
    client.create_table(
        TableName="leases",
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        BillingMode="PAY_PER_REQUEST",
    )
    return client.list_tables()["TableNames"]


def _streams(service: Service) -> object:
    client = boto3.client("kinesis", endpoint_url=service.url)
    client.create_stream(StreamName="trades", ShardCount=3)
    client.get_waiter("stream_exists").wait(StreamName="trades", WaiterConfig=AT_ONCE)
    return [shard["ShardId"][-1] for shard in client.list_shards(StreamName="trades")["Shards"]]


def _buckets(service: Service) -> object:
    client = boto3.client("s3", endpoint_url=service.url)
    client.create_bucket(Bucket="leases", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    return [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]


def _containers(service: Service) -> object:
    with BlobServiceClient.from_connection_string(azurite_connection_string(service)) as client:
        client.create_container("leases")
        return [container.name for container in client.list_containers()]


def _listens_beyond_loopback(port: int) -> bool:
    """Return whether this port is in use on another address than 127.0.0.1."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", port))
        except OSError:
            return True
    return False


@pytest.mark.sampled(4)
@pytest.mark.services
@pytest.mark.parametrize(
    ("start", "call", "answer"),
    [
        (run_dynalite, _tables, ["leases"]),
        (run_kinesis_local, _streams, ["0", "1", "2"]),
        (run_azurite, _containers, ["leases"]),
        (run_moto, _tables, ["leases"]),
    ],
    ids=["dynalite", "kinesis-local", "azurite", "moto"],
)
def test_a_stand_in_starts_responds_and_stops(
    start: Callable[[], AbstractContextManager[Service]], call: Callable[[Service], object], answer: object
) -> None:
    """A local service listens only on loopback, and its port is free again afterwards."""
    with start() as service:
        assert (call(service), _listens_beyond_loopback(service.port)) == (answer, False)
    assert not accepts_connections(service.port)


@pytest.mark.more
def test_dynamodb_local_starts_responds_and_stops() -> None:
    if not opted_in():
        pytest.skip(f"DynamoDB Local is opt-in: {OPT_IN}=1 accepts its licence and fetches it")
    with dynamodb_local() as service:
        assert _tables(service) == ["leases"]
    assert not accepts_connections(service.port)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_ferrokinesis_starts_responds_and_stops() -> None:
    try:
        with ferrokinesis() as service:
            assert (_streams(service), _listens_beyond_loopback(service.port)) == (["0", "1", "2"], False)
    except ServiceError as missing:
        pytest.skip(f"FAN-OUT IS NOT TESTED WITH A SERVICE: {missing}")
    assert not accepts_connections(service.port)


@pytest.mark.more
@pytest.mark.timeout(1800)
def test_versitygw_starts_responds_and_stops() -> None:
    try:
        with versitygw() as service:
            assert (_buckets(service), _listens_beyond_loopback(service.port)) == (["leases"], False)
    except ServiceError as missing:
        pytest.skip(f"S3 IS NOT TESTED IN RACES: {missing}")
    assert not accepts_connections(service.port)


def test_dynamodb_local_is_not_downloaded_without_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    """DynamoDB Local is downloaded only by users who have accepted its license."""
    monkeypatch.delenv(OPT_IN, raising=False)
    with pytest.raises(ServiceError, match=f"set {OPT_IN}=1 to accept it"), dynamodb_local():
        pass
