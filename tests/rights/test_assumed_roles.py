"""Tests that dead letters and producers write with the given role or session. The service enforces permissions."""

from collections.abc import Callable
from itertools import count
from typing import Any

import boto3
import pytest
from standins.iam import REGION, Account, allowed

import leasehold
from leasehold.adapters import dead_letters
from leasehold.adapters.consumer.dead_letters.replaying import DeadLetterHolding
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Lease
from leasehold.errors import DeadLetterError, SourceError

pytestmark = pytest.mark.services

Written = Callable[..., None]
_numbers = count()


def _put(url: str, **more: Any) -> None:  # noqa: ANN401  a session
    with leasehold.produce(url, **more) as producer:
        producer.put(b"a book", "customer-7").result(60)


def _dead_letter(url: str, **more: Any) -> None:  # noqa: ANN401  likewise
    letters = dead_letters(url, source="kinesis://orders", **more)
    record = Record(b"a book", "1", 0, "customer-7", arrived=1.0)
    holding = DeadLetterHolding(Lease("s-0", stream="orders"), "w-1")
    letters(Delivery([record], record.position, None, holding), ValueError("no"))
    letters.close()


@pytest.fixture
def stream(aws: Account, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a stream into which the environment's credentials may not write, like a stream of another account."""
    name = f"roles-{next(_numbers)}"
    aws.client("kinesis").create_stream(StreamName=name, ShardCount=1)
    key, secret = aws.user(allowed("sts:AssumeRole"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", aws.service.url)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # boto3 caches a session with other credentials
    return name


def _records(aws: Account, name: str) -> int:
    client = aws.client("kinesis")
    shard = client.list_shards(StreamName=name)["Shards"][0]["ShardId"]
    iterator = client.get_shard_iterator(StreamName=name, ShardId=shard, ShardIteratorType="TRIM_HORIZON")
    return len(client.get_records(ShardIterator=iterator["ShardIterator"])["Records"])


@pytest.mark.parametrize(("write", "wire"), [(_put, "&wire=json"), (_dead_letter, "")])
def test_records_are_written_with_the_role_or_session(write: Written, wire: str, aws: Account, stream: str) -> None:
    url = f"kinesis://{stream}?region={REGION}&endpoint={aws.service.url}{wire}"
    with pytest.raises((SourceError, DeadLetterError)):
        write(url)
    role = aws.role(f"writer-{stream}", allowed("kinesis:*"), external_id="x-17")
    write(f"{url}&role_arn={role}&external_id=x-17")
    write(url, session=boto3.Session(*aws.user(allowed("kinesis:*"))))
    assert _records(aws, stream) == 2
    with pytest.raises(ValueError, match=r" URL: pass either a session, or profile, role_arn and external_id$"):
        write(f"{url}&role_arn={role}", session=boto3.Session())


def test_a_dead_letter_is_stored_with_the_role_or_session(aws: Account, stream: str) -> None:
    aws.client("s3").create_bucket(Bucket=stream, CreateBucketConfiguration={"LocationConstraint": REGION})
    url = f"s3://{stream}/letters?region={REGION}&endpoint={aws.service.url}"
    with pytest.raises(DeadLetterError):
        _dead_letter(url)
    assert "Contents" not in aws.client("s3").list_objects_v2(Bucket=stream)
    role = aws.role(f"letters-{stream}", allowed("s3:*"), external_id="x-17")
    _dead_letter(f"{url}&role_arn={role}&external_id=x-17")
    assert aws.client("s3").list_objects_v2(Bucket=stream)["KeyCount"] == 1
    with pytest.raises(DeadLetterError):
        _dead_letter(url)
    _dead_letter(url, session=boto3.Session(*aws.user(allowed("s3:*"))))  # the dead letter is already stored
