"""Parses the options of `kinesis-leased`, which are those of other Kinesis connectors and those of the group."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

from attrs import frozen

from leasehold.adapters.inputs import check_time_ms
from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address
from leasehold.adapters.spark.batch import ReadBounds, parse_bounds
from leasehold.adapters.spark.options import (
    ALL_SOURCES,
    MAX_ROWS,
    LeaseOptions,
    OptionReader,
    SparkOption,
    declare_endpoint,
    parse_lease_options,
    parse_start,
)
from leasehold.balancer.model import TRIM_HORIZON, Position, at_timestamp
from leasehold.stores.printable import printable
from leasehold.stores.urls import ROLE_ARN_PATTERN

MIN_INTERVAL_MS = 223
"""The minimum time between two requests for one shard. It allows 4.5 requests per second, which leaves a margin because
all readers of a shard share a limit of five per second."""


def _declare_credentials(prefix: str, resource: str) -> tuple[SparkOption, ...]:
    page = "spark-cluster.md#give-it-credentials"
    return (
        SparkOption(
            f"{prefix}.roleArn",
            f"Assume this role for {resource}.",
            values="`arn:aws:iam::ACCOUNT:role/NAME`",
            unset="the environment's credentials",
            page=page,
        ),
        SparkOption(f"{prefix}.externalId", f"Assume `{prefix}.roleArn` with this external id.", page=page),
        SparkOption(
            f"{prefix}.profile",
            f"Use this profile of the AWS configuration for {resource}.",
            unset="the environment's credentials",
            page=page,
        ),
    )


KINESIS_STREAM = (
    *declare_endpoint("kinesis"),
    *_declare_credentials("kinesis", "the stream"),
)
"""The options for connecting to a stream. The source and the sink both have these options."""

KINESIS_SOURCE = (
    SparkOption("kinesis.streamName", "Read the stream with this name or ARN.", required="name the stream to read"),
    *KINESIS_STREAM,
    SparkOption(
        "kinesis.startingPosition",
        "Begin shards without a lease here. `AT_TIMESTAMP` is followed by a time, also written as "
        '`{"at_timestamp": …}`. For single shards, write `{"shardId-…": {"iteratorType": "AFTER_SEQUENCE_NUMBER", '
        '"iteratorPosition": "4957…"}, "default": "LATEST"}`.',
        values="`TRIM_HORIZON`, `EARLIEST`, `LATEST`, `AT_TIMESTAMP …`",
        unset="`LATEST`; for a backfill, the oldest record",
    ),
    SparkOption(
        "kinesis.endingPosition",
        "End a backfill at this time. `LATEST`, for a batch only, is the present end.",
        values="`AT_TIMESTAMP …`, `LATEST`",
        page="spark-backfill.md",
    ),
    SparkOption(
        "lease.applicationName", "Keep the leases in the DynamoDB table with this name if `lease.store` is left out."
    ),
    SparkOption(
        "kinesis.dynamodb.tableName",
        "Name that table; overrides `lease.applicationName`.",
    ),
    SparkOption("kinesis.dynamodb.endpointUrl", "Send requests for that table to this URL.", unset="the environment's"),
    *_declare_credentials("lease", "that table"),
    SparkOption(
        "kinesis.consumerType",
        "Poll the stream (`GetRecords`, `polling`), or subscribe to it as a registered consumer (`SubscribeToShard`, "
        "`efo`).",
        "polling",
        choices=("GetRecords", "polling", "SubscribeToShard", "efo"),
        page="fan-out.md",
    ),
    SparkOption(
        "kinesis.consumerName", "Subscribe as this consumer, which only this group may use.", page="fan-out.md"
    ),
    SparkOption(
        "kinesis.misplaced",
        "Keep the records of an aggregate on a wrong shard that belong to the shard, or drop such an aggregate whole, "
        "as the KCL does.",
        "keep",
        choices=("keep", "drop"),
        page="kinesis.md#kpl-aggregation",
    ),
    SparkOption(
        "kinesis.wire",
        "Request records in this format, or make all requests through boto3.",
        "cbor",
        choices=("cbor", "json", "boto3"),
        page="kinesis.md#boto3-patching-proxies-and-tracing",
    ),
    SparkOption(
        "kinesis.getRecords.fetchIntervalMs",
        "Read a shard at most once in this time. All readers of a shard share five requests per second. At the tip, a "
        "shard is read at most twice per second.",
        250,
        minimum=MIN_INTERVAL_MS,
    ),
    SparkOption("kinesis.maxFetchRecordsPerShard", "Put at most this many rows of one shard into a batch.", 100_000),
    MAX_ROWS,
)
"""The options of the source `kinesis-leased`, in addition to those of all sources."""

WITHOUT_EFFECT = {
    "kinesis.failOnDataLoss": "records past their retention are gone for every reader; it is logged",
    "kinesis.maxFetchTimePerShardSec": "records are read ahead, between batches",
    "kinesis.describeShardInterval": "shards are listed when one ends, and when leases do not cover all hash keys",
    "kinesis.getRecords.numberOfRecordsPerFetch": "each request asks for as many as it may",
}

NAME_BY_DATABRICKS_NAME = {
    "streamName": "kinesis.streamName",
    "region": "kinesis.region",
    "endpoint": "kinesis.endpointUrl",
    "consumerMode": "kinesis.consumerType",
    "consumerName": "kinesis.consumerName",
    "roleArn": "kinesis.roleArn",
    "roleExternalId": "kinesis.externalId",
    "initialPosition": "kinesis.startingPosition",
    "maxRecordsPerFetch": "kinesis.maxFetchRecordsPerShard",
    "minFetchPeriod": "kinesis.getRecords.fetchIntervalMs",
}
"""The option names of the Databricks connector, each with our name for the option."""


@frozen
class KinesisOptions:
    """The stream that a query reads, and how to read it.

    Attributes:
        stream: The stream's name or its ARN, as the user wrote it.
        name: The stream's name.
        region: The stream's region; "" for the environment's.
        endpoint: The endpoint URL; "" for the environment's.
        wire: The format in which records are requested.
        misplaced: Whether to "keep" or "drop" records of an aggregate whose hash keys belong to another shard.
        interval_seconds: The minimum time between two requests for one shard.
        shard_rows: The maximum number of rows of one shard in one batch.
        lease: The options of the group. Its `store` is "" if no option names a store, as for a batch.
        bounds: The bounds of the records to read.
        start_positions: For each shard, the position at which to begin if its lease has none.
        consumer: The name or ARN of the registered consumer to subscribe with; "" to poll.
        credentials: The credential options of the source's URL; empty for the environment's credentials.
    """

    stream: str
    name: str
    region: str
    endpoint: str
    wire: str
    misplaced: str
    interval_seconds: float
    shard_rows: int
    lease: LeaseOptions
    bounds: ReadBounds
    start_positions: Mapping[str, Position]
    consumer: str
    credentials: Mapping[str, str]

    @property
    def url_options(self) -> dict[str, str]:
        """The options of the stream's URL. If an option is "", the environment supplies the value."""
        url_options = {"region": self.region, "endpoint": self.endpoint, "wire": self.wire, "misplaced": self.misplaced}
        return {**url_options, **self.credentials}


def parse_kinesis_options(options: Mapping[str, str]) -> KinesisOptions:
    """Parse the options. Raises ValueError, naming the option."""
    opts = OptionReader(options, ALL_SOURCES, KINESIS_SOURCE)
    # Check for the option names of other connectors first, so that the error suggests our name for such an option.
    opts.reject_renamed(
        NAME_BY_DATABRICKS_NAME | {"consumer": "kinesis.consumerName", "kinesis.stsRoleArn": "kinesis.roleArn"}
    )
    stream = opts.read_text("kinesis.streamName")
    region, endpoint = opts.read_text("kinesis.region"), opts.read_text("kinesis.endpointUrl")
    stream_name = parse_stream_address(stream, region or None, "option kinesis.streamName").name
    consumer_type_option, consumer = "kinesis.consumerType", opts.read_text("kinesis.consumerName")
    subscribes = opts.read_choice(consumer_type_option) in {"SubscribeToShard", "efo"}
    if subscribes and not consumer:
        raise ValueError(
            f"option {consumer_type_option}: name the consumer with kinesis.consumerName; only this group may use it"
        )
    if consumer and not subscribes:
        raise ValueError(
            f"option kinesis.consumerName: it has no effect; set {consumer_type_option} to SubscribeToShard, or "
            "leave it out"
        )
    credentials = parse_credentials(opts, "kinesis")
    wire_format = opts.read_choice("kinesis.wire")
    misplaced = opts.read_choice("kinesis.misplaced")
    opts.ignore_options(WITHOUT_EFFECT)
    interval_ms = opts.read_number("kinesis.getRecords.fetchIntervalMs")
    max_shard_rows = opts.read_number("kinesis.maxFetchRecordsPerShard")
    start_positions, default_start = _split_by_shard(opts)
    start_fields = _parse_position(default_start, "kinesis.startingPosition", ("TRIM_HORIZON", "EARLIEST"))
    bounds = parse_bounds(opts, "kinesis", start_fields, _parse_position(opts, "kinesis.endingPosition", ()))
    # The KCL names its lease table after the application.
    application_name = opts.read_text("lease.applicationName")
    table_name = opts.read_text("kinesis.dynamodb.tableName") or application_name
    table_credentials = parse_credentials(opts, "lease")
    if table_credentials and not table_name:
        raise ValueError("option lease.roleArn: it needs lease.applicationName; in lease.store, write role_arn=…")
    url_options = {"region": region, "endpoint": opts.read_text("kinesis.dynamodb.endpointUrl"), **table_credentials}
    url_query = urlencode({name: value for name, value in url_options.items() if value})
    store_url = f"dynamodb://{quote(table_name)}{url_query and '?'}{url_query}" if table_name else ""
    lease_options = parse_lease_options(opts, store_url, bounds.find_initial_position(), "maxRowsPerTrigger")
    opts.reject_unknown()
    return KinesisOptions(
        stream,
        stream_name,
        region,
        endpoint,
        wire_format,
        misplaced,
        interval_ms / 1000,
        max_shard_rows,
        lease_options,
        bounds,
        start_positions,
        consumer,
        credentials,
    )


def parse_credentials(opts: OptionReader, prefix: str) -> dict[str, str]:
    """Return the credential options of an AWS URL. They are empty if the environment's credentials are to be used.

    Raises ValueError, naming the option.

    Args:
        opts: All options.
        prefix: "kinesis" for the stream's credentials, "lease" for the table's.
    """
    profile, role = opts.read_text(f"{prefix}.profile"), opts.read_text(f"{prefix}.roleArn")
    external_id = opts.read_text(f"{prefix}.externalId")
    if role and not ROLE_ARN_PATTERN.fullmatch(role):
        raise ValueError(f"option {prefix}.roleArn: write arn:aws:iam::ACCOUNT:role/NAME")
    if external_id and not role:
        raise ValueError(f"option {prefix}.externalId: it goes with a role; give {prefix}.roleArn, or leave it out")
    url_options = {"profile": profile, "role_arn": role, "external_id": external_id}
    return {name: value for name, value in url_options.items() if value}


SUB_SEQUENCE_AFTER_ALL = 2**31 - 1
"""A sub-sequence number that is larger than that of any user record in an aggregate."""


def _split_by_shard(opts: OptionReader) -> tuple[dict[str, Position], OptionReader]:
    """Split `kinesis.startingPosition` into the positions of single shards and the position of all other shards.

    The option may be the JSON of the awslabs and Qubole connectors:

    {"shardId-…": {"iteratorType": "AFTER_SEQUENCE_NUMBER", "iteratorPosition": "4957…"}, "default": "LATEST"}
    """
    option_name = "kinesis.startingPosition"
    positions_text = opts.read_text(option_name)
    try:
        document = json.loads(positions_text) if positions_text.startswith("{") else {}
    except (ValueError, RecursionError):
        raise ValueError(f"option {option_name}: not the JSON of a position") from None
    # If the JSON names no shard, it is one position for all shards, which the awslabs connector allows too.
    if not any(key.startswith("shardId") for key in document):
        return {}, OptionReader({option_name: positions_text} if positions_text else {}, KINESIS_SOURCE)
    start_positions = dict[str, Position]()
    for shard, start in document.items():
        # `default` and `metadata` are not shard ids. `default` is the position of all other shards, and `metadata` is
        # ignored.
        if shard in {"default", "metadata"}:
            continue
        if isinstance(start, str):
            iterator_type, iterator_position = start, ""
        elif isinstance(start, dict) and {"iteratorType"} <= start.keys() <= {"iteratorType", "iteratorPosition"}:
            iterator_type, iterator_position = str(start["iteratorType"]), str(start.get("iteratorPosition", ""))
        else:
            raise ValueError(f"option {option_name}: {printable(shard)} needs iteratorType and iteratorPosition")
        match iterator_type.upper():
            case "TRIM_HORIZON" | "EARLIEST":
                start_positions[shard] = TRIM_HORIZON
            case "AT_TIMESTAMP":
                start_positions[shard] = at_timestamp(
                    check_time_ms(int(_parse_milliseconds(option_name, iterator_position)), f"option {option_name}")
                )
            case "AFTER_SEQUENCE_NUMBER" if iterator_position.isascii() and iterator_position.isdigit():
                # Begin after the whole record, even if the record is an aggregate.
                start_positions[shard] = Position(iterator_position, SUB_SEQUENCE_AFTER_ALL)
            case _:
                raise ValueError(
                    f"option {option_name}: {printable(shard)} begins at {printable(iterator_type)!r}; write "
                    "TRIM_HORIZON, "
                    "AT_TIMESTAMP with a time, or AFTER_SEQUENCE_NUMBER with a number as its iteratorPosition"
                )
    default_start = {option_name: str(document["default"])} if "default" in document else {}
    return start_positions, OptionReader(default_start, KINESIS_SOURCE)


def _parse_position(opts: OptionReader, name: str, oldest_words: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse a position, which is a word, or the JSON of the awslabs connector, {"at_timestamp": time}."""
    if not (text := opts.read_text(name)):
        return None
    timestamp_text = ""
    word, _, time = text.partition(" ")
    if word.upper() == "AT_TIMESTAMP":
        timestamp_text = _parse_milliseconds(name, time)
    elif text.startswith("{"):
        try:
            (key, value), *other_keys = json.loads(text).items()
        except (ValueError, AttributeError, RecursionError):
            raise ValueError(f"option {name}: not the JSON of a position") from None
        # Reject a second key instead of ignoring it, because the user may have meant the second one.
        if other_keys or key.lower() != "at_timestamp":
            raise ValueError(f'option {name}: as JSON it is {{"at_timestamp": time}}')
        timestamp_text = _parse_milliseconds(name, str(value))
    return parse_start(
        name, text, oldest_words, ("LATEST",), timestamp_text, time_form="AT_TIMESTAMP 2026-11-22T06:00:00Z"
    )


def _parse_milliseconds(name: str, text: str) -> str:
    if text.isdigit():
        return text
    try:
        parsed_time = datetime.fromisoformat(text)
    except ValueError:
        parsed_time = None
    # Reject a time without a UTC offset, because it would be a different time on machines in other time zones.
    if parsed_time is None or parsed_time.tzinfo is None:
        raise ValueError(f"option {name}: write a time as 2026-01-31T10:23:45+00:00, or in ms since 1970")
    return str(int(parsed_time.timestamp() * 1000))
