"""The rights of a worker on a lease table in DynamoDB."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from uuid import uuid4

from boto3 import Session
from botocore.exceptions import ClientError

from leasehold.adapters.steering.doctor.attempts import (
    REQUEST_SECONDS,
    NotOurs,
    NotThere,
    RightAttempt,
    RightsTrial,
    ServiceClock,
)
from leasehold.stores.aws import session_of
from leasehold.stores.dynamodb.rows import KEY, text
from leasehold.stores.dynamodb.store import PATIENCE, Clients, check_key, code_of, connect, probes, prove, translated
from leasehold.stores.protocol import StoreError
from leasehold.stores.urls import endpoint_of


def trial(table: str, options: Mapping[str, str]) -> RightsTrial:
    """The rights on this table. Raises ValueError, StoreError."""
    patience = PATIENCE.within(REQUEST_SECONDS)
    session = session_of(options) or Session()
    clients = connect(session, options.get("region"), endpoint_of(options.get("endpoint")), patience)
    clock = ServiceClock()
    for client in (clients.reads, clients.writes):
        client.meta.events.register("after-call.dynamodb", clock.heard)

    def scanned() -> None:
        with translated(table):
            clients.reads.scan(TableName=table, Limit=1)

    def read() -> None:
        absent: Any = {KEY: text(f"leasehold-probe-{uuid4().hex}")}
        with translated(table):
            clients.reads.batch_get_item(RequestItems={table: {"Keys": [absent], "ConsistentRead": True}})

    return RightsTrial(
        f"DynamoDB table {table}",
        (
            RightAttempt("dynamodb:DescribeTable", partial(_described, clients, table)),
            RightAttempt("dynamodb:Scan", scanned),
            RightAttempt("dynamodb:BatchGetItem", read),
            *(
                RightAttempt(f"dynamodb:{action}", ask, writes=True)
                for action, ask in probes(clients.writes, table).items()
            ),
        ),
        clock,
        partial(prove, clients.writes, table),
        clients.close,
    )


def _described(clients: Clients, table: str) -> str:
    try:
        with translated(table):
            found = clients.reads.describe_table(TableName=table)["Table"]
    except StoreError as error:
        cause = error.__cause__
        if isinstance(cause, ClientError) and code_of(cause) == "ResourceNotFoundException":
            said = f"there is no table {table} here; a worker makes it if it may (dynamodb:CreateTable, not tried)"
            raise NotThere(said) from error
        raise
    try:
        check_key(table, found)
    except StoreError as error:
        raise NotOurs(str(error)) from error
    return f"it answers, and is {found['TableStatus']}"
