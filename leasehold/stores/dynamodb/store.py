"""Leases in a DynamoDB table that Java workers of the Kinesis Client Library 2.x and 3.x may share.

What a refused write means is for the caller: the lease as stored comes with the refusal where
the service sends it, and by a consistent reading where it does not.

`prepare`, `prove` and `probes`: the DynamoDB table itself, found, or made as the Kinesis Client Library makes it,
waited for, and tried. `connect` and `translated`: two clients, and the meaning of each kind of failure.

Rule 1: a conditional write is sent once. A client that repeats one whose reply was lost meets its
own first attempt as a conflict, and reports as taken by a stranger what it has just taken itself.
So a lost reply is an unknown outcome, and the caller's next consistent reading tells.
Rule 2: what was refused for want of throughput has certainly not been applied, and is sent again.
Rule 3: readings may be repeated, and are, by botocore's own standard mode.

`read_listings_quickly`: the rows of a scan, taken apart by orjson in boto3's place, which spends seven times as long on
each. Whatever else an answer says, and every answer with a binary value, which JSON tells as text, stays boto3's.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from uuid import uuid4

from attrs import evolve, frozen
from boto3 import Session
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
)
from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception,
    retry_if_result,
    stop_after_attempt,
    stop_after_delay,
    wait_exponential,
    wait_random_exponential,
)

from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.aws import CREDENTIALS_FROM, ODD_ANSWER, region_hint, session_of
from leasehold.stores.aws_calls.pages import RowTexts, page_of
from leasehold.stores.deadlines import bound_client
from leasehold.stores.dynamodb.cells import CELL, DynamoCells, items_of
from leasehold.stores.dynamodb.rows import (
    APPLICATION,
    KEY,
    AttributeValue,
    Item,
    RowDecoder,
    key_of,
    of_application,
    text,
    to_item,
    to_lease,
    to_reports,
)
from leasehold.stores.dynamodb.writes import Request, check_answer, request_of
from leasehold.stores.fields import insist
from leasehold.stores.printable import escaped, said
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Malformed, Outcome, Patience
from leasehold.stores.urls import endpoint_of, without_credentials
from leasehold.stores.writes import CreateLease, DeleteLease, Write

try:
    import orjson

    from leasehold.stores.aws_calls.tables import BINARY, call_directly
except ImportError:  # then boto3 makes all calls, and takes answers apart by itself
    orjson = None  # type: ignore[assignment]  # the slow way

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodb.type_defs import TableDescriptionTypeDef

_REFUSED = 300  # and all above


def read_listings_quickly(client: "DynamoDBClient") -> None:
    """Have this client take listings apart by orjson, where that is installed."""
    if orjson is not None:
        for operation in ("Scan", "Query"):
            client.meta.events.register(f"before-parse.dynamodb.{operation}", _read)


def _read(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_event: object) -> None:
    body: bytes = response_dict["body"]
    if response_dict["status_code"] >= _REFUSED or any(letters in body for letters in BINARY):
        return
    try:
        page = page_of(body, orjson.loads) or orjson.loads(body)
        items = page.pop("Items", None) if isinstance(page, dict) else None
        rest = orjson.dumps(page)
    except (ValueError, TypeError):  # the second of what is nested too deeply
        return  # boto3 says what is wrong with it
    if isinstance(items, list | RowTexts):
        customized_response_dict["Items"] = items
        response_dict["body"] = rest


T = TypeVar("T")

ATTEMPTS = 3
PATIENCE = Patience(connect_seconds=2, read_seconds=5, attempts=ATTEMPTS)
"""Short enough for several tries within one lease, long enough for a page of a scan (1 MB)."""
SEGMENT_ROWS, SEGMENTS_MOST = 10_000, 4
"""A listing is read in parts of at least so many rows, some five pages, and in no more parts at a time."""

THROTTLED = frozenset(
    {"ProvisionedThroughputExceededException", "ThrottlingException", "Throttling", "RequestLimitExceeded"}
)

ADVICE = {
    "ResourceNotFoundException": "there is no such table here; check its name, the region and the endpoint",
    "AccessDeniedException": (
        "these credentials may not do this (dynamodb:{asked}); a worker needs DescribeTable, Scan, BatchGetItem, "
        "PutItem, UpdateItem and DeleteItem, and CreateTable to make the table; tools that only read need the first two"
    ),
    "UnrecognizedClientException": "the credentials are not known to this endpoint; check them and the region",
    "InvalidSignatureException": "the secret key does not fit the access key, or the clock is wrong",
    "MissingAuthenticationTokenException": "no credentials were sent; set them in the environment",
    "IncompleteSignatureException": "the credentials are not whole; check them in the environment",
    "ExpiredTokenException": "the session token has expired; fetch new credentials",
}


@frozen
class Clients:
    """The clients, one for readings and another for writes; many threads may use both."""

    reads: "DynamoDBClient"
    writes: "DynamoDBClient"

    def close(self) -> None:
        """Close all connections."""
        self.reads.close()
        self.writes.close()


def connect(
    session: Session, region: str | None, endpoint: str | None, patience: Patience = PATIENCE, *, directly: bool = True
) -> Clients:
    """Clients of this region or endpoint, `directly` past boto3. Raises StoreError where no region is set anywhere."""

    def client(patience: Patience) -> "DynamoDBClient":
        config = Config(
            retries={"mode": "standard", "total_max_attempts": patience.attempts},
            connect_timeout=patience.connect_seconds,
            read_timeout=patience.read_seconds,
            max_pool_connections=64,
        )
        made = session.client("dynamodb", region_name=region, endpoint_url=endpoint, config=config)
        without_credentials(made.meta.endpoint_url)
        bound_client(made)
        if directly and orjson is not None:
            call_directly(made)
        return made

    with translated("dynamodb"):
        clients = Clients(reads=client(patience), writes=client(evolve(patience, attempts=1)))
    read_listings_quickly(clients.reads)
    return clients


@contextmanager
def translated(table: str) -> Iterator[None]:
    """Turns what boto3 raises into StoreError, where asking again cannot help, or OutcomeUnknown."""
    try:
        yield
    except ClientError as error:
        code, message = code_of(error), error.response.get("Error", {}).get("Message", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in THROTTLED or status >= 500:  # noqa: PLR2004  the service's own failures begin there
            raise OutcomeUnknown(f"{table}: {code}: {message}") from error
        advice = ADVICE[code].format(asked=error.operation_name) if code in ADVICE else message
        raise StoreError(f"{table}: {code}: {advice}") from error
    except NoRegionError as error:
        raise StoreError(f"{table}: no region is set; add ?region=… to the URL, or set AWS_REGION") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(f"{table}: no credentials of AWS: {CREDENTIALS_FROM}") from error
    except ParamValidationError as error:
        raise StoreError(f"{table}: {error}") from error
    except BotoCoreError as error:
        raise OutcomeUnknown(f"{table}: {error}{region_hint(error)}") from error
    except ODD_ANSWER as odd:
        raise OutcomeUnknown(f"{table}: an answer cannot be read: {said(odd)}") from odd


def code_of(error: ClientError) -> str:
    """The service's name for what went wrong."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_missing(fault: StoreError) -> bool:
    """Whether the service says that there is no such table."""
    return isinstance(fault.__cause__, ClientError) and code_of(fault.__cause__) == "ResourceNotFoundException"


def unless_throttled(call: Callable[..., T], arguments: Mapping[str, Any]) -> T:
    """Make this call, again after a pause where it was refused for want of throughput (rule 2)."""
    again = Retrying(
        retry=retry_if_exception(lambda error: isinstance(error, ClientError) and code_of(error) in THROTTLED),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.05, max=1),
        reraise=True,
    )
    return again(call, **arguments)


WAIT_SECONDS = 600
"""How long a table may take to become usable; the Kinesis Client Library waits as long."""


def prepare(client: "DynamoDBClient", table: str, *, create: bool, prefix: str = "", protect: bool = False) -> None:
    """Make sure the table is there, has our key, and can be used.

    With `protect`, one that is made is kept from deletion, and each of its moments of 35 days can be had back.

    Raises StoreError where it is missing and may not be made, or is some other program's.
    """
    made = False
    kept: dict[str, Any] = {"DeletionProtectionEnabled": True} if protect else {}
    with translated(table):
        if _describe(client, table) is None:
            if not create:
                wanted = f"{APPLICATION} (string) and the sort key {KEY} (string)" if prefix else f"{KEY} (string)"
                raise StoreError(
                    f"{table}: there is no such table, and it is not created here; is the name right, and the region? "
                    f"(A worker creates it, unless told not to; its partition key is {wanted}.)"
                )
            names = tuple(key_of("", prefix))
            roles: Sequence[Literal["HASH", "RANGE"]] = ("HASH", "RANGE")
            try:
                client.create_table(
                    TableName=table,
                    KeySchema=[
                        {"AttributeName": name, "KeyType": role} for name, role in zip(names, roles, strict=False)
                    ],
                    AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in names],
                    BillingMode="PAY_PER_REQUEST",
                    **kept,
                )
                made = True
            except ClientError as error:
                # Another worker starting at the same moment was first, which is as good.
                if code_of(error) != "ResourceInUseException":
                    raise
        again = Retrying(
            retry=retry_if_result(lambda found: found is None or found["TableStatus"] == "CREATING"),
            stop=stop_after_delay(WAIT_SECONDS),
            wait=wait_exponential(multiplier=0.02, max=5),
        )
        try:
            check_key(table, cast("TableDescriptionTypeDef", again(_describe, client, table)), prefix)
        except RetryError as error:
            raise OutcomeUnknown(f"{table}: not usable after {WAIT_SECONDS} s") from error
        if made and protect:
            client.update_continuous_backups(
                TableName=table, PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True}
            )


def prove(client: "DynamoDBClient", table: str, prefix: str = "") -> None:
    """Return if the service keeps conditions: each wants a row of this name, which does not exist.

    So nothing is left behind, nor ever there for a Java worker to read. The deletion comes first: where
    conditions are ignored it leaves nothing either. Raises StoreError where they are.
    """
    for ask in probes(client, table, prefix).values():
        ask()


def probes(client: "DynamoDBClient", table: str, prefix: str = "") -> Mapping[str, Callable[[], None]]:
    """The calls of `prove`, by action; each may be made alone."""
    lease = Lease(f"leasehold-probe-{uuid4().hex}")
    key = key_of(lease.key, prefix)
    row: Mapping[str, Any] = {"TableName": table, "Key": key}
    there = {"ConditionExpression": f"attribute_exists({KEY})"}

    def probe(call: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        with translated(table):
            try:
                unless_throttled(call, arguments)
            except ClientError as error:
                if code_of(error) != "ConditionalCheckFailedException":
                    raise
                return  # refused, as it should be
            client.delete_item(**row)
            raise StoreError(
                f"{table}: the service ignores the conditions of writes, so two workers could own one lease; "
                "leases need a service with conditional writes"
            )

    update = {**row, **there, "UpdateExpression": "REMOVE checkpointOwner"}
    return {
        "DeleteItem": partial(probe, client.delete_item, {**row, **there}),
        "UpdateItem": partial(probe, client.update_item, update),
        "PutItem": partial(probe, client.put_item, {"TableName": table, "Item": {**to_item(lease), **key}, **there}),
    }


def _describe(client: "DynamoDBClient", table: str) -> "TableDescriptionTypeDef | None":
    try:
        found = client.describe_table(TableName=table)["Table"]
    except ClientError as error:
        if code_of(error) == "ResourceNotFoundException":
            return None
        raise
    if found["TableName"] != table.rpartition("/")[2]:
        raise LookupError(f"it is about table {found['TableName']!r}")
    return found


def check_key(table: str, found: "TableDescriptionTypeDef", prefix: str = "") -> None:
    """Raises StoreError if its key is not that of a lease table, or of leases under a prefix."""
    keys = [(key["AttributeName"], key["KeyType"]) for key in found["KeySchema"]]
    kinds = {kind["AttributeName"]: kind["AttributeType"] for kind in found["AttributeDefinitions"]}
    alone, shared = [(KEY, "HASH")], [(APPLICATION, "HASH"), (KEY, "RANGE")]
    if keys in (alone, shared) and all(kinds[name] == "S" for name, _ in keys):
        if keys == alone and prefix:
            raise StoreError(
                f"{table}: it is the table of one application, which Java workers may share; leases under a prefix "
                f"want a table whose key is {APPLICATION} (S, HASH), {KEY} (S, RANGE): name another one"
            )
        if keys == shared and not prefix:
            raise StoreError(f"{table}: many applications share it, each under a prefix; add ?prefix=… to the URL")
        return
    shape = ", ".join(f"{name} ({kinds[name]}, {role})" for name, role in keys)
    raise StoreError(f"{table}: its key is {shape}, and a lease table's is {KEY} (S, HASH); name another table")


log = escaped(logging.getLogger("leasehold.dynamodb"))


def pages_of(look: Callable[..., Any], questions: Sequence[dict[str, Any]]) -> Iterator[Sequence[Item]]:
    """The pages that these questions bring, one after the other, while those of several are fetched side by side."""

    def fetched(asked: dict[str, Any]) -> tuple[Sequence[Item], dict[str, Any] | None]:
        # Repeated here: with a short lease the client tries once, and one throttled page must not cost the listing.
        page = unless_throttled(look, asked)
        last = page.get("LastEvaluatedKey")
        return page["Items"], {**asked, "ExclusiveStartKey": last} if last else None

    # Items take ten times the room of their leases, so that no more than a page of each question waits here.
    if len(questions) == 1:
        more: dict[str, Any] | None = questions[0]
        while more is not None:
            items, more = fetched(more)
            yield items
        return
    with ThreadPoolExecutor(len(questions), thread_name_prefix="leasehold-listing") as pool:
        waited = {pool.submit(fetched, asked) for asked in questions}
        while waited:
            done, waited = wait(waited, return_when=FIRST_COMPLETED)
            for each in done:
                items, more = each.result()
                if more is not None:
                    waited.add(pool.submit(fetched, more))
                yield items


class DynamoStore:
    """A table in KCL's layout. leaseCounter is the version and the epoch; may be used by many threads.

    Under a prefix it is the part of one application of a table that many share, and nothing of the others is read.
    """

    def __init__(
        self,
        table: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        create: bool = True,
        session: Session | None = None,
        request_seconds: float | None = None,
        prefix: str = "",
        protect: bool = False,
        directly: bool = True,
    ) -> None:
        """Find the table, or make it; credentials come from the session, or as boto3 finds them.

        directly  whether calls go past boto3 where they can
        """
        self._table, self._create, self._prefix, self._protect = table, create, prefix, protect
        self._rows, self._listed = RowDecoder(prefix), 0
        self._clients = connect(
            session or Session(), region, endpoint, PATIENCE.within(request_seconds), directly=directly
        )
        prepare(self._clients.reads, table, create=create, prefix=prefix, protect=protect)

    @property
    def capabilities(self) -> Capabilities:
        """The table keeps every promise."""
        return Capabilities()

    def list(self) -> Listing:
        """Every lease, page by page; a page that fails fails the listing. A deleted table is created again."""
        try:
            return self.scan()
        except StoreError as fault:
            if not (self._create and is_missing(fault)):
                raise
        log.error("table %s was deleted under this process, which makes it anew", self._table)
        prepare(self._clients.reads, self._table, create=True, prefix=self._prefix, protect=self._protect)
        return self.scan()

    def scan(self, part: int = 0, parts: int = 1, owner: str | None = None) -> Listing:
        """The leases of one part of so many, from 0, for parallel readings; only one owner's, if it is named.

        A row in a hand-off counts for both of its owners. Under a prefix the first part is all of it.
        """
        asked: dict[str, Any] = {"TableName": self._table}
        values: dict[str, AttributeValue] = {}
        look: Callable[..., Any] = self._clients.reads.scan
        if self._prefix:
            if part:
                return Listing(())
            look, values = self._clients.reads.query, {":application": text(self._prefix)}
            asked["KeyConditionExpression"] = f"{APPLICATION} = :application"
        elif parts > 1:
            asked |= {"Segment": part, "TotalSegments": parts}
        whole = parts == 1 and owner is None
        if owner is not None:
            asked["FilterExpression"] = "leaseOwner = :owner OR checkpointOwner = :owner"
            values[":owner"] = text(owner)
        if values:
            asked["ExpressionAttributeValues"] = values

        questions = [asked]
        if whole and not self._prefix and (at_a_time := min(SEGMENTS_MOST, self._listed // SEGMENT_ROWS)) > 1:
            questions = [{**asked, "Segment": each, "TotalSegments": at_a_time} for each in range(at_a_time)]
        with translated(self._table):
            read = (self._rows if whole else RowDecoder(self._prefix)).read(pages_of(look, questions))
        if whole:
            self._listed = len(read.leases)
        if any(item["entityType"] == text(CELL) for item in read.others):
            raise StoreError(f"{self._table}: it has rows of layout sessions; open it by ?layout=sessions")
        leases = sorted(read.leases, key=attrgetter("key"))
        return Listing(tuple(leases), tuple(read.malformed), to_reports(read.others))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read these leases, in the order asked; those not there are left out. Half the price where `stale_ok`."""
        asked, found = tuple(keys), dict[str, Lease]()
        unique = [key_of(key, self._prefix) for key in dict.fromkeys(asked)]

        def ask(question: dict[str, Any]) -> Mapping[str, Any]:
            with translated(self._table):
                return cast("Mapping[str, Any]", self._clients.reads.batch_get_item(**question))

        for item in items_of(ask, self._table, unique, consistent=not stale_ok, attempts=ATTEMPTS):
            if (row := to_lease(item)) is not None:
                found[row.key] = insist(row)
        return tuple(found[key] for key in asked if key in found)

    def write(self, write: Write) -> Outcome:
        """Put, update or delete one item under the write's condition."""
        key, request = write.lease.key, request_of(write)
        if request is None:
            return self._refused(key)
        match write:
            case CreateLease():
                reply = self._send(self._clients.writes.put_item, request)
            case DeleteLease():
                reply = self._send(self._clients.writes.delete_item, {**request, "ReturnValues": "ALL_OLD"})
            case _:
                reply = self._send(self._clients.writes.update_item, {**request, "ReturnValues": "ALL_NEW"})
        if isinstance(reply, ClientError):
            # The row that came with the refusal; one that is not there, or did not come, is read.
            item: Any = reply.response.get("Item")
            row = to_lease(item) if item else None
            if row is not None and row.key != key:
                raise OutcomeUnknown(f"{self._table}: an answer is about {row.key!r} in place of {key!r}")
            return Lost(key, insist(row)) if row else self._refused(key)
        if isinstance(write, DeleteLease):
            return Done(write.lease)
        written: Item = reply.get("Attributes") or request["Item"]
        return Done(insist(to_lease(written) or Malformed(key, "entityType", "is no lease")))

    def prove(self) -> None:
        """Return if the service keeps its conditions; no row is ever there. Raises StoreError."""
        prove(self._clients.writes, self._table, self._prefix)

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs one row
        """Whether the table has rows of layout `sessions`, and of this one, to judge by one row."""
        one: dict[str, Any] = {"TableName": self._table, "Limit": 1}
        look: Callable[..., Any] = self._clients.reads.scan
        if self._prefix:
            look, one = self._clients.reads.query, {**one, **of_application(self._prefix)}
        with translated(self._table):
            rows = unless_throttled(look, one)["Items"]
        ours = any(row.get("entityType") == text(CELL) for row in rows)
        return ours, bool(rows) and not ours

    def cells(self) -> DynamoCells:
        """The table's rows as those of layout `sessions`."""

        def ask(
            call: Callable[..., Mapping[str, Any]], arguments: Mapping[str, Any], *, refusable: bool = False
        ) -> Mapping[str, Any]:
            refused: ClientError | None = None
            with translated(self._table):
                try:
                    return unless_throttled(call, arguments)
                except ClientError as error:
                    if not refusable or code_of(error) != "ConditionalCheckFailedException":
                        raise
                    refused = error
            raise refused

        return DynamoCells(self._clients, self._table, ask, self.prove, self._prefix)

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _send(self, call: Callable[..., Any], request: Request) -> Mapping[str, Any] | ClientError:
        """The reply, or the refusal of its condition."""
        if self._prefix:
            where = "Item" if "Item" in request else "Key"
            request = {**request, where: {**request[where], APPLICATION: text(self._prefix)}}
        arguments = {"TableName": self._table, "ReturnValuesOnConditionCheckFailure": "ALL_OLD", **request}
        with translated(self._table):
            try:
                reply: Mapping[str, Any] = unless_throttled(call, arguments)
                check_answer(arguments, reply)
            except ClientError as error:
                if code_of(error) != "ConditionalCheckFailedException":
                    raise
                return error
        return reply

    def _refused(self, key: str) -> Lost:
        return Lost(key, next(iter(self.get([key])), None))


def open_url(
    place: str,
    options: Mapping[str, str],
    *,
    create: bool,
    request_seconds: float | None,
    session: Session | None = None,
) -> DynamoStore:
    """The store of this table; raises ValueError where the name or an option cannot be one."""
    if not place:
        raise ValueError("store URL: dynamodb:// wants a table's name")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", place):
        raise ValueError(f"store URL: {place!r} is no table's name: 3 to 255 letters, digits, _ . or -")
    endpoint = endpoint_of(options.get("endpoint"))
    if options.get("protect", "on") != "on":
        raise ValueError("store URL: option 'protect' wants on; a table that is there already is not changed by it")
    if options.get("wire", "boto3") != "boto3":
        raise ValueError("store URL: option 'wire' wants boto3; without it calls go past boto3 where they can")
    return DynamoStore(
        place,
        region=options.get("region"),
        endpoint=endpoint,
        create=create,
        session=session_of(options, session=session),
        request_seconds=request_seconds,
        prefix=prefix_of(options),
        protect="protect" in options,
        directly="wire" not in options,
    )


PREFIX_MOST = 255
"""Characters, of at most four bytes each: half of what a partition key holds."""


def prefix_of(options: Mapping[str, str]) -> str:
    """The prefix that a URL names; "" for a table of one application. Raises ValueError."""
    prefix = options.get("prefix", "")
    if len(prefix) > PREFIX_MOST or not prefix.isprintable():
        raise ValueError(f"store URL: option 'prefix' wants at most {PREFIX_MOST} characters, all of them to be seen")
    return prefix
