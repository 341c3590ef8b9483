"""Moving back from our workers to Java 3.x workers, whose leader was just killed, as the documentation describes."""

import java_kcl
import pytest
from mixed import mixed
from types_boto3_dynamodb import DynamoDBClient

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java")]


@pytest.mark.timeout(400)
def test_java_reads_at_once_after_the_dead_leaders_row_is_deleted(
    kinesis_url: str, dynamodb_local_url: str, dynamodb_local_client: DynamoDBClient
) -> None:
    """Deleting the row of the dead leader avoids two minutes without a reader."""
    if missing_tools := java_kcl.missing():
        pytest.skip(f"the Java KCL is not run: no {missing_tools}")
    java_kcl.built("3.5.1")
    with mixed(kinesis_url, dynamodb_local_url, "3.5.1", "own") as fleet:
        fleet.join_java("java-1")
        fleet.balanced()
        fleet.stage.join("ours-1")
        fleet.balanced()
        assert fleet.stage.store.list().reports.leader == "java-1"
        fleet.stage.kill("java-1")
        fleet.owned_by("ours-1")
        assert fleet.stage.drain_worker("ours-1").wait() == 0
        assert fleet.stage.store.list().reports.leader == "java-1"
        dynamodb_local_client.delete_item(TableName=fleet.table, Key={"leaseKey": {"S": "Leader"}})
        fleet.join_java("java-2")
        # This wait is limited to a minute, whereas the lock of the dead leader would have lasted two minutes.
        fleet.owned_by("java-2")
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost) == ((), 0), verdict
