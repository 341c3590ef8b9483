"""Calls of a table of DynamoDB past boto3, by a change to its client, whose callers need not know."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from botocore import xform_name

from leasehold.stores.aws_calls.calls import DirectCalls
from leasehold.stores.aws_calls.pages import page_of

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_dynamodb import DynamoDBClient

_FORM = "application/x-amz-json-1.0"
BINARY = (b'"B"', b'"BS"')
"""The letters of types whose values are not what JSON says; where text holds them, boto3 is only slower."""
OPERATIONS: Mapping[str, bool] = {
    "BatchGetItem": True,
    "Scan": True,
    "PutItem": False,
    "UpdateItem": False,
    "DeleteItem": False,
}
"""The operations sent past boto3, and whether each may be repeated: a condition meets what its first attempt wrote."""


def call_directly(client: "DynamoDBClient") -> None:
    """Have this client make these calls directly."""
    calls, close = DirectCalls(client, OPERATIONS), client.close

    def ask(operation: str, again: bool, by_boto: Any, **question: Any) -> Any:  # noqa: ANN401  as boto3
        try:
            body = orjson.dumps(question)
        except TypeError:  # a value that JSON has not
            return by_boto(**question)
        read = _page if operation == "Scan" else _told
        return calls.call(operation, body, _FORM, read=read, by_boto=partial(by_boto, **question), again=again)

    def close_all() -> None:
        calls.close()
        close()

    for operation, again in OPERATIONS.items():
        name = xform_name(operation)
        setattr(client, name, partial(ask, operation, again, getattr(client, name)))
    client.close = close_all  # type: ignore[method-assign]  # the class is boto3's


def _page(body: bytes | bytearray) -> dict[str, Any] | None:
    page = None if any(letters in body for letters in BINARY) else page_of(bytes(body), orjson.loads)
    return page if page is not None and None not in page.values() else _told(body)


def _told(body: bytes | bytearray) -> dict[str, Any] | None:
    if any(letters in body for letters in BINARY):
        return None
    try:
        told = orjson.loads(body)
    except ValueError:
        return None
    return told if isinstance(told, dict) and None not in told.values() else None
