"""Stores leases in a DynamoDB table, which may be shared with Java workers of the Kinesis Client Library 2.x and 3.x.

`prepare_table` finds the table, or creates it as the Kinesis Client Library does and waits for it.
`check_conditions_honored` checks that the service honors the conditions of writes. `create_clients` creates the
clients, and `translate_errors` turns their errors into StoreError or OutcomeUnknown.

1. A conditional write is sent only once. If a client repeated a write whose response was lost, the second attempt would
   conflict with the first, and the client would conclude that another worker had taken the lease. So if a response is
   lost, the outcome is unknown, and the caller's next consistent read shows what happened.
2. A throttled request has certainly not been applied, so it is sent again.
3. Reads may be repeated. botocore's standard retry mode repeats them.

If a write is rejected, the result contains the lease as it is stored. The lease comes from the response or, if the
response does not contain it, from a consistent read.

`parse_listings_with_orjson` makes orjson parse the rows of a scan, because boto3 would take seven times as long. boto3
still parses the rest of the response. If a response has binary values, which are base64 strings in JSON, boto3 parses
the whole response.
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

from attrs import evolve
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
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError
from leasehold.stores.aws import (
    CREDENTIALS_FROM,
    PARSE_ERRORS,
    RETRIEVAL_ERRORS,
    connection_failure_hint,
    create_boto3_session,
    credentials_failure_advice,
)
from leasehold.stores.aws_calls.pages import UnparsedRows, parse_page
from leasehold.stores.deadlines import add_response_deadlines
from leasehold.stores.dynamodb.cells import SESSION_ROW_TYPE, Clients, DynamoCells, read_items
from leasehold.stores.dynamodb.rows import (
    APPLICATION,
    KEY,
    Item,
    RowDecoder,
    application_query,
    item_key,
    parse_reports,
    string_attribute,
    to_item,
    to_lease,
)
from leasehold.stores.dynamodb.writes import Request, build_write_request, check_response_row
from leasehold.stores.fields import require_valid_lease
from leasehold.stores.printable import error_summary, make_safe_logger
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Malformed, Outcome, Timeouts
from leasehold.stores.urls import check_endpoint, reject_credentials
from leasehold.stores.writes import CreateLease, DeleteLease, Write

try:
    import orjson

    from leasehold.stores.aws_calls.tables import BINARY, call_directly
except ImportError:  # without orjson, boto3 makes all calls and parses their responses
    orjson = None  # type: ignore[assignment]  # optional; without it, parsing is slower

if TYPE_CHECKING:
    from types_boto3_dynamodb import DynamoDBClient
    from types_boto3_dynamodb.type_defs import TableDescriptionTypeDef

_ERROR_STATUS = 300  # this HTTP status, and every higher one, is an error


def parse_listings_with_orjson(client: "DynamoDBClient") -> None:
    """Make this client parse listings with orjson, if that is installed."""
    if orjson is not None:
        for operation in ("Scan", "Query"):
            client.meta.events.register(f"before-parse.dynamodb.{operation}", _parse_listing)


def _parse_listing(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_event: object) -> None:
    body: bytes = response_dict["body"]
    if response_dict["status_code"] >= _ERROR_STATUS or any(type_name in body for type_name in BINARY):
        return
    try:
        page = parse_page(body, orjson.loads) or orjson.loads(body)
        items = page.pop("Items", None) if isinstance(page, dict) else None
        body_without_items = orjson.dumps(page)
    except (ValueError, TypeError):  # orjson raises TypeError if the JSON is nested too deeply
        return  # boto3 then parses the response and raises the error
    if isinstance(items, list | UnparsedRows):
        customized_response_dict["Items"] = items
        response_dict["body"] = body_without_items


T = TypeVar("T")

ATTEMPTS = 3
TIMEOUTS = Timeouts(connect_seconds=2, read_seconds=5, attempts=ATTEMPTS)
"""Timeouts that allow several attempts within the duration of a lease, and are long enough for a page of a scan (1
MB)."""
SEGMENT_ROWS, SEGMENTS_MAX = 10_000, 4
"""The minimum number of rows per segment of a scan (about five pages), and the maximum number of segments."""

THROTTLING_CODES = frozenset(
    {"ProvisionedThroughputExceededException", "ThrottlingException", "Throttling", "RequestLimitExceeded"}
)

ADVICE = {
    "ResourceNotFoundException": "the table does not exist; check its name, the region and the endpoint",
    "AccessDeniedException": (
        "these credentials may not do this (dynamodb:{asked}); a worker needs DescribeTable, Scan, BatchGetItem, "
        "PutItem, UpdateItem and DeleteItem, and CreateTable to make the table; tools that only read need the first two"
    ),
    "UnrecognizedClientException": "the credentials are not known to this endpoint; check them and the region",
    "InvalidSignatureException": "the secret key does not fit the access key, or the clock is wrong",
    "MissingAuthenticationTokenException": "no credentials were sent; set them in the environment",
    "IncompleteSignatureException": "the credentials are incomplete; check them in the environment",
    "ExpiredTokenException": "the session token has expired; fetch new credentials",
}


def create_clients(
    session: Session,
    region: str | None,
    endpoint: str | None,
    timeouts: Timeouts = TIMEOUTS,
    *,
    bypass_boto3: bool = True,
) -> Clients:
    """Create the clients.

    Args:
        session: A boto3 session.
        region: The region, or None for the session's.
        endpoint: The endpoint, or None for the region's.
        timeouts: The timeouts and retries.
        bypass_boto3: Whether to bypass boto3 for the calls that allow it.

    Raises:
        StoreError: If no region is set anywhere.
    """

    def client(timeouts: Timeouts) -> "DynamoDBClient":
        config = Config(
            retries={"mode": "standard", "total_max_attempts": timeouts.attempts},
            connect_timeout=timeouts.connect_seconds,
            read_timeout=timeouts.read_seconds,
            max_pool_connections=64,
        )
        boto_client = session.client("dynamodb", region_name=region, endpoint_url=endpoint, config=config)
        reject_credentials(boto_client.meta.endpoint_url)
        add_response_deadlines(boto_client)
        if bypass_boto3 and orjson is not None:
            call_directly(boto_client)
        return boto_client

    with translate_errors("dynamodb"):
        clients = Clients(reads=client(timeouts), writes=client(evolve(timeouts, attempts=1)))
    parse_listings_with_orjson(clients.reads)
    return clients


@contextmanager
def translate_errors(table: str, *, writing: bool = False) -> Iterator[None]:
    """Turn errors of boto3 into OutcomeUnknown, or into StoreError if a retry cannot help.

    If `writing` is true, NotWritten is raised for a throttled request, because the service has rejected the request
    without writing anything.
    """
    try:
        yield
    except ClientError as error:
        code, message = error_code(error), error.response.get("Error", {}).get("Message", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in THROTTLING_CODES or status >= 500:  # noqa: PLR2004  server errors
            error_class = NotWritten if writing and code in THROTTLING_CODES else OutcomeUnknown
            raise error_class(f"{table}: {code}: {message}") from error
        advice = ADVICE[code].format(asked=error.operation_name) if code in ADVICE else message
        raise StoreError(f"{table}: {code}: {advice}") from error
    except NoRegionError as error:
        raise StoreError(f"{table}: no region is set; add ?region=… to the URL, or set AWS_REGION") from error
    except (NoCredentialsError, PartialCredentialsError) as error:
        raise StoreError(f"{table}: no credentials of AWS: {CREDENTIALS_FROM}") from error
    except RETRIEVAL_ERRORS as error:
        raise OutcomeUnknown(f"{table}: no credentials of AWS: {credentials_failure_advice(error)}") from error
    except ParamValidationError as error:
        raise StoreError(f"{table}: {error}") from error
    except BotoCoreError as error:
        raise OutcomeUnknown(f"{table}: {error}{connection_failure_hint(error)}") from error
    except PARSE_ERRORS as error:
        raise OutcomeUnknown(f"{table}: a response cannot be parsed: {error_summary(error)}") from error


def error_code(error: ClientError) -> str:
    """Return the service's error code."""
    return str(error.response.get("Error", {}).get("Code", ""))


def is_table_missing(fault: StoreError) -> bool:
    """Return whether the error means that the table does not exist."""
    return isinstance(fault.__cause__, ClientError) and error_code(fault.__cause__) == "ResourceNotFoundException"


def retry_throttled(call: Callable[..., T], arguments: Mapping[str, Any]) -> T:
    """Make this call, and repeat it after a pause if it is throttled (rule 2)."""
    retrying = Retrying(
        retry=retry_if_exception(
            lambda error: isinstance(error, ClientError) and error_code(error) in THROTTLING_CODES
        ),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=0.05, max=1),
        reraise=True,
    )
    return retrying(call, **arguments)


TABLE_WAIT_SECONDS = 600
"""How long to wait for a new table to become usable, in seconds. The Kinesis Client Library waits equally long."""


def prepare_table(
    client: "DynamoDBClient", table: str, *, create: bool, prefix: str = "", protect: bool = False
) -> None:
    """Make sure that the table exists, has our key, and can be used.

    Args:
        client: A client.
        table: The name of the table.
        create: Create the table if it does not exist.
        prefix: The prefix of one application, if many share the table.
        protect: Create the table with deletion protection and point-in-time recovery (35 days).

    Raises:
        StoreError: If the table does not exist and may not be created, or belongs to another program.
        OutcomeUnknown: If the service cannot be reached or the table does not become usable.
    """
    is_created = False
    protection: dict[str, Any] = {"DeletionProtectionEnabled": True} if protect else {}
    with translate_errors(table):
        if _describe_table(client, table) is None:
            if not create:
                key_names = f"{APPLICATION} (string) and the sort key {KEY} (string)" if prefix else f"{KEY} (string)"
                raise StoreError(
                    f"{table}: the table does not exist, and is not created here; check the name and the region "
                    f"(by default, a worker creates the table; its partition key is {key_names})"
                )
            key_attributes = tuple(item_key("", prefix))
            roles: Sequence[Literal["HASH", "RANGE"]] = ("HASH", "RANGE")
            try:
                client.create_table(
                    TableName=table,
                    KeySchema=[
                        {"AttributeName": name, "KeyType": role}
                        for name, role in zip(key_attributes, roles, strict=False)
                    ],
                    AttributeDefinitions=[{"AttributeName": name, "AttributeType": "S"} for name in key_attributes],
                    BillingMode="PAY_PER_REQUEST",
                    **protection,
                )
                is_created = True
            except ClientError as error:
                # Another worker may have created it at the same moment.
                if error_code(error) != "ResourceInUseException":
                    raise
        retrying = Retrying(
            retry=retry_if_result(lambda description: description is None or description["TableStatus"] == "CREATING"),
            stop=stop_after_delay(TABLE_WAIT_SECONDS),
            wait=wait_exponential(multiplier=0.02, max=5),
        )
        try:
            check_key(table, cast("TableDescriptionTypeDef", retrying(_describe_table, client, table)), prefix)
        except RetryError as error:
            raise OutcomeUnknown(f"{table}: not usable after {TABLE_WAIT_SECONDS} s") from error
        if is_created and protect:
            client.update_continuous_backups(
                TableName=table, PointInTimeRecoverySpecification={"PointInTimeRecoveryEnabled": True}
            )


def check_conditions_honored(client: "DynamoDBClient", table: str, prefix: str = "") -> None:
    """Check that the service honors the conditions of writes. Raises StoreError if it ignores them.

    Each probe is conditional on a row that does not exist, so a service that honors conditions writes nothing that a
    Java worker could read. The deletion is probed first, because if the service ignores conditions, this probe fails
    without leaving a row.
    """
    for probe in condition_probes(client, table, prefix).values():
        probe()


def condition_probes(client: "DynamoDBClient", table: str, prefix: str = "") -> Mapping[str, Callable[[], None]]:
    """Return the probes of `check_conditions_honored` by the name of the operation. Each probe may be called alone."""
    lease = Lease(f"leasehold-probe-{uuid4().hex}")
    key = item_key(lease.key, prefix)
    row_arguments: Mapping[str, Any] = {"TableName": table, "Key": key}
    exists_condition = {"ConditionExpression": f"attribute_exists({KEY})"}

    def probe(call: Callable[..., object], arguments: Mapping[str, Any]) -> None:
        with translate_errors(table):
            try:
                retry_throttled(call, arguments)
            except ClientError as error:
                if error_code(error) != "ConditionalCheckFailedException":
                    raise
                return  # the service has rejected the write, as it should
            client.delete_item(**row_arguments)
            raise StoreError(
                f"{table}: the service ignores the conditions of writes, so two workers could own one lease; "
                "leases need a service with conditional writes"
            )

    update = {**row_arguments, **exists_condition, "UpdateExpression": "REMOVE checkpointOwner"}
    return {
        "DeleteItem": partial(probe, client.delete_item, {**row_arguments, **exists_condition}),
        "UpdateItem": partial(probe, client.update_item, update),
        "PutItem": partial(
            probe, client.put_item, {"TableName": table, "Item": {**to_item(lease), **key}, **exists_condition}
        ),
    }


def _describe_table(client: "DynamoDBClient", table: str) -> "TableDescriptionTypeDef | None":
    try:
        description = client.describe_table(TableName=table)["Table"]
    except ClientError as error:
        if error_code(error) == "ResourceNotFoundException":
            return None
        raise
    if description["TableName"] != table.rpartition("/")[2]:
        raise LookupError(f"it is about table {description['TableName']!r}")
    return description


def check_key(table: str, description: "TableDescriptionTypeDef", prefix: str = "") -> None:
    """Raise StoreError if a table has the wrong key. Tables that many applications share have a different key.

    Args:
        table: The name of the table.
        description: Its description.
        prefix: The prefix of one application, if many share the table.
    """
    key_schema = [(key["AttributeName"], key["KeyType"]) for key in description["KeySchema"]]
    attribute_types = {
        definition["AttributeName"]: definition["AttributeType"] for definition in description["AttributeDefinitions"]
    }
    single_key, shared_key = [(KEY, "HASH")], [(APPLICATION, "HASH"), (KEY, "RANGE")]
    if key_schema in (single_key, shared_key) and all(attribute_types[name] == "S" for name, _ in key_schema):
        if key_schema == single_key and prefix:
            raise StoreError(
                f"{table}: it is the table of one application, which Java workers may share; leases with a prefix "
                f"need a table whose key is {APPLICATION} (S, HASH), {KEY} (S, RANGE); name another table"
            )
        if key_schema == shared_key and not prefix:
            raise StoreError(f"{table}: many applications share it, each under a prefix; add ?prefix=… to the URL")
        return
    key_description = ", ".join(f"{name} ({attribute_types[name]}, {key_type})" for name, key_type in key_schema)
    raise StoreError(
        f"{table}: its key is {key_description}, and a lease table's is {KEY} (S, HASH); name another table"
    )


log = make_safe_logger(logging.getLogger("leasehold.dynamodb"))


def read_pages(read_page: Callable[..., Any], requests: Sequence[dict[str, Any]]) -> Iterator[Sequence[Item]]:
    """Yield the pages of scans or queries. If there are several requests, their pages are fetched concurrently.

    Args:
        read_page: Makes the call.
        requests: The arguments of each scan or query.
    """

    def fetch(request: dict[str, Any]) -> tuple[Sequence[Item], dict[str, Any] | None]:
        # Retry here, because a client for short leases does not retry, so a single throttled page would make the whole
        # listing fail.
        page = retry_throttled(read_page, request)
        last_key = page.get("LastEvaluatedKey")
        return page["Items"], {**request, "ExclusiveStartKey": last_key} if last_key else None

    # Keep at most one page of each request in memory, because an item takes up ten times as much memory as a parsed
    # lease.
    if len(requests) == 1:
        next_request: dict[str, Any] | None = requests[0]
        while next_request is not None:
            items, next_request = fetch(next_request)
            yield items
        return
    with ThreadPoolExecutor(len(requests), thread_name_prefix="leasehold-listing") as pool:
        pending_futures = {pool.submit(fetch, request) for request in requests}
        while pending_futures:
            finished_futures, pending_futures = wait(pending_futures, return_when=FIRST_COMPLETED)
            for future in finished_futures:
                items, next_request = future.result()
                if next_request is not None:
                    pending_futures.add(pool.submit(fetch, next_request))
                yield items


class DynamoStore:
    """A lease table in the layout of the KCL. Thread-safe. `leaseCounter` is both the version and the epoch.

    If there is a prefix, many applications share the table, and the store reads only the rows of one of them.
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
        bypass_boto3: bool = True,
    ) -> None:
        """Find the table, or create it.

        Args:
            table: The name of the table.
            region: The region, or None for the session's.
            endpoint: The endpoint, or None for the region's.
            create: Whether to create the table if it does not exist, and again if it is deleted later.
            session: A boto3 session with the credentials. By default boto3 finds them.
            request_seconds: The time limit for a request with all its retries.
            prefix: The prefix of one application, if many share the table.
            protect: Whether to create the table with deletion protection and point-in-time recovery.
            bypass_boto3: Whether to bypass boto3 for the calls that allow it.
        """
        self._table, self._create, self._prefix, self._protect = table, create, prefix, protect
        self._decoder, self._last_listed_count = RowDecoder(prefix), 0
        self._clients = create_clients(
            session or Session(), region, endpoint, TIMEOUTS.within(request_seconds), bypass_boto3=bypass_boto3
        )
        prepare_table(self._clients.reads, table, create=create, prefix=prefix, protect=protect)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def list(self) -> Listing:
        """Return every lease.

        If any page cannot be read, the listing fails. A deleted table is created again if the store may create it.
        """
        try:
            return self._scan_table()
        except StoreError as error:
            if not (self._create and is_table_missing(error)):
                raise
        log.error("table %s was deleted while in use; creating it again", self._table)
        prepare_table(self._clients.reads, self._table, create=True, prefix=self._prefix, protect=self._protect)
        return self._scan_table()

    def _scan_table(self) -> Listing:
        request: dict[str, Any] = {"TableName": self._table}
        read_page: Callable[..., Any] = self._clients.reads.scan
        if self._prefix:
            read_page = self._clients.reads.query
            request["KeyConditionExpression"] = f"{APPLICATION} = :application"
            request["ExpressionAttributeValues"] = {":application": string_attribute(self._prefix)}
        requests = [request]
        if not self._prefix and (segments := min(SEGMENTS_MAX, self._last_listed_count // SEGMENT_ROWS)) > 1:
            requests = [{**request, "Segment": segment, "TotalSegments": segments} for segment in range(segments)]
        with translate_errors(self._table):
            parsed_listing = self._decoder.read(read_pages(read_page, requests))
        self._last_listed_count = len(parsed_listing.leases)
        if any(item["entityType"] == string_attribute(SESSION_ROW_TYPE) for item in parsed_listing.others):
            raise StoreError(f"{self._table}: it has rows of layout sessions; add ?layout=sessions to the URL")
        leases = sorted(parsed_listing.leases, key=attrgetter("key"))
        return Listing(tuple(leases), tuple(parsed_listing.malformed), parse_reports(parsed_listing.others))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Return these leases in the given order, if they exist. If `stale_ok` is true, the read costs half as much."""
        requested_keys, leases_by_key = tuple(keys), dict[str, Lease]()
        unique_keys = [item_key(key, self._prefix) for key in dict.fromkeys(requested_keys)]

        def read_batch(arguments: dict[str, Any]) -> Mapping[str, Any]:
            with translate_errors(self._table):
                return cast("Mapping[str, Any]", self._clients.reads.batch_get_item(**arguments))

        for item in read_items(read_batch, self._table, unique_keys, consistent=not stale_ok, attempts=ATTEMPTS):
            if (row := to_lease(item)) is not None:
                leases_by_key[row.key] = require_valid_lease(row)
        return tuple(leases_by_key[key] for key in requested_keys if key in leases_by_key)

    def write(self, write: Write) -> Outcome:
        """Put, update or delete one item if the condition of the write holds."""
        key, request = write.lease.key, build_write_request(write)
        if request is None:
            return self._read_lost_outcome(key)
        match write:
            case CreateLease():
                response = self._send(self._clients.writes.put_item, request)
            case DeleteLease():
                response = self._send(self._clients.writes.delete_item, {**request, "ReturnValues": "ALL_OLD"})
            case _:
                response = self._send(self._clients.writes.update_item, {**request, "ReturnValues": "ALL_NEW"})
        if isinstance(response, ClientError):
            # Most services include the stored row in the error response. If the row is missing there, read it.
            item: Any = response.response.get("Item")
            row = to_lease(item) if item else None
            if row is not None and row.key != key:
                raise OutcomeUnknown(f"{self._table}: a response is about {row.key!r} instead of {key!r}")
            return Lost(key, require_valid_lease(row)) if row else self._read_lost_outcome(key)
        if isinstance(write, DeleteLease):
            return Done(write.lease)
        stored_item: Item = response.get("Attributes") or request["Item"]
        return Done(require_valid_lease(to_lease(stored_item) or Malformed(key, "entityType", "is no lease")))

    def prove(self) -> None:
        """Check that the service honors the conditions of writes. Raises StoreError if it does not."""
        check_conditions_honored(self._clients.writes, self._table, self._prefix)

    def layouts(self, *, requested: bool) -> tuple[bool, bool]:  # noqa: ARG002  only one row is read
        """Return whether the table has rows of layout `sessions`, and whether it has rows of this layout."""
        request: dict[str, Any] = {"TableName": self._table, "Limit": 1}
        read_page: Callable[..., Any] = self._clients.reads.scan
        if self._prefix:
            read_page, request = self._clients.reads.query, {**request, **application_query(self._prefix)}
        with translate_errors(self._table):
            rows = retry_throttled(read_page, request)["Items"]
        has_cells = any(row.get("entityType") == string_attribute(SESSION_ROW_TYPE) for row in rows)
        return has_cells, bool(rows) and not has_cells

    def cells(self) -> DynamoCells:
        """Return the table's rows as rows of layout `sessions`."""

        def call_service(
            call: Callable[..., Mapping[str, Any]], arguments: Mapping[str, Any], *, may_be_rejected: bool = False
        ) -> Mapping[str, Any]:
            rejection: ClientError | None = None
            with translate_errors(self._table, writing=may_be_rejected):
                try:
                    return retry_throttled(call, arguments)
                except ClientError as error:
                    if not may_be_rejected or error_code(error) != "ConditionalCheckFailedException":
                        raise
                    rejection = error
            raise rejection

        return DynamoCells(self._clients, self._table, call_service, self.prove, self._prefix)

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _send(self, call: Callable[..., Any], request: Request) -> Mapping[str, Any] | ClientError:
        """Send a write. Return the response, or the service's error if the condition of the write did not hold."""
        if self._prefix:
            key_parameter = "Item" if "Item" in request else "Key"
            request = {
                **request,
                key_parameter: {**request[key_parameter], APPLICATION: string_attribute(self._prefix)},
            }
        arguments = {"TableName": self._table, "ReturnValuesOnConditionCheckFailure": "ALL_OLD", **request}
        with translate_errors(self._table, writing=True):
            try:
                response: Mapping[str, Any] = retry_throttled(call, arguments)
                check_response_row(arguments, response)
            except ClientError as error:
                if error_code(error) != "ConditionalCheckFailedException":
                    raise
                return error
        return response

    def _read_lost_outcome(self, key: str) -> Lost:
        return Lost(key, next(iter(self.get([key])), None))


def open_url(
    location: str,
    options: Mapping[str, str],
    *,
    create: bool,
    request_seconds: float | None,
    session: Session | None = None,
) -> DynamoStore:
    """Open the store in this table. Raises ValueError if the name or an option is invalid."""
    if not location:
        raise ValueError("store URL: dynamodb:// needs a table name")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{3,255}", location):
        raise ValueError(f"store URL: {location!r} is not a table name: 3 to 255 letters, digits, _ . or -")
    endpoint = check_endpoint(options.get("endpoint"))
    if options.get("protect", "on") != "on":
        raise ValueError("store URL: option 'protect' must be on; it does not change an existing table")
    if options.get("wire", "boto3") != "boto3":
        raise ValueError("store URL: option 'wire' must be boto3; without the option, calls bypass boto3 if they can")
    return DynamoStore(
        location,
        region=options.get("region"),
        endpoint=endpoint,
        create=create,
        session=create_boto3_session(options, session=session),
        request_seconds=request_seconds,
        prefix=parse_prefix(options),
        protect="protect" in options,
        bypass_boto3="wire" not in options,
    )


PREFIX_LENGTH_MAX = 255
"""The maximum length of a prefix, in characters.

A character takes up at most four bytes, so a prefix takes up at most half of the 2,048 bytes that are allowed in a
partition key.
"""


def parse_prefix(options: Mapping[str, str]) -> str:
    """Return the prefix in a URL, or "" if the table has only one application. Raises ValueError if it is invalid."""
    prefix = options.get("prefix", "")
    if len(prefix) > PREFIX_LENGTH_MAX or not prefix.isprintable():
        raise ValueError(
            f"store URL: option 'prefix' must be at most {PREFIX_LENGTH_MAX} characters, all of them printable"
        )
    return prefix
