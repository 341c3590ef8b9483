"""Finds the lease tables in an account and region of DynamoDB, which it recognizes by their keys."""

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
    """A lease table, or one application's part of one.

    Attributes:
        table: The name of the table.
        prefix: The prefix of the application, or "".
        created: When the table was created, in seconds since 1970.
        protected: Whether deletion protection is enabled; None if the service does not report it.
        recoverable: Whether point-in-time recovery is enabled; None if the service does not report it.
    """

    table: str
    prefix: str
    created: float | None
    protected: bool | None
    recoverable: bool | None


def found(table: str, options: Mapping[str, str]) -> Iterator[FoundTable]:
    """Find lease tables. If many applications share a table, it is scanned, and each prefix is yielded separately.

    Args:
        table: The name of one table, or "" for all.
        options: The options of the URL.

    Raises:
        ValueError: If an option is invalid.
        StoreError: If the service rejects a request.
    """
    prefix, endpoint = options.get("prefix"), endpoint_of(options.get("endpoint"))
    with closing(connect(session_of(options) or Session(), options.get("region"), endpoint)) as clients:
        client = clients.reads
        with translated(table or "dynamodb"):
            pages = client.get_paginator("list_tables").paginate()
            names = [table] if table else [name for page in pages for name in page["TableNames"]]
            for name in names:
                described = client.describe_table(TableName=name)["Table"]
                for application in _prefixes(client, name, described) if prefix is None else (prefix,):
                    created: Any = described.get("CreationDateTime")
                    yield FoundTable(
                        name,
                        application,
                        created and created.timestamp(),
                        described.get("DeletionProtectionEnabled"),
                        recoverable(client, name),
                    )


def recoverable(client: "DynamoDBClient", table: str) -> bool | None:
    """Return whether point-in-time recovery is enabled; None if we may not ask, or the service has no such call."""
    try:
        with translated(table):
            backups = client.describe_continuous_backups(TableName=table)["ContinuousBackupsDescription"]
    except StoreError:
        return None
    return backups.get("PointInTimeRecoveryDescription", {}).get("PointInTimeRecoveryStatus") == "ENABLED"


def _prefixes(client: "DynamoDBClient", table: str, described: "TableDescriptionTypeDef") -> tuple[str, ...]:
    """Return the prefixes in a table: "" if it belongs to one application; none if it is not a lease table."""
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
