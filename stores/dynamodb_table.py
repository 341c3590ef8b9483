"""The DynamoDB table itself: found, or made as the Kinesis Client Library makes it, and waited for."""

from typing import TYPE_CHECKING, cast

from botocore.exceptions import ClientError
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_exponential

from stores.dynamodb_calls import code_of, translated
from stores.dynamodb_rows import KEY
from stores.protocol import OutcomeUnknown, StoreError

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
        _check_key(table, _usable(client, table))


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


def _check_key(table: str, found: "TableDescriptionTypeDef") -> None:
    keys = [(key["AttributeName"], key["KeyType"]) for key in found["KeySchema"]]
    kinds = {kind["AttributeName"]: kind["AttributeType"] for kind in found["AttributeDefinitions"]}
    if keys != [(KEY, "HASH")] or kinds[KEY] != "S":
        shape = ", ".join(f"{name} ({kinds[name]}, {role})" for name, role in keys)
        raise StoreError(f"{table}: its key is {shape}, and a lease table's is {KEY} (S, HASH); name another table")
