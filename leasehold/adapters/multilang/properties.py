"""Reads the `.properties` file of a MultiLangDaemon, and defines what each key means here.

Each key is supported in one of four ways:

- Taken: the key means the same as in Java.
- Nearest: the key has a close equivalent, which `NEAREST_EQUIVALENTS` contains.
- Ignored: the key has no meaning here. `IGNORED_REASONS` contains the reason.
- Refused: the daemon doesn't start, because otherwise it would read or write the wrong data.

A key that is not a key of the KCL is reported with a suggestion, while Java silently ignores it. The values 0 and
`false` are ordinary values here, while in Java they leave a key at its default.
"""

import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import javaproperties
from attrs import field, frozen

from leasehold.adapters.inputs import check_time_ms
from leasehold.adapters.multilang.credentials import Credentials, parse_credentials
from leasehold.adapters.multilang.protocol import DEFAULT_MAX_RECORDS
from leasehold.adapters.options import Options
from leasehold.adapters.sources.kinesis.stream_arn import parse_stream_address
from leasehold.balancer.model import Position, at_timestamp
from leasehold.stores.printable import did_you_mean, printable

SupportLevel = Literal["taken", "nearest", "ignored", "unknown"]

POLLING_KEYS = ("maxRecords", "idleTimeBetweenReadsInMillis", "retryGetRecordsInSeconds", "maxGetRecordsThreadPool")
"""If one of these keys is set, Java polls. Otherwise, Java reads by enhanced fan-out."""

OWN_SCHEDULE_REASON = "leasehold schedules these reads itself"
ONLY_LEADER_REASON = "only Java's leader uses it"
MIGRATION_REASON = "leasehold reads the leases of all KCL versions"
LIMITS_REASON = "the service's own limits are kept"

IGNORED_REASONS: Mapping[str, str] = {
    "processingLanguage": "it only appears in the user agent",
    "maxActiveThreads": "children are served by one event loop, without a thread for each",
    **dict.fromkeys(
        (
            "parentShardPollIntervalMillis",
            "shardSyncIntervalMillis",
            "leaseAssignmentIntervalMillis",
            "listShardsBackoffTimeInMillis",
            "maxListShardsRetryAttempts",
            "schedulerInitializationBackoffTimeMillis",
            "taskBackoffTimeMillis",
            "maxLeaseRenewalThreads",
            "skipShardSyncAtWorkerInitializationIfLeasesExist",
            "leaseTableScanTotalSegments",
            "enablePriorityLeaseAssignment",
        ),
        OWN_SCHEDULE_REASON,
    ),
    "cleanupLeasesUponShardCompletion": "leases of finished shards are deleted once their children are read",
    "ignoreUnexpectedChildShards": "children are those that the service reports",
    "initialLeaseTableReadCapacity": "a new table is billed on demand",
    "initialLeaseTableWriteCapacity": "a new table is billed on demand",
    **dict.fromkeys(
        ("millisBehindLatestThresholdForReducedTps", "retryGetRecordsInSeconds", "maxGetRecordsThreadPool"),
        LIMITS_REASON,
    ),
    **dict.fromkeys(
        ("metricsLevel", "metricsBufferTimeMillis", "metricsMaxQueueSize", "metricsEnabledDimensions"),
        "nothing is sent to CloudWatch; OTEL_METRICS_EXPORTER says where metrics go",
    ),
    "validateSequenceNumberBeforeCheckpointing": "Java does not use it either; checkpoints out of range are rejected",
    "shardPrioritization": "parents are read before their children",
    **dict.fromkeys(
        ("clientVersionConfig", "migrateAllEntitiesToLeaseTable", "tableMigrationCompleteBakeTimeSeconds"),
        MIGRATION_REASON,
    ),
    "isGracefulLeaseHandoffEnabled": "leases always move by agreement if the owner responds",
    "gracefulLeaseHandoffTimeoutMillis": "the next owner's timeout follows from the lease settings",
    **dict.fromkeys(
        (
            f"{table}{part}"
            for table in ("coordinatorState", "workerMetrics")
            for part in (
                "TableName",
                "BillingMode",
                "ReadCapacity",
                "WriteCapacity",
                "PointInTimeRecoveryEnabled",
                "DeletionProtectionEnabled",
                "Tags",
            )
        ),
        ONLY_LEADER_REASON,
    ),
    **dict.fromkeys(
        (
            "inMemoryWorkerMetricsCaptureFrequencyMillis",
            "workerMetricsReporterFreqInMillis",
            "noOfPersistedMetricsPerWorkerMetrics",
            "disableWorkerMetrics",
            "maxThroughputPerHostKBps",
            "dampeningPercentage",
            "reBalanceThresholdPercentage",
            "allowThroughputOvershoot",
            "varianceBalancingFrequency",
            "workerMetricsEMAAlpha",
            "staleWorkerMetricsEntryCleanupDuration",
        ),
        ONLY_LEADER_REASON,
    ),
    "AwsCredentialsProviderCloudWatch": "nothing is sent to CloudWatch",
}

CREDENTIALS_KEYS = ("AwsCredentialsProvider", "AwsCredentialsProviderDynamoDB")

EMPTY_LISTS_KEY = "callProcessRecordsEvenForEmptyRecordList"

_TAKEN_KEYS = (
    "executableName",
    "applicationName",
    "streamName",
    "streamArn",
    "tableName",
    "workerId",
    "workerIdentifier",
    "regionName",
    "kinesisEndpoint",
    "dynamoDBEndpoint",
    "initialPositionInStream",
    "initialPositionInStreamExtended",
    "failoverTimeMillis",
    "maxLeasesForWorker",
    "maxRecords",
    EMPTY_LISTS_KEY,
    "retrievalMode",
    "fanoutConfig.consumerName",
    "fanoutConfig.consumerArn",
    "kinesisClient.endpointOverride",
    "kinesisClient.region",
    "dynamoDbClient.endpointOverride",
    "dynamoDbClient.region",
)
NEAREST_EQUIVALENTS: Mapping[str, str] = {
    "timeoutInSeconds": "a child that sends nothing for this long is killed and replaced",
    "shutdownGraceMillis": "how long children may checkpoint when the daemon stops",
    "maxLeasesToStealAtOneTime": "max_steals",
    "idleTimeBetweenReadsInMillis": "poll_seconds of the source",
    "logWarningForTaskAfterMillis": "slow_seconds",
}
_REFUSED_KEYS = (
    "leaseTableDeletionProtectionEnabled",
    "leaseTablePitrEnabled",
)
KEYS = (*_TAKEN_KEYS, *NEAREST_EQUIVALENTS, *IGNORED_REASONS, *_REFUSED_KEYS, *CREDENTIALS_KEYS)

_VARIABLE_PATTERN = re.compile(r"\$\{(\w+)\}")


@frozen
class PropertySupport:
    """A key in the file, and how it is supported."""

    key: str
    level: SupportLevel
    meaning: str = ""


@frozen
class MultiLangSettings:
    """The settings in a file.

    Attributes:
        argv: The program of a child and its arguments.
        source: The URL of the source.
        store: The URL of the store.
        credentials: The credentials for the source.
        table_credentials: The credentials for the store.
        options: The options of the worker, as in Python.
        max_records: The maximum number of records in a message.
        send_empty: Whether children also get messages for reads without records.
        timeout_seconds: A child that doesn't respond for this long is killed; None for no limit.
        support: How each key is supported, in the order of the file.
    """

    argv: tuple[str, ...]
    source: str
    store: str
    credentials: Credentials
    table_credentials: Credentials
    options: Options
    max_records: int
    send_empty: bool
    timeout_seconds: float | None
    support: tuple[PropertySupport, ...]

    def support_table(self) -> str:
        """Return the table that is printed at startup, with a line per key but without values, which may be secret."""
        key_width = max(len(row.key) for row in self.support)
        return "\n".join(f"{row.key:<{key_width}}  {row.level:<7}  {row.meaning}".rstrip() for row in self.support)


def read_properties(
    path: Path, settings: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the keys and values in a file, overridden by settings.

    Args:
        path: The file.
        settings: Settings of the form `key=value` that override the values in the file.
        environment: The variables that replace `${NAME}` in values; None to leave values unchanged.

    Raises:
        ValueError: If the file, a setting or a value is invalid. The message begins with its name.
    """
    try:
        properties = javaproperties.load(BytesIO(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read: {error.strerror}") from None
    except javaproperties.InvalidUEscapeError as error:
        raise ValueError(
            f"{path}: {error.escape!r} is not a character; write \\u and four hexadecimal digits"
        ) from None
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"--set: {setting!r} is not of the form key=value")
        properties[key.strip()] = value
    if environment is None:
        return properties
    for key, value in properties.items():
        for name in _VARIABLE_PATTERN.findall(value):
            if name not in environment:
                raise ValueError(f"{key}: ${{{name}}} is not in the environment")
    return {key: _VARIABLE_PATTERN.sub(lambda name: environment[name[1]], value) for key, value in properties.items()}


def interpret_properties(properties: Mapping[str, str]) -> MultiLangSettings:
    """Interpret these keys. Raises ValueError for the first key that is missing, wrong or refused."""
    return _PropertiesInterpreter(properties).read_settings()


@frozen
class _PropertiesInterpreter:
    """Interprets the keys of one file, and collects how each is supported."""

    properties: Mapping[str, str]
    support: dict[str, PropertySupport] = field(factory=dict)

    def read_settings(self) -> MultiLangSettings:
        for key in self.properties:
            self.support[key] = self._find_support(key)
        name = self._read_required("applicationName")
        argv = tuple(word for word in self._read_required("executableName").split(" ") if word)
        credentials, table_credentials = self._read_credentials()
        options = Options(worker=self._read_text("workerId") or self._read_text("workerIdentifier"))
        options["initial_position"] = self._read_initial_position()
        if (lease_ms := self._read_integer("failoverTimeMillis", 1)) is not None:
            options["lease_seconds"] = lease_ms / 1000
        if (grace_ms := self._read_integer("shutdownGraceMillis", 0)) is not None:
            options["drain_seconds"] = grace_ms / 1000
        if slow_ms := self._read_integer("logWarningForTaskAfterMillis", 0):
            options["slow_seconds"] = slow_ms / 1000
        options["set"] = {
            name: count
            for name, key in (("max_leases", "maxLeasesForWorker"), ("max_steals", "maxLeasesToStealAtOneTime"))
            if (count := self._read_integer(key, 1)) is not None
        }
        table_options = {
            "region": self._read_text("dynamoDbClient.region") or self._read_text("regionName"),
            "endpoint": self._read_text("dynamoDbClient.endpointOverride") or self._read_text("dynamoDBEndpoint"),
        }
        return MultiLangSettings(
            argv=argv,
            source=self._make_source_url(name),
            store=_make_url("dynamodb", self._read_text("tableName") or name, table_options),
            credentials=credentials,
            table_credentials=table_credentials,
            options=options,
            max_records=self._read_integer("maxRecords", 1) or DEFAULT_MAX_RECORDS,
            send_empty=self._read_flag(EMPTY_LISTS_KEY),
            timeout_seconds=self._read_integer("timeoutInSeconds", 1),
            support=tuple(self.support.values()),
        )

    def _find_support(self, key: str) -> PropertySupport:
        if key in NEAREST_EQUIVALENTS:
            return PropertySupport(key, "nearest", NEAREST_EQUIVALENTS[key])
        if key in IGNORED_REASONS:
            return PropertySupport(key, "ignored", IGNORED_REASONS[key])
        if key in _REFUSED_KEYS:
            if self._read_flag(key):
                raise ValueError(f"{key}: set it on the table itself; leasehold creates tables without it")
            return PropertySupport(key, "taken")
        if key in _TAKEN_KEYS or key in CREDENTIALS_KEYS:
            return PropertySupport(key, "taken")
        if key.startswith("fanoutConfig."):
            return PropertySupport(key, "ignored", LIMITS_REASON)
        if key.startswith("cloudWatchClient."):
            return PropertySupport(key, "ignored", IGNORED_REASONS["AwsCredentialsProviderCloudWatch"])
        if key.startswith(("kinesisClient.", "dynamoDbClient.", "kinesisCredentialsProvider.")):
            raise ValueError(f"{key}: it configures Java's SDK; use botocore's environment variables instead")
        return PropertySupport(key, "unknown", f"KCL has no such key{did_you_mean(key, KEYS)}")

    def _read_text(self, key: str) -> str | None:
        return self.properties.get(key, "").strip() or None

    def _read_required(self, key: str) -> str:
        if (value := self._read_text(key)) is None:
            hint = did_you_mean(key, [name for name, support in self.support.items() if support.level == "unknown"])
            raise ValueError(f"{key}: it is missing{hint}")
        return value

    def _read_integer(self, key: str, minimum: int) -> int | None:
        if (value := self._read_text(key)) is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,18}", value) or int(value) < minimum:
            raise ValueError(f"{key}: {printable(value)!r} is not a whole number of at least {minimum}")
        return int(value)

    def _read_flag(self, key: str) -> bool:
        flag_text = (self._read_text(key) or "false").lower()
        if flag_text not in {"true", "false"}:
            raise ValueError(f"{key}: {printable(flag_text)!r} is neither true nor false")
        return flag_text == "true"

    def _read_initial_position(self) -> Position | str:
        position_name, timestamp_seconds = (
            self._read_text("initialPositionInStream"),
            self._read_integer("initialPositionInStreamExtended", 0),
        )
        if timestamp_seconds is not None:
            if position_name is not None:
                raise ValueError(
                    "initialPositionInStreamExtended: set either this or initialPositionInStream, not both"
                )
            return at_timestamp(
                check_time_ms(timestamp_seconds * 1000, "initialPositionInStreamExtended", in_seconds=True)
            )
        position_name = (position_name or "LATEST").upper()
        if position_name not in {"LATEST", "TRIM_HORIZON"}:
            raise ValueError(
                "initialPositionInStream: choose LATEST or TRIM_HORIZON; a time is initialPositionInStreamExtended, "
                "in seconds since 1970"
            )
        return position_name

    def _make_source_url(self, application: str) -> str:
        region = self._read_text("kinesisClient.region") or self._read_text("regionName")
        stream_name, arn = self._read_text("streamName"), self._read_text("streamArn")
        if arn is not None:
            parsed_arn = parse_stream_address(arn, None, "streamArn")
            if parsed_arn.arn is None:
                raise ValueError(f"streamArn: {printable(arn)!r} is not the ARN of a stream")
            stream_name = arn
            if region is not None and parsed_arn.region != region:  # as in the KCL's own sample file
                stream_name = parsed_arn.name
                meaning = f"its stream, but in {region}, because regionName takes precedence, as in Java"
                self.support["streamArn"] = PropertySupport("streamArn", "nearest", meaning)
            region = region or parsed_arn.region
            if "streamName" in self.support:
                self.support["streamName"] = PropertySupport("streamName", "ignored", "streamArn names the stream")
        elif stream_name is None:
            stream_name = self._read_required("streamName")
        idle_ms = self._read_integer("idleTimeBetweenReadsInMillis", 0)
        consumer = self._read_consumer(application)
        return _make_url("kinesis", stream_name, {
            "region": region,
            "endpoint": self._read_text("kinesisClient.endpointOverride") or self._read_text("kinesisEndpoint"),
            "consumer": consumer,
            "poll_seconds": None if idle_ms is None or consumer else f"{idle_ms / 1000:g}",
        })  # fmt: skip

    def _read_consumer(self, application: str) -> str | None:
        """Return the consumer of enhanced fan-out, or None if shards are polled."""
        retrieval_mode = (self._read_text("retrievalMode") or "DEFAULT").upper()
        if retrieval_mode not in {"DEFAULT", "POLLING", "FANOUT"}:
            raise ValueError("retrievalMode: choose DEFAULT, POLLING or FANOUT")
        if retrieval_mode == "POLLING" or (
            retrieval_mode == "DEFAULT" and any(key in self.properties for key in POLLING_KEYS)
        ):
            return None
        consumer = (
            self._read_text("fanoutConfig.consumerArn") or self._read_text("fanoutConfig.consumerName") or application
        )
        price_note = "enhanced fan-out is billed for each shard-hour and GB; POLLING is not"
        self.support["retrievalMode"] = PropertySupport(
            "retrievalMode", "taken", f"read as consumer {printable(consumer)!r}: {price_note}"
        )
        return consumer

    def _read_credentials(self) -> tuple[Credentials, Credentials]:
        """Return the credentials for the stream and for the table. By default the table uses those of the stream."""
        credentials: dict[str, Credentials] = {}
        for name_in_file in self.properties:
            # Java ignores the case of these keys, unlike that of all other keys.
            credentials_key = next((name for name in CREDENTIALS_KEYS if name.lower() == name_in_file.lower()), None)
            if credentials_key is None or (value := self._read_text(name_in_file)) is None:
                continue
            try:
                credentials[credentials_key] = parse_credentials(value)
            except ValueError as error:
                raise ValueError(f"{name_in_file}: {error}") from None
            self.support[name_in_file] = PropertySupport(name_in_file, "taken", str(credentials[credentials_key]))
        stream_credentials = credentials.get(CREDENTIALS_KEYS[0], Credentials())
        return stream_credentials, credentials.get(CREDENTIALS_KEYS[1], stream_credentials)


def _make_url(scheme: str, name: str, options: Mapping[str, str | None]) -> str:
    query = urlencode({name: value for name, value in options.items() if value is not None}, safe="/:")
    return f"{scheme}://{quote(name)}" + (f"?{query}" if query else "")
