"""Stores the rows of layout `sessions` as DynamoDB items. Each write is one conditional PutItem or DeleteItem.

An item contains the row's name as its key, a unique version, and the fields of the row. The fields are stored as a
readable map, or as compressed JSON if the map would cost another write unit. The attribute `entityType` shows other
programs that the item is not a lease. If there is a prefix, many applications share the table, and the items with this
prefix belong to one of them.
"""

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import frozen
from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.dynamodb.rows import KEY, Item, application_query, item_key, string_attribute
from leasehold.stores.requests import ObjectFields, StoredObject

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

SESSION_ROW_TYPE = "CELL"
"""The `entityType` of the rows of layout `sessions`."""

WRITE_UNIT_BYTES = 1024
"""The number of bytes that one write unit covers."""

PAGE_LEASES = 400
"""The maximum number of leases in a session row.

DynamoDB limits an item to 400 KB, and each lease needs less than 1,000 bytes.
"""

_RETURN_OLD_ROW = {"ReturnValues": "ALL_OLD"}
_READ_ATTEMPTS = 8
_VERSION, _FIELDS, _COMPRESSED = "version", "fields", "small"
_FIELDS_BYTES_MAX = 1 << 22
"""The maximum size of decompressed fields. This store never writes a larger row."""


@frozen
class Clients:
    """Two DynamoDB clients. The one for reads retries, and the one for writes sends each request once. Thread-safe."""

    reads: "DynamoDBClient"
    writes: "DynamoDBClient"

    def close(self) -> None:
        """Close all connections."""
        self.reads.close()
        self.writes.close()


class DynamoCells:
    """The rows of layout `sessions` in one table.

    Args:
        clients: The clients with which to call the service.
        table: The name of the table.
        call: Calls the service, and turns its errors into StoreError or OutcomeUnknown.
        prove: Checks that the service honors the conditions of writes.
        prefix: The prefix of one application, if many applications share the table; otherwise "".
    """

    page_leases = PAGE_LEASES

    def __init__(
        self,
        clients: Clients,
        table: str,
        call: Callable[..., Mapping[str, Any]],
        prove: Callable[[], None],
        prefix: str = "",
    ) -> None:
        self._clients, self._table, self._call, self.prove, self._prefix = clients, table, call, prove, prefix

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:
        """Return the rows with these prefixes, in one scan. Raises StoreError if there are leases in another layout."""
        request: dict[str, Any] = {"TableName": self._table, "ConsistentRead": consistent}
        read_page: Callable[..., Any] = self._clients.reads.scan
        if self._prefix:
            read_page, request = self._clients.reads.query, {**request, **application_query(self._prefix)}
        rows: list[StoredObject] = []
        while True:
            page = self._call(read_page, request)
            rows += [_parse_row(self._table, item) for item in page["Items"]]
            if not (last_key := page.get("LastEvaluatedKey")):
                return tuple(row for row in rows if row.name.startswith(prefixes))
            request["ExclusiveStartKey"] = last_key

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:
        """Return those rows with these names that exist. If `stale_ok` is true, the read costs half as much."""
        keys = [item_key(name, self._prefix) for name in dict.fromkeys(names)]
        get = partial(self._call, self._clients.reads.batch_get_item)
        items = read_items(get, self._table, keys, consistent=not stale_ok, attempts=_READ_ATTEMPTS)
        return {row.name: row for row in (_parse_row(self._table, item) for item in items)}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Create a row by PutItem, unless the row exists."""
        return self._put(name, fields, {"ConditionExpression": f"attribute_not_exists({KEY})"}, None)

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Replace a row by PutItem, if the row still has this version."""
        return self._put(name, fields, _version_condition(version), version)

    def delete(self, name: str, version: str) -> bool:
        """Delete a row by DeleteItem, if the row still has this version."""
        try:
            request = {
                "TableName": self._table,
                "Key": item_key(name, self._prefix),
                **_version_condition(version),
                **_RETURN_OLD_ROW,
            }
            response = self._call(self._clients.writes.delete_item, request, may_be_rejected=True)
        except ClientError:
            return name not in self.read([name])
        self._check_replaced_row(response, name, version)
        return True

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _put(
        self, name: str, fields: ObjectFields, condition: Mapping[str, Any], replaced_version: str | None
    ) -> str | None:
        version = uuid4().hex
        item = {
            **item_key(name, self._prefix),
            "entityType": string_attribute(SESSION_ROW_TYPE),
            _VERSION: string_attribute(version),
            **_encode_fields(name, fields),
        }
        try:
            response = self._call(
                self._clients.writes.put_item,
                {"TableName": self._table, "Item": item, **condition, **_RETURN_OLD_ROW},
                may_be_rejected=True,
            )
        except ClientError:
            return None
        self._check_replaced_row(response, name, replaced_version)
        return version

    def _check_replaced_row(self, response: Mapping[str, Any], name: str, replaced_version: str | None) -> None:
        """Raise OutcomeUnknown unless the response contains the row that was replaced, or no row if the row is new.

        A connection may deliver a response twice. Without this check, the second copy would be taken for the response
        to the next write.
        """
        row = response.get("Attributes") or {}
        expected = (
            {}
            if replaced_version is None
            else {**item_key(name, self._prefix), _VERSION: string_attribute(replaced_version)}
        )
        if {attribute: row.get(attribute) for attribute in expected} != expected or bool(row) != bool(expected):
            raise OutcomeUnknown(f"{self._table}: a response is not about the write of row {name!r}")


def _version_condition(version: str) -> Mapping[str, Any]:
    return {
        "ConditionExpression": "#version = :version",
        "ExpressionAttributeNames": {"#version": _VERSION},
        "ExpressionAttributeValues": {":version": string_attribute(version)},
    }


def item_size_bytes(name: str, fields: ObjectFields) -> int:
    """Return the size of an item in bytes. The service counts the names and values of all attributes."""
    attributes = {
        KEY: string_attribute(name),
        "entityType": string_attribute(SESSION_ROW_TYPE),
        _VERSION: string_attribute("0" * 32),
        **_encode_fields(name, fields),
    }
    return sum(len(attribute) + _value_size_bytes(value) for attribute, value in attributes.items())


def _value_size_bytes(value: Mapping[str, Any]) -> int:
    match value:
        case {"S": str(string)}:
            return len(string.encode())
        case {"B": bytes(raw)}:
            return len(raw)
        case {"M": nested_values}:
            return 3 + sum(1 + len(name) + _value_size_bytes(value) for name, value in nested_values.items())
        case _:
            raise AssertionError(value)


def _encode_fields(name: str, fields: ObjectFields) -> Item:
    plain_fields: Item = {_FIELDS: {"M": {field: string_attribute(value) for field, value in fields.items()}}}
    if (
        _value_size_bytes(plain_fields[_FIELDS]) + len(name) < WRITE_UNIT_BYTES - 100
    ):  # 100 bytes are reserved for the key, the type and the version
        return plain_fields
    return {_COMPRESSED: {"B": zlib.compress(json.dumps(dict(fields), separators=(",", ":")).encode(), 9)}}


def _parse_row(table: str, item: Item) -> StoredObject:
    name = item.get(KEY, {}).get("S", "")
    if item.get("entityType") != string_attribute(SESSION_ROW_TYPE):
        raise StoreError(f"{table}: row {name!r} is not of layout sessions; delete those of one of the layouts")
    fields: dict[str, str] = {}
    try:
        if _COMPRESSED in item:
            raw: Any = item[_COMPRESSED]["B"]
            content = json.loads(zlib.decompressobj().decompress(bytes(raw), _FIELDS_BYTES_MAX))
        else:
            content = {field: value["S"] for field, value in item[_FIELDS]["M"].items()}
        if isinstance(content, dict) and all(isinstance(string, str) for string in content.values()):
            fields = content
    except (KeyError, TypeError, ValueError, zlib.error, AttributeError):
        fields = {}  # the caller then reports a missing field
    return StoredObject(name, item.get(_VERSION, {}).get("S", ""), fields)


BATCH_KEYS_MAX = 100
"""The maximum number of keys in one BatchGetItem request."""


def read_items(
    call_batch_get: Callable[[dict[str, Any]], Mapping[str, Any]],
    table: str,
    keys: Sequence[Item],
    *,
    consistent: bool,
    attempts: int,
) -> list[Item]:
    """Return those items with these keys that exist.

    Args:
        call_batch_get: Calls BatchGetItem, and turns the service's errors into StoreError or OutcomeUnknown.
        table: The name of the table.
        keys: The keys of the items.
        consistent: Whether to read consistently.
        attempts: The maximum number of attempts at reading each batch of keys.

    Raises:
        OutcomeUnknown: If some of the keys have not been read after this number of attempts.
    """
    items: list[Item] = []
    for start in range(0, len(keys), BATCH_KEYS_MAX):
        pending = [*keys[start : start + BATCH_KEYS_MAX]]

        def read_pending(pending: list[Any] = pending) -> bool:
            page = call_batch_get({"RequestItems": {table: {"Keys": pending.copy(), "ConsistentRead": consistent}}})
            rows = page["Responses"].get(table, ())
            is_requested_table = page["Responses"].keys() <= {table} and page.get("UnprocessedKeys", {}).keys() <= {
                table
            }
            if not is_requested_table or any(
                {name: item.get(name) for name in pending[0]} not in pending for item in rows
            ):
                raise OutcomeUnknown(f"{table}: a response is about rows that were not requested")
            items.extend(rows)
            unprocessed = page.get("UnprocessedKeys", {}).get(table)
            pending[:] = unprocessed["Keys"] if unprocessed else ()
            return not pending

        retrying = Retrying(
            retry=retry_if_result(lambda complete: not complete),
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            retry_error_callback=lambda _state: False,
        )
        if not retrying(read_pending):
            raise OutcomeUnknown(f"{table}: the service is too busy to read {len(pending)} of {len(keys)} rows")
    return items
