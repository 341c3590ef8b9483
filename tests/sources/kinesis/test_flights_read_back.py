"""Our worker and a Java KCL worker read the same records from a stream that our producer has written."""

from pathlib import Path

import pytest
from attrs import evolve
from flights_read_back import Places, in_order, java_missing, read_by_java, read_by_ours, readable_records, size
from produced_flights import Verdict, flights, judge, produce, stored
from types_boto3_kinesis import KinesisClient

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java")]

VERSION = "2.7.2"
FINE = Verdict(lost=0, extra=0, disordered=(), twice=0, unexplained=0, misreported=0, dropped=0)


def test_java_and_our_worker_read_a_resharded_stream_alike(
    client: KinesisClient, kinesis_url: str, dynamodb_local_url: str, tmp_path: Path
) -> None:
    if missing_tools := java_missing():
        pytest.skip(f"the Java KCL is not run: no {missing_tools}")
    rows = list(flights(8000))
    stream, faulty_client, futures, _producer = produce(client, rows, (2, 4, 2), rate=0.3, pending=800)
    records = list(stored(client, stream))
    assert evolve(judge(rows, records, faulty_client, futures), twice=0, dropped=0) == FINE
    expected, services = readable_records(records), Places(kinesis_url, dynamodb_local_url)
    assert len(expected) == 2 + 4 + 2
    read_by_leasehold = read_by_ours(services, stream, size(expected), tmp_path)
    read_by_kcl = read_by_java(services, stream, size(expected), tmp_path, VERSION)
    assert in_order(read_by_leasehold) == in_order(expected)
    assert in_order(read_by_kcl) == in_order(expected)
