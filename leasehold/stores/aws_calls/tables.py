"""Makes a boto3 client for DynamoDB send its frequent calls directly. The client's callers need no change."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from botocore import xform_name

from leasehold.stores.aws_calls.calls import DirectCalls
from leasehold.stores.aws_calls.pages import parse_page

if TYPE_CHECKING:  # the stubs are not installed with the package
    from types_boto3_dynamodb import DynamoDBClient

_CONTENT_TYPE = "application/x-amz-json-1.0"
BINARY = (b'"B"', b'"BS"')
"""The names of the binary types, whose values are encoded as strings in JSON.

If a response contains one of these names, boto3 parses the response. Its parser is slower, but the result is correct,
even if the name is only part of a string.
"""
OPERATIONS: Mapping[str, bool] = {
    "BatchGetItem": True,
    "Scan": True,
    "PutItem": False,
    "UpdateItem": False,
    "DeleteItem": False,
}
"""The operations that are called directly, and whether each of them may be repeated. A conditional write must not be
repeated, because if the first attempt was applied, its condition no longer holds, and the second attempt would fail.
"""


def call_directly(client: "DynamoDBClient") -> None:
    """Make this client send the calls in `OPERATIONS` directly."""
    direct_calls, close_client = DirectCalls(client, OPERATIONS), client.close

    def call(operation: str, may_repeat: bool, boto3_call: Any, **arguments: Any) -> Any:  # noqa: ANN401  as boto3
        try:
            body = orjson.dumps(arguments)
        except TypeError:  # JSON cannot represent one of the values
            return boto3_call(**arguments)
        parse = _parse_listing_page if operation == "Scan" else _parse_response
        return direct_calls.call(
            operation,
            body,
            _CONTENT_TYPE,
            parse=parse,
            boto3_call=partial(boto3_call, **arguments),
            repeatable=may_repeat,
        )

    def close_all() -> None:
        direct_calls.close()
        close_client()

    for operation, repeatable in OPERATIONS.items():
        name = xform_name(operation)
        setattr(client, name, partial(call, operation, repeatable, getattr(client, name)))
    client.close = close_all  # type: ignore[method-assign]  # the class is boto3's


def _parse_listing_page(body: bytes | bytearray) -> dict[str, Any] | None:
    page = None if any(type_name in body for type_name in BINARY) else parse_page(bytes(body), orjson.loads)
    return page if page is not None and None not in page.values() else _parse_response(body)


def _parse_response(body: bytes | bytearray) -> dict[str, Any] | None:
    if any(type_name in body for type_name in BINARY):
        return None
    try:
        content = orjson.loads(body)
    except ValueError:
        return None
    return content if isinstance(content, dict) and None not in content.values() else None
