"""The lease tables of an account and region of DynamoDB, told by their keys."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from attrs import frozen
from boto3 import Session

from leasehold.errors import StoreError
from leasehold.stores.aws import session_of
from leasehold.stores.dynamodb.rows import APPLICATION
from leasehold.stores.dynamodb.store import check_key, connect, translated
from leasehold.stores.urls import endpoint_of

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodb.type_defs import TableDescriptionTypeDef


@frozen
class FoundTable:
    """A table of leases, or one application's part of one.

    created      seconds since 1970
    protected, recoverable  None where the service does not tell
    """

    table: str
    prefix: str
    created: float | None
    protected: bool | None
    recoverable: bool | None


def found(table: str, options: Mapping[str, str]) -> Iterator[FoundTable]:
    """All of them, or those of one table; of a shared one each prefix, which takes a scan.

    Raises ValueError, StoreError.
    """
    prefix, endpoint = options.get("prefix"), endpoint_of(options.get("endpoint"))
    with closing(connect(session_of(options) or Session(), options.get("region"), endpoint)) as clients:
        client = clients.reads
        with translated(table or "dynamodb"):
            pages = client.get_paginator("list_tables").paginate()
            names = [table] if table else [name for page in pages for name in page["TableNames"]]
            for name in names:
                described = client.describe_table(TableName=name)["Table"]
                for each in _prefixes(client, name, described) if prefix is None else (prefix,):
                    made: Any = described.get("CreationDateTime")
                    yield FoundTable(
                        name,
                        each,
                        made and made.timestamp(),
                        described.get("DeletionProtectionEnabled"),
                        recoverable(client, name),
                    )


def recoverable(client: "DynamoDBClient", table: str) -> bool | None:
    """Whether an earlier moment of the table can be had back; None where that may not, or cannot, be asked."""
    try:
        with translated(table):
            told = client.describe_continuous_backups(TableName=table)["ContinuousBackupsDescription"]
    except StoreError:
        return None
    return told.get("PointInTimeRecoveryDescription", {}).get("PointInTimeRecoveryStatus") == "ENABLED"


def _prefixes(client: "DynamoDBClient", table: str, described: "TableDescriptionTypeDef") -> tuple[str, ...]:
    """No prefix for a table of one application, each of a shared one, and nothing for a table of something else."""
    try:
        check_key(table, described)
    except StoreError:
        if described["KeySchema"][0]["AttributeName"] != APPLICATION:
            return ()
        try:
            check_key(table, described, "any")
        except StoreError:
            return ()
        pages = client.get_paginator("scan").paginate(TableName=table, ProjectionExpression=APPLICATION)
        return tuple(sorted({row[APPLICATION]["S"] for page in pages for row in page["Items"]}))
    return ("",)
