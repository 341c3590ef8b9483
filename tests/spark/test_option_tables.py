"""Each declared option of a Spark source or sink is read, and the options of sources do what the reference says."""

import socket
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from leasehold.adapters.spark.event_hubs.data_source import EventHubsLeased
from leasehold.adapters.spark.event_hubs.options import EVENT_HUBS_SOURCE, HUB, parse_event_hubs_options
from leasehold.adapters.spark.event_hubs.options import WITHOUT_EFFECT as EVENT_HUBS_WITHOUT_EFFECT
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.kinesis.options import KINESIS_SOURCE, WITHOUT_EFFECT, parse_kinesis_options
from leasehold.adapters.spark.kinesis.sink import KINESIS_SINK
from leasehold.adapters.spark.kinesis.table_changes import DYNAMODB_SOURCE, DynamoLeased
from leasehold.adapters.spark.options import ALL_SOURCES, MIB, Address, SparkOption
from leasehold.adapters.spark.sink import ALL_SINKS
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Position, at_timestamp
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal

TESTS = Path(__file__).parents[1]
KINESIS, DYNAMO, HUBS = "kinesis-leased", "dynamodb-leased", "eventhubs-leased"
ARN = "arn:aws:iam::123456789012:role/reader"
Options = Mapping[str, str]


def dynamo(options: Options) -> dict[str, Any]:
    """Return what the source of a table's stream parses from these options."""
    source_spec, lease, _, bounds = DynamoLeased(dict(options)).parse_options(options)
    open_arguments: Any = getattr(source_spec.open, "args", None)
    return {
        "lease": lease,
        "bounds": bounds,
        "spec": source_spec,
        "table": open_arguments[0],
        "url_options": open_arguments[1],
    }


READS: dict[str, tuple[Callable[[Options], Any], Options]] = {
    KINESIS: (parse_kinesis_options, {"kinesis.streamName": "s"}),
    DYNAMO: (dynamo, {"dynamodb.tableName": "t"}),
    HUBS: (parse_event_hubs_options, {"eventhubs.namespace": "n", "eventhubs.name": "h"}),
}
"""For each source, the function that parses its options, and the options that the source requires."""

KEY = StructField("partitionKey", StringType())
SINKS: dict[str, tuple[Callable[[Options], Any], Options]] = {
    "kinesis-leased sink": (
        lambda options: KinesisLeased(options).writer(
            StructType([StructField("data", BinaryType()), KEY]), overwrite=False
        ),
        READS[KINESIS][1],
    ),
    "eventhubs-leased sink": (
        lambda options: EventHubsLeased(options).writer(
            StructType([StructField("body", BinaryType()), KEY]), overwrite=False
        ),
        READS[HUBS][1],
    ),
}
"""For each sink, the function that parses its options, and the options that the sink requires."""

DECLARED: dict[str, tuple[SparkOption, ...]] = {
    KINESIS: (*ALL_SOURCES, *KINESIS_SOURCE),
    DYNAMO: (*ALL_SOURCES, *DYNAMODB_SOURCE),
    HUBS: (*ALL_SOURCES, *EVENT_HUBS_SOURCE),
    "kinesis-leased sink": (*ALL_SINKS, *KINESIS_SINK),
    "eventhubs-leased sink": (*ALL_SINKS, *HUB),
}
IGNORED = {KINESIS: WITHOUT_EFFECT, HUBS: EVENT_HUBS_WITHOUT_EFFECT}
"""Options of other connectors that are accepted but have no effect."""


@pytest.mark.parametrize("reader", DECLARED)
def test_unknown_option_error_lists_the_declared_options(reader: str) -> None:
    parse, required_options = (READS | SINKS)[reader]
    names = sorted({option.name for option in DECLARED[reader]} | {*IGNORED.get(reader, ())})
    with pytest.raises(ValueError, match=r"^option nonsense: unknown; choose among ") as exc_info:
        parse({**required_options, "nonsense": "x"})
    assert str(exc_info.value).partition("choose among ")[2].split(", ") == names


@pytest.mark.parametrize(
    ("reader", "name"), [(reader, option.name) for reader, options in DECLARED.items() for option in options]
)
def test_declared_option_is_read(reader: str, name: str) -> None:
    """An option that is declared but never read would be rejected as unknown."""
    parse, required_options = (READS | SINKS)[reader]
    with pytest.raises(ValueError, match=f"^option {name}: it is empty"):
        parse({**required_options, name: " "})


def lease(name: str) -> Callable[[Any], Any]:
    """Return a function that reads a field of the lease options, for any source."""

    def read_field(options_object: Any) -> Any:  # noqa: ANN401  each source has a class of its own
        return attrgetter(name)(options_object["lease"] if isinstance(options_object, dict) else options_object.lease)

    return read_field


def url_option(name: str) -> Callable[[Any], Any]:
    """Return a function that reads an option of the URL with which the stream is opened."""
    return lambda parsed: (parsed["url_options"] if isinstance(parsed, dict) else parsed.url_options).get(name)


OptionCase = tuple[str, str, Callable[[Any], Any], object, object]
IN_ALL: tuple[OptionCase, ...] = (
    ("lease.store", "sqlite://x", lease("store"), "", "sqlite://x"),
    ("lease.workerId", "w-1", lease("worker_id_prefix"), socket.gethostname(), "w-1"),
    ("lease.rules", "kcl", lease("config.rules"), Minimal(), Kcl()),
    ("lease.maxLeases", "7", lease("config.rules"), Minimal(), Minimal(max_leases=7)),
    ("lease.maxLeasesToSteal", "3", lease("config.rules"), Minimal(), Minimal(max_steals=3)),
    ("lease.maxLeasesPerCore", "2", lease("config.rules.max_leases"), Minimal().max_leases, 10),
    ("lease.cores", "7", lease("cores"), 5, 7),
    ("lease.flushOnIdle", "false", lease("flushes_when_idle"), True, False),
    ("lease.createTable", "false", lease("create"), True, False),
    ("lease.ifRecreated", "latest", lease("if_recreated"), None, "LATEST"),
    ("lease.transport", "embedded", lease("fetch_address"), Address("driver", "driver"), None),
    ("lease.fetchHost", "other", lease("fetch_address.host"), "driver", "other"),
    ("lease.fetchBindHost", "192.0.2.1", lease("fetch_address.bind"), "driver", "192.0.2.1"),
    ("lease.fetchPort", "4711", lease("fetch_address.port"), 0, 4711),
    ("lease.spoolFolder", "/spool", lease("spool_folder"), "", "/spool"),
    ("lease.bufferRows", "7", lease("buffer_rows"), 500_000, 7),
    ("lease.bufferBytes", f"{MIB}", lease("buffer_bytes"), 256 * MIB, MIB),
    ("maxBytesPerTrigger", "700", lease("trigger_bytes"), 256 * MIB, 700),
    ("lease.lingerMs", "250", lease("linger_seconds"), 1.0, 0.25),
    ("shardsPerTask", "3", lambda parsed: lease("count_tasks")(parsed)(6), 3, 2),
)
OWN: dict[str, tuple[OptionCase, ...]] = {
    KINESIS: (
        ("lease.durationMs", "17000", lease("config.lease_seconds"), 10.0, 17.0),
        ("minPartitions", "9", attrgetter("bounds.tasks"), 0, 9),
        ("kinesis.streamName", "other", attrgetter("stream"), "s", "other"),
        ("kinesis.region", "eu-north-1", url_option("region"), "", "eu-north-1"),
        ("kinesis.endpointUrl", "http://e", url_option("endpoint"), "", "http://e"),
        ("kinesis.startingPosition", "EARLIEST", lease("config.initial_position"), LATEST, TRIM_HORIZON),
        (
            "kinesis.endingPosition",
            "AT_TIMESTAMP 1700000000000",
            attrgetter("bounds.until"),
            None,
            at_timestamp(1_700_000_000_000),
        ),
        ("lease.applicationName", "app", lease("store"), "", "dynamodb://app"),
        ("kinesis.dynamodb.tableName", "table", lease("store"), "", "dynamodb://table"),
        ("kinesis.profile", "p", url_option("profile"), None, "p"),
        ("kinesis.roleArn", ARN, url_option("role_arn"), None, ARN),
        ("kinesis.wire", "json", url_option("wire"), "cbor", "json"),
        ("kinesis.misplaced", "drop", url_option("misplaced"), "keep", "drop"),
        ("kinesis.getRecords.fetchIntervalMs", "500", attrgetter("interval_seconds"), 0.25, 0.5),
        ("kinesis.maxFetchRecordsPerShard", "7", attrgetter("shard_rows"), 100_000, 7),
        ("maxRowsPerTrigger", "7", lease("trigger_rows"), 2**53, 7),
    ),
    DYNAMO: (
        ("lease.durationMs", "17000", lease("config.lease_seconds"), 10.0, 17.0),
        ("dynamodb.tableName", "other", lambda asked: asked["table"], "t", "other"),
        ("dynamodb.region", "eu-north-1", url_option("region"), None, "eu-north-1"),
        ("dynamodb.endpointUrl", "http://e", url_option("endpoint"), None, "http://e"),
        (
            "dynamodb.startingPosition",
            "1700000000000",
            lease("config.initial_position"),
            LATEST,
            at_timestamp(1_700_000_000_000),
        ),
        ("dynamodb.getRecords.fetchIntervalMs", "500", lambda asked: asked["spec"].interval_seconds, 0.25, 0.5),
        ("dynamodb.maxFetchRecordsPerShard", "7", lambda asked: asked["spec"].shard_rows, 100_000, 7),
        ("maxRowsPerTrigger", "7", lease("trigger_rows"), 2**53, 7),
    ),
    HUBS: (
        ("lease.durationMs", "17000", lease("config.lease_seconds"), 120.0, 17.0),
        ("minPartitions", "9", attrgetter("bounds.tasks"), 0, 9),
        ("eventhubs.namespace", "other", attrgetter("namespace"), "n", "other"),
        ("eventhubs.name", "other", attrgetter("hub"), "h", "other"),
        ("eventhubs.consumerGroup", "g", attrgetter("group"), "$Default", "g"),
        ("eventhubs.startingPosition", "-1", lease("config.initial_position"), LATEST, TRIM_HORIZON),
        ("eventhubs.endingPosition", "@latest", attrgetter("bounds.until"), None, Position("LATEST")),
        ("eventhubs.prefetchCount", "7", attrgetter("prefetch"), 1000, 7),
        ("maxEventsPerTrigger", "7", lease("trigger_rows"), 2**53, 7),
    ),
}
"""For each option: its name, a value, a function that reads the result, the default result, and that with the value."""

ELSEWHERE = {
    "test_spark_roles.py": {"kinesis.dynamodb.endpointUrl"},
    "test_options.py": {
        *(
            "lease.to",
            "kinesis.externalId",
            "lease.roleArn",
            "lease.externalId",
            "lease.profile",
            "eventhubs.connectionStringFile",
        )
    },
    "test_subscribed_queries.py": {"kinesis.consumerType", "kinesis.consumerName"},
}
"""Options that need another option, a file or a service, by the test file that tests them."""


def test_every_option_is_tested() -> None:
    tested = {row[0] for table in (IN_ALL, *OWN.values()) for row in table}
    declared = {option.name for source in READS for option in DECLARED[source] if option.in_docs}
    assert declared == tested | set.union(*ELSEWHERE.values())
    for file, names in ELSEWHERE.items():
        (path,) = TESTS.glob(f"*/{file}")
        assert [name for name in names if name not in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize(
    ("source", "tried"),
    [(source, tried) for source in READS for tried in (*IN_ALL, *OWN[source])],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
def test_option_does_what_the_reference_says(source: str, tried: OptionCase) -> None:
    parse, required_options = READS[source]
    name, value, read_result, default, expected = tried
    options = {"lease.cores": "5", "lease.fetchHost": "driver", **required_options}
    by_default, changed = read_result(parse(options)), read_result(parse({**options, name: value}))
    assert (by_default, changed) == (default, expected)
    assert by_default != changed
