"""Tests that the stream and the lease table can have different credentials. The local service enforces permissions."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ground import Ground, processor
from standins.iam import REGION, Account, account, allowed

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def aws() -> Iterator[Account]:
    """Yield an account in which each call is rejected unless a policy allows it."""
    with account() as environment:
        yield environment


def test_stream_and_lease_table_use_different_credentials(
    aws: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream of another account is read with its own credentials, not with those of the table."""
    environment = Ground(aws.client("kinesis"), aws.service.url, aws.service.url, tmp_path, REGION)
    environment.kinesis.create_stream(StreamName=environment.stream, ShardCount=1)
    environment.put("a")
    role = aws.role("reader", allowed("kinesis:*"), external_id="x-17")
    (table_key, table_secret), (key, secret) = aws.user(allowed("dynamodb:*")), aws.user(allowed("sts:AssumeRole"))
    (tmp_path / "config").write_text(
        f"[profile leases]\naws_access_key_id = {table_key}\naws_secret_access_key = {table_secret}\n"
    )
    for name, value in (
        ("CONFIG_FILE", str(tmp_path / "config")),
        ("ACCESS_KEY_ID", key),
        ("SECRET_ACCESS_KEY", secret),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    earlier_call_count = len(aws.asked())
    provider = f"StsAssumeRoleCredentialsProvider|{role}|reader|externalId=x-17|endpoint={aws.service.url}^{REGION}"
    with environment.daemon(
        processor("faithful"),
        AwsCredentialsProvider=provider,
        AwsCredentialsProviderDynamoDB="ProfileCredentialsProvider|leases",
    ) as daemon:
        daemon.await_line(lambda line: "INFO checkpoint None" in line)
        assert daemon.end() == 0
    calls = aws.asked()[earlier_call_count:]
    assert {action.partition(":")[0] for action, _, _ in calls} == {"kinesis", "dynamodb"}
    assert [call for call in calls if not call[2]] == []
