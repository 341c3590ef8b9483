"""The rows of a scan, taken apart by orjson in boto3's place: boto3 spends seven times as long on each.

Whatever else an answer says, and every answer with a binary value, which JSON tells as text, stays boto3's.
"""

from typing import TYPE_CHECKING, Any

try:
    import orjson
except ImportError:  # then boto3 takes answers apart by itself
    orjson = None  # type: ignore[assignment]  # the slow way

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

_REFUSED = 300  # and all above
_BINARY = (b'"B"', b'"BS"')
"""The letters of types whose values are not what JSON says; where text holds them, boto3 is only slower."""


def read_listings_quickly(client: "DynamoDBClient") -> None:
    """Have this client take scans apart by orjson, where that is installed."""
    if orjson is not None:
        client.meta.events.register("before-parse.dynamodb.Scan", _read)


def _read(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_event: object) -> None:
    body: bytes = response_dict["body"]
    if response_dict["status_code"] >= _REFUSED or any(letter in body for letter in _BINARY):
        return
    try:
        page = orjson.loads(body)
        items = page.pop("Items", None) if isinstance(page, dict) else None
        rest = orjson.dumps(page)
    except (ValueError, TypeError):  # the second of what is nested too deeply
        return  # boto3 says what is wrong with it
    if isinstance(items, list):
        customized_response_dict["Items"] = items
        response_dict["body"] = rest
