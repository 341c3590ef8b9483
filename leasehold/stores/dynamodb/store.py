"""Leases in a DynamoDB table that Java workers of the Kinesis Client Library 2.x and 3.x may share.

What a refused write means is for the caller: the lease as stored comes with the refusal where
the service sends it, and by a consistent reading where it does not.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from boto3 import Session
from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from leasehold.balancer.model import Lease
from leasehold.stores.dynamodb.calls import (
    ATTEMPTS,
    PATIENCE,
    code_of,
    connect,
    is_missing,
    translated,
    unless_throttled,
)
from leasehold.stores.dynamodb.rows import KEY, Item, text, to_lease, to_reports
from leasehold.stores.dynamodb.table import prepare, prove
from leasehold.stores.dynamodb.writes import Request, request_of
from leasehold.stores.endpoints import endpoint_of
from leasehold.stores.fields import insist
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Done, Listing, Lost, Malformed, Outcome, OutcomeUnknown, Promises, StoreError
from leasehold.stores.writes import CreateLease, DeleteLease, Write

log = escaped(logging.getLogger("leasehold.dynamodb"))

BATCH = 100
"""Most keys of one BatchGetItem."""


class DynamoStore:
    """A table in KCL's layout. leaseCounter is the version and the epoch; may be used by many threads."""

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        create: bool = True,
        session: Session | None = None,
        request_seconds: float | None = None,
    ) -> None:
        """Find the table, or make it; credentials come from the session, or as boto3 finds them."""
        self._table, self._create = table, create
        self._clients = connect(session or Session(), region, endpoint, PATIENCE.within(request_seconds))
        prepare(self._clients.reads, table, create=create)

    @property
    def promises(self) -> Promises:
        """The table keeps every promise."""
        return Promises()

    def list(self) -> Listing:
        """Every lease, page by page; a page that fails fails the listing. A table that is gone is made anew."""
        try:
            return self.scan()
        except StoreError as fault:
            if not (self._create and is_missing(fault)):
                raise
        log.error("table %s was deleted under this process, which makes it anew", self._table)
        prepare(self._clients.reads, self._table, create=True)
        return self.scan()

    def scan(self, part: int = 0, parts: int = 1, owner: str | None = None) -> Listing:
        """The leases of one part of so many, from 0, for parallel readings; only one owner's, if it is named.

        A row in a hand-off counts for both of its owners.
        """
        asked: Any = _part(part, parts, owner)
        with translated(self._table):
            items: list[Item] = [item for page in self._pages(asked) for item in page["Items"]]
            read = [to_lease(item) for item in items]
        leases = sorted((row for row in read if isinstance(row, Lease)), key=lambda lease: lease.key)
        malformed = tuple(row for row in read if isinstance(row, Malformed))
        return Listing(tuple(leases), malformed, to_reports(items))

    def _pages(self, asked: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        # Repeated here: with a short lease the client tries once, and one throttled page must not cost the listing.
        rest: Mapping[str, Any] = {}
        while True:
            page = unless_throttled(self._clients.reads.scan, {"TableName": self._table, **asked, **rest})
            yield page
            if not (last := page.get("LastEvaluatedKey")):
                return
            rest = {"ExclusiveStartKey": last}

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases, in the order asked; those not there are left out. Half the price where `stale_ok`."""
        asked = tuple(keys)
        unique = tuple(dict.fromkeys(asked))
        found: dict[str, Lease] = {}
        for start in range(0, len(unique), BATCH):
            for item in self._read(unique[start : start + BATCH], consistent=not stale_ok):
                if (row := to_lease(item)) is not None:
                    found[row.key] = insist(row)
        return tuple(found[key] for key in asked if key in found)

    def _read(self, keys: Sequence[str], *, consistent: bool) -> Sequence[Item]:
        pending: list[Any] = [{KEY: text(key)} for key in keys]
        items: list[Item] = []

        def read_some() -> bool:
            with translated(self._table):
                page = self._clients.reads.batch_get_item(
                    RequestItems={self._table: {"Keys": pending.copy(), "ConsistentRead": consistent}}
                )
            items.extend(page["Responses"].get(self._table, ()))
            unread = page.get("UnprocessedKeys", {}).get(self._table)
            pending[:] = unread["Keys"] if unread else ()
            return not pending

        again = Retrying(
            retry=retry_if_result(lambda whole: not whole),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            retry_error_callback=lambda _state: False,
        )
        if not again(read_some):
            raise OutcomeUnknown(f"{self._table}: too busy to read {len(pending)} of {len(keys)} leases")
        return items

    def write(self, write: Write) -> Outcome:
        """Put, update or delete one item under the write's condition."""
        key, request = write.lease.key, request_of(write)
        if request is None:
            return self._refused(key)
        match write:
            case CreateLease():
                reply = self._send(self._clients.writes.put_item, request)
            case DeleteLease():
                reply = self._send(self._clients.writes.delete_item, request)
            case _:
                reply = self._send(self._clients.writes.update_item, {**request, "ReturnValues": "ALL_NEW"})
        if isinstance(reply, ClientError):
            return self._lost(key, reply)
        if isinstance(write, DeleteLease):
            return Done(write.lease)
        return self._done(reply.get("Attributes") or request["Item"])

    def prove(self) -> None:
        """Return if the service keeps its conditions; no row is ever there. Raises StoreError."""
        prove(self._clients.writes, self._table)

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _send(self, call: Callable[..., Any], request: Request) -> Mapping[str, Any] | ClientError:
        """The reply, or the refusal of its condition."""
        arguments = {"TableName": self._table, "ReturnValuesOnConditionCheckFailure": "ALL_OLD", **request}
        with translated(self._table):
            try:
                reply: Mapping[str, Any] = unless_throttled(call, arguments)
            except ClientError as error:
                if code_of(error) != "ConditionalCheckFailedException":
                    raise
                return error
        return reply

    def _done(self, item: Item) -> Done:
        return Done(insist(to_lease(item) or Malformed(str(item[KEY]["S"]), "entityType", "is no lease")))

    def _lost(self, key: str, refusal: ClientError) -> Lost:
        """The row that came with the refusal; one that is not there, or did not come, is read."""
        item: Any = refusal.response.get("Item")
        row = to_lease(item) if item else None
        return Lost(key, insist(row)) if row else self._refused(key)

    def _refused(self, key: str) -> Lost:
        return Lost(key, next(iter(self.get([key])), None))


def _part(part: int, parts: int, owner: str | None) -> Mapping[str, Any]:
    """The arguments of a scan of this part, beyond the table."""
    segment = {"Segment": part, "TotalSegments": parts} if parts > 1 else {}
    if owner is None:
        return segment
    condition = "leaseOwner = :owner OR checkpointOwner = :owner"
    return {**segment, "FilterExpression": condition, "ExpressionAttributeValues": {":owner": text(owner)}}


def open_url(place: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None) -> DynamoStore:
    """The store of this table; raises ValueError where the name or an option cannot be one."""
    if not place:
        raise ValueError("store URL: dynamodb:// wants a table's name")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", place):
        raise ValueError(f"store URL: {place!r} is no table's name: 3 to 255 letters, digits, _ . or -")
    region, endpoint = options.get("region"), endpoint_of(options.get("endpoint"))
    return DynamoStore(place, region=region, endpoint=endpoint, create=create, request_seconds=request_seconds)
