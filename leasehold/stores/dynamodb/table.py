"""The DynamoDB table itself: found, or made as the Kinesis Client Library makes it, waited for, and tried."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from botocore.exceptions import ClientError
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_exponential

from leasehold.balancer.model import Lease
from leasehold.stores.dynamodb.calls import code_of, translated, unless_throttled
from leasehold.stores.dynamodb.rows import KEY, text, to_item
from leasehold.stores.protocol import OutcomeUnknown, StoreError

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodb.type_defs import TableDescriptionTypeDef

WAIT_SECONDS = 600
"""How long a table may take to become usable; the Kinesis Client Library waits as long."""


def prepare(client: "DynamoDBClient", table: str, *, create: bool) -> None:
    """Make sure the table is there, has our key, and can be used.

    Raises StoreError where it is missing and may not be made, or is some other program's.
    """
    with translated(table):
        if _describe(client, table) is None:
            if not create:
                raise StoreError(
                    f"{table}: there is no such table, and it may not be made here; make one with the "
                    f"partition key {KEY} (string), or allow its creation"
                )
            _create(client, table)
        check_key(table, _usable(client, table))


def prove(client: "DynamoDBClient", table: str) -> None:
    """Return if the service keeps conditions: each wants a row of this name, which does not exist.

    So nothing is left behind, nor ever there for a Java worker to read. The deletion comes first: where
    conditions are ignored it leaves nothing either. Raises StoreError where they are.
    """
    for ask in probes(client, table).values():
        ask()


def probes(client: "DynamoDBClient", table: str) -> Mapping[str, Callable[[], None]]:
    """The calls of `prove`, by action; each may be made alone."""
    lease = Lease(f"leasehold-probe-{uuid4().hex}")
    row: Mapping[str, Any] = {"TableName": table, "Key": {KEY: text(lease.key)}}
    there = {"ConditionExpression": f"attribute_exists({KEY})"}

    def probe(call: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        with translated(table):
            if not _refused(call, arguments):
                client.delete_item(**row)
                raise StoreError(
                    f"{table}: the service ignores the conditions of writes, so two workers could own one lease; "
                    "leases need a service with conditional writes"
                )

    update = {**row, **there, "UpdateExpression": "REMOVE checkpointOwner"}
    return {
        "DeleteItem": partial(probe, client.delete_item, {**row, **there}),
        "UpdateItem": partial(probe, client.update_item, update),
        "PutItem": partial(probe, client.put_item, {"TableName": table, "Item": to_item(lease), **there}),
    }


def _refused(call: Callable[..., object], arguments: Mapping[str, Any]) -> bool:
    try:
        unless_throttled(call, arguments)
    except ClientError as error:
        if code_of(error) != "ConditionalCheckFailedException":
            raise
        return True
    return False


def _describe(client: "DynamoDBClient", table: str) -> "TableDescriptionTypeDef | None":
    try:
        return client.describe_table(TableName=table)["Table"]
    except ClientError as error:
        if code_of(error) == "ResourceNotFoundException":
            return None
        raise


def _create(client: "DynamoDBClient", table: str) -> None:
    try:
        client.create_table(
            TableName=table,
            KeySchema=[{"AttributeName": KEY, "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": KEY, "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )
    except ClientError as error:
        # Another worker starting at the same moment was first, which is as good.
        if code_of(error) != "ResourceInUseException":
            raise


def _usable(client: "DynamoDBClient", table: str) -> "TableDescriptionTypeDef":
    again = Retrying(
        retry=retry_if_result(lambda found: found is None or found["TableStatus"] == "CREATING"),
        stop=stop_after_delay(WAIT_SECONDS),
        wait=wait_exponential(multiplier=0.02, max=5),
    )
    try:
        return cast("TableDescriptionTypeDef", again(_describe, client, table))
    except RetryError as error:
        raise OutcomeUnknown(f"{table}: not usable after {WAIT_SECONDS} s") from error


def check_key(table: str, found: "TableDescriptionTypeDef") -> None:
    """Raises StoreError if its key is not a lease table's."""
    keys = [(key["AttributeName"], key["KeyType"]) for key in found["KeySchema"]]
    kinds = {kind["AttributeName"]: kind["AttributeType"] for kind in found["AttributeDefinitions"]}
    if keys != [(KEY, "HASH")] or kinds[KEY] != "S":
        shape = ", ".join(f"{name} ({kinds[name]}, {role})" for name, role in keys)
        raise StoreError(f"{table}: its key is {shape}, and a lease table's is {KEY} (S, HASH); name another table")
