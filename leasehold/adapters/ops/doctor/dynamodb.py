"""Tries the rights of a worker on a lease table in DynamoDB."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from boto3 import Session
from botocore.exceptions import ClientError

from leasehold.adapters.ops.doctor.attempts import (
    REQUEST_SECONDS,
    Absent,
    NotALeaseTable,
    RightAttempt,
    RightsTrial,
    ServiceClock,
)
from leasehold.errors import StoreError
from leasehold.stores.aws import create_boto3_session
from leasehold.stores.dynamodb.cells import Clients
from leasehold.stores.dynamodb.rows import APPLICATION, item_key, string_attribute
from leasehold.stores.dynamodb.store import (
    TIMEOUTS,
    check_conditions_honored,
    check_key,
    condition_probes,
    create_clients,
    error_code,
    parse_prefix,
    translate_errors,
)
from leasehold.stores.urls import check_endpoint

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient


def trial(table: str, options: Mapping[str, str]) -> RightsTrial:
    """Return the trial of the rights on this table. Raises ValueError or StoreError if the options are not valid."""
    timeouts, prefix = TIMEOUTS.within(REQUEST_SECONDS), parse_prefix(options)
    session = create_boto3_session(options) or Session()
    clients = create_clients(session, options.get("region"), check_endpoint(options.get("endpoint")), timeouts)
    clock = ServiceClock()
    for client in (clients.reads, clients.writes):
        client.meta.events.register("after-call.dynamodb", clock.read_date_header)

    def list_rows() -> None:
        with translate_errors(table):
            if prefix:
                clients.reads.query(
                    TableName=table,
                    Limit=1,
                    KeyConditionExpression=f"{APPLICATION} = :application",
                    ExpressionAttributeValues={":application": string_attribute(prefix)},
                )
            else:
                clients.reads.scan(TableName=table, Limit=1)

    def read_rows() -> None:
        absent_key: Any = item_key(f"leasehold-probe-{uuid4().hex}", prefix)
        with translate_errors(table):
            clients.reads.batch_get_item(RequestItems={table: {"Keys": [absent_key], "ConsistentRead": True}})

    return RightsTrial(
        f"DynamoDB table {table}",
        (
            RightAttempt("dynamodb:DescribeTable", partial(_describe_table, clients, table, prefix)),
            RightAttempt("dynamodb:Query" if prefix else "dynamodb:Scan", list_rows),
            RightAttempt("dynamodb:BatchGetItem", read_rows),
            *(
                RightAttempt(f"dynamodb:{action}", send_probe, writes=True)
                for action, send_probe in condition_probes(clients.writes, table, prefix).items()
            ),
        ),
        clock,
        partial(check_conditions_honored, clients.writes, table, prefix),
        clients.close,
    )


def _describe_table(clients: Clients, table: str, prefix: str) -> str:
    try:
        with translate_errors(table):
            table_description = clients.reads.describe_table(TableName=table)["Table"]
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, ClientError) and error_code(cause) == "ResourceNotFoundException":
            message = (
                f"there is no table {table}; a worker creates it if it has the right (dynamodb:CreateTable, not tried)"
            )
            raise Absent(message) from error
        raise
    try:
        check_key(table, table_description, prefix)
    except StoreError as error:
        raise NotALeaseTable(str(error)) from error
    state_names = {True: "on", False: "off", None: "unknown"}
    protection_state, recovery_state = (
        state_names[setting]
        for setting in (table_description.get("DeletionProtectionEnabled"), _has_recovery(clients.reads, table))
    )
    settings = f"deletion protection: {protection_state}, point-in-time recovery: {recovery_state}"
    return f"it responds, and is {table_description['TableStatus']}; {settings}"


def _has_recovery(client: "DynamoDBClient", table: str) -> bool | None:
    """Return whether point-in-time recovery is enabled.

    The result is None if the request fails, for example because we lack the right to make it.
    """
    try:
        with translate_errors(table):
            backups = client.describe_continuous_backups(TableName=table)["ContinuousBackupsDescription"]
    except StoreError:
        return None
    return backups.get("PointInTimeRecoveryDescription", {}).get("PointInTimeRecoveryStatus") == "ENABLED"
