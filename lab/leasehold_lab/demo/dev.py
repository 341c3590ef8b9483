"""Starts local stand-ins with named streams, hubs and tables, for the command `leasehold dev`.

The module also produces sample data at a given rate and returns URLs and environment variables to paste into a shell.
Each sample record has one of forty keys and is numbered within its key.
"""

import json
import logging
import re
import shlex
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial, reduce
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import evolve, frozen
from botocore.exceptions import ClientError

from leasehold.adapters.threads import spawn
from leasehold.stores.printable import error_summary, make_safe_logger
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.demo.stage import Stream, StreamError, create_kinesis_client, put_records
from leasehold_lab.standins.hubs.event_hubs import event_hubs
from leasehold_lab.standins.postgres import build_store_url, run_postgres
from leasehold_lab.standins.services import (
    AZURITE_ACCOUNT,
    azurite_connection_string,
    run_azurite,
    run_dynalite,
    run_kinesis_local,
)
from leasehold_lab.standins.tables import TableStreams, run_table_server

if TYPE_CHECKING:  # Users do not have the stubs.
    from types_boto3_kinesis import KinesisClient

SHARDS_MAX = 1000

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
StreamKind = Literal["kinesis", "eventhubs", "table"]
_KINDS: Mapping[str, StreamKind] = {"kinesis": "kinesis", "eventhubs": "eventhubs", "table": "table"}


@frozen
class RequestedStream:
    """A stream, hub or table to create, with its number of shards or partitions."""

    name: str
    shards: int
    kind: StreamKind = "kinesis"


@frozen
class DevStream:
    """The URLs of a stream and of its lease table.

    Attributes:
        source: The complete URL of the stream, without secrets.
        table: The complete URL of the lease table, without secrets.
        pasted: A URL of the stream that works if the environment variables are set. It may be shorter than `source`.
        pasted_table: A URL of the lease table that works if the environment variables are set. It may be shorter than
        `table`.
    """

    source: str
    table: str
    pasted: str
    pasted_table: str


@frozen
class DevServices:
    """The running stand-ins.

    Attributes:
        services: The names of the cloud services that the stand-ins replace.
        streams: The streams by name.
        environment: The environment variables to set. With these, URLs need no endpoints, and no account is needed.
    """

    services: tuple[str, ...]
    streams: Mapping[str, DevStream]
    environment: Mapping[str, str]

    @property
    def export_command(self) -> str:
        """A shell command that exports the environment variables."""
        return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())

    def with_stream_first(self, name: str) -> "DevServices":
        """Return a copy with this stream first and with its URLs in the environment."""
        first_stream = self.streams[name]
        urls = {"SOURCE": first_stream.pasted, "STORE": first_stream.pasted_table}
        return evolve(self, streams={name: first_stream, **self.streams}, environment={**self.environment, **urls})

    def combine_with(self, other: "DevServices") -> "DevServices":
        """Return the services, streams and environment variables of both objects."""
        return DevServices(
            (*self.services, *other.services),
            {**self.streams, **other.streams},
            {**self.environment, **other.environment},
        )


def parse_stream(text: str) -> RequestedStream:
    """Parse a stream from the command line: [eventhubs:|table:]NAME[=SHARDS]. Raises ValueError."""
    kind_prefix, colon, name_and_shards = text.rpartition(":")
    name, equals_sign, shards = name_and_shards.partition("=")
    kind = _KINDS.get(kind_prefix) if colon else "kinesis"
    if kind is None or not _NAME.fullmatch(name):
        raise ValueError(
            f"{text!r} names no stream; write NAME=SHARDS for Kinesis, such as orders=4, eventhubs:NAME=PARTITIONS, "
            "or table:NAME=SHARDS for the stream of a table of DynamoDB"
        )
    if equals_sign and not (shards.isascii() and shards.isdigit() and 1 <= int(shards) <= SHARDS_MAX):
        raise ValueError(f"{text!r}: the number of shards is one from 1 to {SHARDS_MAX}, as in {name}=4")
    return RequestedStream(name, int(shards) if equals_sign else 1, kind)


log = make_safe_logger(logging.getLogger("leasehold.sample"))

KEYS = 40
PUTS_PER_SECOND = 5

KeyedRows = list[tuple[str, bytes]]
"""Pairs of a partition key and the data of a record."""


@contextmanager
def put_samples(name: str, rate: int, put_batch: Callable[[KeyedRows], object]) -> Iterator[None]:
    """Put `rate` records per second from a separate thread until the block ends. Do nothing if `rate` is 0."""
    if not rate:
        yield
        return
    stop_event = threading.Event()
    producer_thread = spawn(
        f"sample-{name}",
        lambda: put_rows(rate, put_batch, stop_event),
        lambda fault: log.error("stream %s: sample data stopped: %s", name, error_summary(fault)),
    )
    try:
        yield
    finally:
        stop_event.set()
        producer_thread.join()


def put_rows(rate: int, put_batch: Callable[[KeyedRows], object], stop_event: threading.Event) -> None:
    """Put records until `stop_event` is set. Each record contains its key and its number within that key."""
    counts_by_key, record_indexes = Counter[str](), count()
    pause_seconds = max(1 / PUTS_PER_SECOND, 1 / rate)
    while not stop_event.is_set():
        batch: KeyedRows = []
        for _ in range(max(1, round(rate * pause_seconds))):
            key = f"sensor-{next(record_indexes) % KEYS:02}"
            counts_by_key[key] += 1
            batch.append((key, json.dumps({"key": key, "number": counts_by_key[key]}).encode()))
        put_batch(batch)
        stop_event.wait(pause_seconds)


TableUrlBuilder = Callable[[str], str]
"""A function that returns the URL of the lease table for the stream with a given name."""


CONTAINER = "leases"
"""The container for all hubs. In the layout of the Azure SDKs, the name of each blob starts with that of its hub."""


@contextmanager
def run_hub_services(
    hubs: Sequence[RequestedStream], rate: int, build_table_url: TableUrlBuilder | None = None
) -> Iterator[DevServices]:
    """Start a stand-in with these hubs, and put `rate` events per second into each.

    If `build_table_url` is None, also start a stand-in for Azure Blob Storage, for the leases. Raises ServiceError if a
    stand-in cannot be installed or started.
    """
    with ExitStack() as stack:
        local_hubs = stack.enter_context(event_hubs({hub.name: hub.shards for hub in hubs}))
        environment = {"EVENTHUBS_CONNECTION_STRING": local_hubs.connection_string()}
        if build_table_url is None:
            blob_connection_string = azurite_connection_string(stack.enter_context(run_azurite()))
            environment["AZURE_STORAGE_CONNECTION_STRING"] = blob_connection_string

        def put_events(hub: RequestedStream, rows: KeyedRows) -> None:
            # All events of a key are put into one partition, in order.
            bodies_by_partition: dict[int, list[str]] = defaultdict(list)
            for key, data in rows:
                bodies_by_partition[zlib.crc32(key.encode()) % hub.shards].append(data.decode())
            for partition, bodies in bodies_by_partition.items():
                local_hubs.put(hub.name, str(partition), bodies)

        streams = {}
        for hub in hubs:
            stack.enter_context(put_samples(hub.name, rate, partial(put_events, hub)))
            source_url = f"eventhubs://{local_hubs.namespace}/{hub.name}"
            table_url = f"azblob://{AZURITE_ACCOUNT}/{CONTAINER}?eventhub={local_hubs.namespace}/{hub.name}"
            table_url = table_url if build_table_url is None else build_table_url(hub.name)
            streams[hub.name] = DevStream(source_url, table_url, source_url, table_url)
        yield DevServices(("Event Hubs", *(("Azure Blob",) if build_table_url is None else ())), streams, environment)


REGION = ENVIRONMENT["AWS_DEFAULT_REGION"]


@contextmanager
def run_dev_services(
    streams: Sequence[RequestedStream], folder: Path | None, rate: int, *, in_postgres: bool = False
) -> Iterator[DevServices]:
    """Start the stand-ins that these streams need, and put `rate` records per second into each stream.

    Args:
        streams: The streams, hubs and tables to create.
        folder: The folder in which to keep Kinesis streams and lease tables. A stream that it already contains is used
            unchanged.
        rate: The number of records per second for each stream.
        in_postgres: Whether to keep the lease tables in PostgreSQL, instead of DynamoDB and Blob.

    Raises:
        ValueError: A folder is given, but it cannot keep streams that are hubs or tables.
        ServiceError: A stand-in cannot be installed or started.
    """
    hubs = [stream for stream in streams if stream.kind == "eventhubs"]
    other_streams = [stream for stream in streams if stream.kind != "eventhubs"]
    if folder is not None and any(stream.kind != "kinesis" for stream in streams):
        raise ValueError("--folder: event hubs and tables can only be kept in memory; run them without --folder")
    with ExitStack() as stack:
        build_table_url: TableUrlBuilder | None = None
        running_services = list[DevServices]()
        if in_postgres:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            service = stack.enter_context(run_postgres(folder and folder.absolute()))

            def build_table_url(name: str) -> str:
                return build_store_url(service, re.sub(r"\W", "_", f"{name}_app"))

        if hubs:
            running_services.append(stack.enter_context(run_hub_services(hubs, rate, build_table_url)))
        if other_streams:
            running_services.append(
                stack.enter_context(_run_aws_services(other_streams, folder, rate, build_table_url))
            )
        if in_postgres:
            running_services.append(DevServices(("PostgreSQL",), {}, {}))
        yield reduce(DevServices.combine_with, running_services).with_stream_first(streams[0].name)


ROLL_SECONDS = 60.0
"""The time in seconds until a shard of a table's stream ends. Ended shards are removed after an hour.

In DynamoDB, a shard stays open for some hours, and is removed after a day.
"""


@contextmanager
def _run_aws_services(
    streams: Sequence[RequestedStream], folder: Path | None, rate: int, build_table_url: TableUrlBuilder | None
) -> Iterator[DevServices]:
    folders: dict[str, Path] = {}
    if folder is not None:
        folders = {name: folder.absolute() / name for name in ("kinesis", "dynamodb")}
        for service_folder in folders.values():
            service_folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        environment = {
            **{name: ENVIRONMENT[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")},
            "AWS_DEFAULT_REGION": REGION,
        }
        stream_urls = {}
        if kinesis_streams := [stream for stream in streams if stream.kind == "kinesis"]:
            kinesis = stack.enter_context(run_kinesis_local(folders.get("kinesis")))
            environment["AWS_ENDPOINT_URL_KINESIS"] = kinesis.url
            for stream in kinesis_streams:
                stream_client = stack.enter_context(_open_stream(kinesis.url, stream))
                stack.enter_context(put_samples(stream.name, rate, partial(put_records, stream_client, stream.name)))
                query = f"?region={REGION}&endpoint={kinesis.url}"
                stream_urls[stream.name] = f"kinesis://{stream.name}{query}", f"kinesis://{stream.name}"
        for stream in (stream for stream in streams if stream.kind == "table"):
            table = TableStreams(stream.name, stream.shards, roll_seconds=ROLL_SECONDS, retention=60 * ROLL_SECONDS)
            # The URL must contain the endpoint, because the endpoint in the environment is that of the lease tables.
            source_url = f"dynamodb-streams://{stream.name}?region={REGION}&endpoint={stack.enter_context(run_table_server(table))}"
            stack.enter_context(put_samples(stream.name, rate, partial(_put_items, table)))
            stream_urls[stream.name] = source_url, source_url
        service_names = [
            *(("Kinesis",) if kinesis_streams else ()),
            *(("DynamoDB Streams",) if len(kinesis_streams) < len(streams) else ()),
        ]
        if build_table_url is not None:
            dev_streams = {
                name: DevStream(source_url, build_table_url(name), short_url, build_table_url(name))
                for name, (source_url, short_url) in stream_urls.items()
            }
        else:
            dynamodb = stack.enter_context(run_dynalite(folders.get("dynamodb")))
            environment["AWS_ENDPOINT_URL_DYNAMODB"] = dynamodb.url
            query = f"region={REGION}&endpoint={dynamodb.url}"
            dev_streams = {
                name: DevStream(source_url, f"dynamodb://{name}-app?{query}", short_url, f"dynamodb://{name}-app")
                for name, (source_url, short_url) in stream_urls.items()
            }
            service_names.append("DynamoDB")
        yield DevServices(tuple(service_names), dev_streams, environment)


@contextmanager
def _open_stream(endpoint: str, stream: RequestedStream) -> "Iterator[KinesisClient]":
    """Create the stream unless `--folder` already contains it, and yield a client."""
    try:
        with closing(Stream(endpoint, stream.name, stream.shards)):
            pass
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") != "ResourceInUseException":
            raise StreamError(f"stream {stream.name} could not be created: {error}") from error
    with closing(create_kinesis_client(endpoint)) as stream_client:
        yield stream_client


def _put_items(table: TableStreams, rows: KeyedRows) -> None:
    for key, data in rows:
        table.put(key, {"number": {"N": str(json.loads(data)["number"])}})
