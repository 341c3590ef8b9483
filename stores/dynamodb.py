"""Leases in a DynamoDB table that Java workers of the Kinesis Client Library 2.x and 3.x may share.

What a refused write means is for the caller: the lease as stored comes with the refusal where
the service sends it, and by a consistent reading where it does not.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import evolve
from boto3 import Session
from botocore.exceptions import ClientError
from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_random_exponential

from balancer.model import Lease, Notes, Position
from stores import dynamodb_writes as to
from stores.dynamodb_calls import ATTEMPTS, code_of, connect, translated, unless_throttled
from stores.dynamodb_rows import KEY, Item, text, to_lease, to_reports
from stores.dynamodb_table import prepare
from stores.dynamodb_writes import Request
from stores.fields import insist
from stores.protocol import Done, Listing, Lost, Malformed, Outcome, OutcomeUnknown, Promises

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
    ) -> None:
        """Find the table, or make it; credentials come from the session, or as boto3 finds them."""
        self._table = table
        self._clients = connect(session or Session(), region, endpoint)
        prepare(self._clients.reads, table, create=create)

    @property
    def promises(self) -> Promises:
        """Everything."""
        return Promises()

    def list(self) -> Listing:
        """Every lease, page by page; a page that fails fails the listing."""
        return self.scan()

    def scan(self, part: int = 0, parts: int = 1, owner: str | None = None) -> Listing:
        """One part of so many, from 0, that may be read at the same time; the rows of one owner, if it is named.

        A row in a hand-off counts for both of its owners.
        """
        asked: Any = _part(part, parts, owner)
        pages = self._clients.reads.get_paginator("scan").paginate(TableName=self._table, **asked)
        with translated(self._table):
            items: list[Item] = [item for page in pages for item in page["Items"]]
        read = [to_lease(item) for item in items]
        leases = sorted((row for row in read if isinstance(row, Lease)), key=lambda lease: lease.key)
        malformed = tuple(row for row in read if isinstance(row, Malformed))
        return Listing(tuple(leases), malformed, to_reports(items))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, in the order asked; those not there are left out. Half the price where `stale_ok`."""
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

    def create(self, lease: Lease) -> Outcome:
        """Condition: the key does not exist."""
        request = to.create(lease)
        reply = self._send(self._clients.writes.put_item, request)
        return self._lost(lease.key, reply) if isinstance(reply, ClientError) else self._done(request["Item"])

    def claim(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the version as seen."""
        return self._update(lease, to.claim(lease, me, notes))

    def steal(self, lease: Lease, me: str, notes: Notes = ()) -> Outcome:
        """Condition: the owner as seen, and the heir still me if the lease as seen says so."""
        return self._update(lease, to.steal(lease, me, notes))

    def renew(self, lease: Lease, notes: Notes = ()) -> Outcome:
        """Condition: version and owner as seen, and not ended since."""
        return self._update(lease, to.renew(lease, notes))

    def checkpoint(
        self, lease: Lease, position: Position, *, children: tuple[str, ...] = (), keep_owner: bool = False
    ) -> Outcome:
        """Condition: version and owner as seen, forward, not ended."""
        return self._update(lease, to.checkpoint(lease, position, children, keep_owner=keep_owner))

    def checkpoint_late(self, lease: Lease, position: Position) -> Outcome:
        """Condition: forward, not ended."""
        if not (position.numbered or position.ended):
            return self._refused(lease.key)  # nothing comes before a start
        return self._update(lease, to.checkpoint_late(lease, position))

    def release(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner is me; of a foreign expired lease, the version as seen."""
        return self._update(lease, to.release(lease, me))

    def request_handoff(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner as seen, willing, and no other living request."""
        if lease.owner is None:
            return self._refused(lease.key)
        return self._update(lease, to.request_handoff(lease, lease.owner, me))

    def give(self, lease: Lease, position: Position) -> Outcome:
        """Condition: version, owner and heir as seen, forward."""
        if lease.owner is None or lease.heir is None:
            return self._refused(lease.key)
        return self._update(lease, to.give(lease, lease.owner, lease.heir, position))

    def accept(self, lease: Lease, me: str) -> Outcome:
        """Condition: owner me and the version as seen."""
        return self._update(lease, to.accept(evolve(lease, owner=me), me))

    def take_back(self, lease: Lease, me: str) -> Outcome:
        """Condition: owner and version as given."""
        return self._update(lease, to.take_back(lease, me))

    def withdraw(self, lease: Lease, me: str) -> Outcome:
        """Condition: the owner as seen and heir me."""
        if lease.owner is None or lease.leaving:
            return self._refused(lease.key)
        return self._update(lease, to.withdraw(lease, lease.owner, me))

    def annotate(self, lease: Lease, name: str, value: str, unless: frozenset[str] = frozenset()) -> Outcome:
        """Condition: the owner as seen, and the stored value is none of `unless`."""
        return self._update(lease, to.annotate(lease, name, value, unless))

    def delete(self, lease: Lease, me: str) -> Outcome:  # noqa: ARG002  the condition says enough
        """Condition: still ended where it was seen ended, else the version as seen; gone is done."""
        reply = self._send(self._clients.writes.delete_item, to.delete(lease))
        return self._lost(lease.key, reply) if isinstance(reply, ClientError) else Done(lease)

    def close(self) -> None:
        """Let connections go."""
        self._clients.reads.close()
        self._clients.writes.close()

    def _update(self, lease: Lease, request: Request) -> Outcome:
        reply = self._send(self._clients.writes.update_item, {**request, "ReturnValues": "ALL_NEW"})
        return self._lost(lease.key, reply) if isinstance(reply, ClientError) else self._done(reply["Attributes"])

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
    """What a scan of this part asks for beyond the table."""
    segment = {"Segment": part, "TotalSegments": parts} if parts > 1 else {}
    if owner is None:
        return segment
    condition = "leaseOwner = :owner OR checkpointOwner = :owner"
    return {**segment, "FilterExpression": condition, "ExpressionAttributeValues": {":owner": text(owner)}}


def open_url(place: str, options: Mapping[str, str], *, create: bool) -> DynamoStore:
    """The store of this table; raises ValueError where the name or an option cannot be one."""
    if not place:
        raise ValueError("store URL: dynamodb:// wants a table's name")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", place):
        raise ValueError(f"store URL: {place!r} is no table's name: 3 to 255 letters, digits, _ . or -")
    endpoint = options.get("endpoint")
    if endpoint is not None and not re.match(r"https?://[^/]+", endpoint):
        raise ValueError("store URL: option 'endpoint' wants http://host:port or https://host")
    return DynamoStore(place, region=options.get("region"), endpoint=endpoint, create=create)
