"""Rows of layout `sessions` as DynamoDB items: one conditional PutItem or DeleteItem each.

An item is the row's name under the key of lease tables, a version that never comes twice, and the row's fields: a map
that people can read, or JSON made small where it would cost another write unit. `entityType` tells every other program
that it is no lease. Under a prefix the items are one application's part of a table that many share.
"""

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.dynamodb.rows import KEY, Item, key_of, of_application, text
from leasehold.stores.requests import ObjectFields, Stored

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient

CELL = "CELL"
"""The `entityType` of our rows."""

UNIT_BYTES = 1024
"""The bytes that one write unit pays for."""

PAGE_LEASES = 400
"""An item has 400 KB at most, and a lease needs less than 1,000 bytes in it."""

_ATTEMPTS = 8
_VERSION, _FIELDS, _SMALL = "version", "fields", "small"
_MOST = 1 << 22
"""Bytes of fields that any row of ours may have; a row that says it has more is no row of ours."""


class ReadsAndWrites(Protocol):
    """The two clients of a table."""

    @property
    def reads(self) -> "DynamoDBClient":
        """Repeats what was not answered."""

    @property
    def writes(self) -> "DynamoDBClient":
        """Sends once."""

    def close(self) -> None:
        """Close both."""


class DynamoCells:
    """The items of one table.

    ask     a call of the service, its faults turned into ours
    prefix  of one application's part; "" for the whole table
    """

    page_leases = PAGE_LEASES

    def __init__(
        self,
        clients: ReadsAndWrites,
        table: str,
        ask: Callable[..., Mapping[str, Any]],
        proved: Callable[[], None],
        prefix: str = "",
    ) -> None:
        self._clients, self._table, self._ask, self.prove, self._prefix = clients, table, ask, proved, prefix

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:
        """Scan the table once for all kinds of rows. Raises StoreError where the table has leases in another layout."""
        asked: dict[str, Any] = {"TableName": self._table, "ConsistentRead": certain}
        look: Callable[..., Any] = self._clients.reads.scan
        if self._prefix:
            look, asked = self._clients.reads.query, {**asked, **of_application(self._prefix)}
        found: list[Stored] = []
        while True:
            page = self._ask(look, asked)
            found += [_stored(self._table, item) for item in page["Items"]]
            if not (last := page.get("LastEvaluatedKey")):
                return tuple(one for one in found if one.name.startswith(prefixes))
            asked["ExclusiveStartKey"] = last

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:
        """The items of these keys that are there; half the price where `stale_ok`."""
        keys = [key_of(name, self._prefix) for name in dict.fromkeys(names)]
        get = partial(self._ask, self._clients.reads.batch_get_item)
        items = items_of(get, self._table, keys, consistent=not stale_ok, attempts=_ATTEMPTS)
        return {one.name: one for one in (_stored(self._table, item) for item in items)}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """PutItem where there is no such item."""
        return self._put(name, fields, {"ConditionExpression": f"attribute_not_exists({KEY})"})

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """PutItem over the item of this version."""
        return self._put(name, fields, _is(version))

    def delete(self, name: str, version: str) -> bool:
        """DeleteItem of this version."""
        try:
            asked = {"TableName": self._table, "Key": key_of(name, self._prefix), **_is(version)}
            self._ask(self._clients.writes.delete_item, asked, refusable=True)
        except ClientError:
            return name not in self.read([name])
        return True

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _put(self, name: str, fields: ObjectFields, condition: Mapping[str, Any]) -> str | None:
        version = uuid4().hex
        item = {
            **key_of(name, self._prefix),
            "entityType": text(CELL),
            _VERSION: text(version),
            **_written(name, fields),
        }
        try:
            self._ask(
                self._clients.writes.put_item,
                {"TableName": self._table, "Item": item, **condition},
                refusable=True,
            )
        except ClientError:
            return None
        return version


def _is(version: str) -> Mapping[str, Any]:
    return {
        "ConditionExpression": "#version = :version",
        "ExpressionAttributeNames": {"#version": _VERSION},
        "ExpressionAttributeValues": {":version": text(version)},
    }


def written_bytes(name: str, fields: ObjectFields) -> int:
    """Bytes of the item, as the service counts them: of the names and the values of its attributes."""
    ours = {KEY: text(name), "entityType": text(CELL), _VERSION: text("0" * 32), **_written(name, fields)}
    return sum(len(attribute) + _size(value) for attribute, value in ours.items())


def _size(value: Mapping[str, Any]) -> int:
    match value:
        case {"S": str(said)}:
            return len(said.encode())
        case {"B": bytes(raw)}:
            return len(raw)
        case {"M": inner}:
            return 3 + sum(1 + len(name) + _size(each) for name, each in inner.items())
        case _:
            raise AssertionError(value)


def _written(name: str, fields: ObjectFields) -> Item:
    plain: Item = {_FIELDS: {"M": {field: text(word) for field, word in fields.items()}}}
    if _size(plain[_FIELDS]) + len(name) < UNIT_BYTES - 100:  # beside key, type and version
        return plain
    return {_SMALL: {"B": zlib.compress(json.dumps(dict(fields), separators=(",", ":")).encode(), 9)}}


def _stored(table: str, item: Item) -> Stored:
    name = item.get(KEY, {}).get("S", "")
    if item.get("entityType") != text(CELL):
        raise StoreError(f"{table}: row {name!r} is not of layout sessions; delete those of one of the layouts")
    fields: dict[str, str] = {}
    try:
        if _SMALL in item:
            raw: Any = item[_SMALL]["B"]
            found = json.loads(zlib.decompressobj().decompress(bytes(raw), _MOST))
        else:
            found = {field: value["S"] for field, value in item[_FIELDS]["M"].items()}
        if isinstance(found, dict) and all(isinstance(word, str) for word in found.values()):
            fields = found
    except (KeyError, TypeError, ValueError, zlib.error, AttributeError):
        fields = {}  # the row's own reader says which field is missing
    return Stored(name, item.get(_VERSION, {}).get("S", ""), fields)


BATCH = 100
"""The most keys that one BatchGetItem takes."""


def items_of(
    get: Callable[[dict[str, Any]], Mapping[str, Any]],
    table: str,
    keys: Sequence[Item],
    *,
    consistent: bool,
    attempts: int,
) -> list[Item]:
    """The rows of these keys that are there. Raises OutcomeUnknown where the service leaves some out again and again.

    get       asks BatchGetItem, and makes faults of the service ours
    attempts  for each hundred of keys
    """
    items: list[Item] = []
    for start in range(0, len(keys), BATCH):
        pending = [*keys[start : start + BATCH]]

        def read_some(pending: list[Any] = pending) -> bool:
            page = get({"RequestItems": {table: {"Keys": pending.copy(), "ConsistentRead": consistent}}})
            found = page["Responses"].get(table, ())
            ours = page["Responses"].keys() <= {table} and page.get("UnprocessedKeys", {}).keys() <= {table}
            if not ours or any({name: item.get(name) for name in pending[0]} not in pending for item in found):
                raise OutcomeUnknown(f"{table}: an answer is about rows that were not asked for")
            items.extend(found)
            unread = page.get("UnprocessedKeys", {}).get(table)
            pending[:] = unread["Keys"] if unread else ()
            return not pending

        again = Retrying(
            retry=retry_if_result(lambda whole: not whole),
            stop=stop_after_attempt(attempts),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            retry_error_callback=lambda _state: False,
        )
        if not again(read_some):
            raise OutcomeUnknown(f"{table}: too busy to read {len(pending)} of {len(keys)} rows")
    return items
