"""The `.properties` file of a MultiLangDaemon: what each of its keys means here, said once and in full.

Each key has one of four fates. Taken: it means here what it means in Java. Nearest: the nearest thing is done, and the
table says what. Ignored: it has no meaning here; the table says why. Refused: nothing starts, since records would be
read from another place, or written to one, than the file says. A key that KCL has not is named, with the one it may
have been meant for; Java passes over it without a word.

0 and `false` mean what they say; in Java they leave a key at its default.
"""

import re
from collections.abc import Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import javaproperties
from attrs import field, frozen

from leasehold.adapters.consuming import Options
from leasehold.adapters.inputs import checked_time
from leasehold.adapters.multilang.credentials import Credentials, credentials_of
from leasehold.adapters.multilang.protocol import MOST_RECORDS
from leasehold.adapters.sources.kinesis.stream_arn import stream_address
from leasehold.balancer.model import Position, at_timestamp
from leasehold.stores.printable import did_you_mean, printable

FateName = Literal["taken", "nearest", "ignored", "unknown"]

POLLING = ("maxRecords", "idleTimeBetweenReadsInMillis", "retryGetRecordsInSeconds", "maxGetRecordsThreadPool")
"""Where one of these is set, Java polls; where none is, it reads by enhanced fan-out."""

CADENCE = "leases and shards are looked at in a cadence of its own"
LEADER = "only Java's leader uses it"
MIGRATION = "leases of all versions of KCL are understood side by side"
LIMITS = "the service's own limits are kept"

IGNORED: Mapping[str, str] = {
    "processingLanguage": "it is text for a user agent",
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
        CADENCE,
    ),
    "cleanupLeasesUponShardCompletion": "leases of finished shards go once their children are read",
    "ignoreUnexpectedChildShards": "children are as the service says",
    "initialLeaseTableReadCapacity": "a new table is billed on demand",
    "initialLeaseTableWriteCapacity": "a new table is billed on demand",
    **dict.fromkeys(
        ("millisBehindLatestThresholdForReducedTps", "retryGetRecordsInSeconds", "maxGetRecordsThreadPool"), LIMITS
    ),
    **dict.fromkeys(
        ("metricsLevel", "metricsBufferTimeMillis", "metricsMaxQueueSize", "metricsEnabledDimensions"),
        "nothing is sent to CloudWatch; --metrics says where metrics go",
    ),
    "validateSequenceNumberBeforeCheckpointing": "Java does not use it either; what is out of range is refused",
    "shardPrioritization": "parents are read before their children",
    **dict.fromkeys(
        ("clientVersionConfig", "migrateAllEntitiesToLeaseTable", "tableMigrationCompleteBakeTimeSeconds"), MIGRATION
    ),
    "isGracefulLeaseHandoffEnabled": "leases always move by agreement where the owner answers",
    "gracefulLeaseHandoffTimeoutMillis": "an heir waits as long as its lease settings say",
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
        LEADER,
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
        LEADER,
    ),
    "AwsCredentialsProviderCloudWatch": "nothing is sent to CloudWatch",
}

CREDENTIALS = ("AwsCredentialsProvider", "AwsCredentialsProviderDynamoDB")

EMPTY = "callProcessRecordsEvenForEmptyRecordList"

_TAKEN = (
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
    EMPTY,
    "retrievalMode",
    "fanoutConfig.consumerName",
    "fanoutConfig.consumerArn",
    "kinesisClient.endpointOverride",
    "kinesisClient.region",
    "dynamoDbClient.endpointOverride",
    "dynamoDbClient.region",
)
NEAREST: Mapping[str, str] = {
    "timeoutInSeconds": "a child that does not answer for so long is killed, and its shard goes on with another",
    "shutdownGraceMillis": "at the end children have so long to checkpoint",
    "maxLeasesToStealAtOneTime": "max_steals",
    "idleTimeBetweenReadsInMillis": "poll_seconds of the source",
    "logWarningForTaskAfterMillis": "--slow-seconds",
}
_REFUSED = (
    "leaseTableDeletionProtectionEnabled",
    "leaseTablePitrEnabled",
)
KEYS = (*_TAKEN, *NEAREST, *IGNORED, *_REFUSED, *CREDENTIALS)

_VARIABLE = re.compile(r"\$\{(\w+)\}")


@frozen
class Support:
    """A key of the file, and what becomes of it."""

    key: str
    fate: FateName
    meaning: str = ""


@frozen
class MultiLangSettings:
    """The settings that the file asks for.

    argv             the program of a child, and its arguments
    source, store    URLs
    credentials, table_credentials
                     of the source, and of the store
    options          of the worker, as in Python
    most_records     no message has more
    empty            whether readings without a record are handed over, too
    timeout_seconds  a child that does not answer for longer is killed; None: it may take for ever
    fates            of every key, in the order of the file
    """

    argv: tuple[str, ...]
    source: str
    store: str
    credentials: Credentials
    table_credentials: Credentials
    options: Options
    most_records: int
    empty: bool
    timeout_seconds: float | None
    support: tuple[Support, ...]

    def table(self) -> str:
        """The fates, one a line, as they are said at the start. No value is shown: one may be a secret."""
        widest = max(len(each.key) for each in self.support)
        return "\n".join(f"{each.key:<{widest}}  {each.fate:<7}  {each.meaning}".rstrip() for each in self.support)


def read_properties(
    path: Path, settings: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The keys and values of the file, with these `key=value` in place of its own.

    environment  where `${NAME}` in a value is looked up; None: it stays as it is
    Raises ValueError naming the file or the setting.
    """
    try:
        found = javaproperties.load(BytesIO(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"{path}: it cannot be read: {error.strerror}") from None
    except javaproperties.InvalidUEscapeError as error:
        raise ValueError(f"{path}: {error.escape!r} is no character; write \\u and four digits") from None
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise ValueError(f"--set: {setting!r} is not of the form key=value")
        found[key.strip()] = value
    if environment is None:
        return found
    for key, value in found.items():
        for name in _VARIABLE.findall(value):
            if name not in environment:
                raise ValueError(f"{key}: ${{{name}}} is not in the environment")
    return {key: _VARIABLE.sub(lambda name: environment[name[1]], value) for key, value in found.items()}


def understood_properties(given: Mapping[str, str]) -> MultiLangSettings:
    """The meaning of these keys. Raises ValueError naming the first that is missing, wrong or refused."""
    return _Understanding(given).settings()


@frozen
class _Understanding:
    """The keys of one file, each looked at once."""

    given: Mapping[str, str]
    support: dict[str, Support] = field(factory=dict)

    def settings(self) -> MultiLangSettings:
        for key in self.given:
            self.support[key] = self._support(key)
        name = self._required("applicationName")
        argv = tuple(each for each in self._required("executableName").split(" ") if each)
        of_stream, of_table = self._credentials()
        options = Options(worker=self._text("workerId") or self._text("workerIdentifier"))
        options["initial_position"] = self._beginning()
        if (lease := self._whole("failoverTimeMillis", 1)) is not None:
            options["lease_seconds"] = lease / 1000
        if (grace := self._whole("shutdownGraceMillis", 0)) is not None:
            options["drain_seconds"] = grace / 1000
        if slow := self._whole("logWarningForTaskAfterMillis", 0):
            options["slow_seconds"] = slow / 1000
        options["set"] = {
            name: count
            for name, key in (("max_leases", "maxLeasesForWorker"), ("max_steals", "maxLeasesToStealAtOneTime"))
            if (count := self._whole(key, 1)) is not None
        }
        of_tables = {
            "region": self._text("dynamoDbClient.region") or self._text("regionName"),
            "endpoint": self._text("dynamoDbClient.endpointOverride") or self._text("dynamoDBEndpoint"),
        }
        return MultiLangSettings(
            argv=argv,
            source=self._source(name),
            store=_url("dynamodb", self._text("tableName") or name, of_tables),
            credentials=of_stream,
            table_credentials=of_table,
            options=options,
            most_records=self._whole("maxRecords", 1) or MOST_RECORDS,
            empty=self._flag(EMPTY),
            timeout_seconds=self._whole("timeoutInSeconds", 1),
            support=tuple(self.support.values()),
        )

    def _support(self, key: str) -> Support:
        if key in NEAREST:
            return Support(key, "nearest", NEAREST[key])
        if key in IGNORED:
            return Support(key, "ignored", IGNORED[key])
        if key in _REFUSED:
            if self._flag(key):
                raise ValueError(f"{key}: set it on the table itself; a table that is made here has it not")
            return Support(key, "taken")
        if key in _TAKEN or key in CREDENTIALS:
            return Support(key, "taken")
        if key.startswith("fanoutConfig."):
            return Support(key, "ignored", LIMITS)
        if key.startswith("cloudWatchClient."):
            return Support(key, "ignored", IGNORED["AwsCredentialsProviderCloudWatch"])
        if key.startswith(("kinesisClient.", "dynamoDbClient.", "kinesisCredentialsProvider.")):
            raise ValueError(
                f"{key}: it calls a method of Java's SDK; botocore's environment variables may do the same"
            )
        return Support(key, "unknown", f"KCL has no such key{did_you_mean(key, KEYS)}")

    def _text(self, key: str) -> str | None:
        return self.given.get(key, "").strip() or None

    def _required(self, key: str) -> str:
        if (value := self._text(key)) is None:
            near = did_you_mean(key, [each for each, fate in self.support.items() if fate.fate == "unknown"])
            raise ValueError(f"{key}: it is missing{near}")
        return value

    def _whole(self, key: str, least: int) -> int | None:
        if (value := self._text(key)) is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,18}", value) or int(value) < least:
            raise ValueError(f"{key}: {printable(value)!r} is no whole number from {least} on")
        return int(value)

    def _flag(self, key: str) -> bool:
        value = (self._text(key) or "false").lower()
        if value not in {"true", "false"}:
            raise ValueError(f"{key}: {printable(value)!r} is neither true nor false")
        return value == "true"

    def _beginning(self) -> Position | str:
        name, seconds = self._text("initialPositionInStream"), self._whole("initialPositionInStreamExtended", 0)
        if seconds is not None:
            if name is not None:
                raise ValueError(
                    "initialPositionInStreamExtended: leave initialPositionInStream out; it is one or the other"
                )
            return at_timestamp(checked_time(seconds * 1000, "initialPositionInStreamExtended (in seconds)"))
        name = (name or "LATEST").upper()
        if name not in {"LATEST", "TRIM_HORIZON"}:
            raise ValueError(
                "initialPositionInStream: choose LATEST or TRIM_HORIZON; a time is initialPositionInStreamExtended, "
                "in seconds since 1970"
            )
        return name

    def _source(self, application: str) -> str:
        region = self._text("kinesisClient.region") or self._text("regionName")
        name, arn = self._text("streamName"), self._text("streamArn")
        if arn is not None:
            found = stream_address(arn, None, "streamArn")
            if found.arn is None:
                raise ValueError(f"streamArn: {printable(arn)!r} is no ARN of a stream")
            name = arn
            if region is not None and found.region != region:  # as in the KCL's own sample file
                name = found.name
                meaning = f"its stream, but in {region}: regionName says so, as in Java"
                self.support["streamArn"] = Support("streamArn", "nearest", meaning)
            region = region or found.region
            if "streamName" in self.support:
                self.support["streamName"] = Support("streamName", "ignored", "streamArn says which stream")
        elif name is None:
            name = self._required("streamName")
        idle = self._whole("idleTimeBetweenReadsInMillis", 0)
        consumer = self._consumer(application)
        return _url("kinesis", name, {
            "region": region,
            "endpoint": self._text("kinesisClient.endpointOverride") or self._text("kinesisEndpoint"),
            "consumer": consumer,
            "poll_seconds": None if idle is None or consumer else f"{idle / 1000:g}",
        })  # fmt: skip

    def _consumer(self, application: str) -> str | None:
        """The consumer of enhanced fan-out; None where shards are polled."""
        mode = (self._text("retrievalMode") or "DEFAULT").upper()
        if mode not in {"DEFAULT", "POLLING", "FANOUT"}:
            raise ValueError("retrievalMode: choose DEFAULT, POLLING or FANOUT")
        if mode == "POLLING" or (mode == "DEFAULT" and any(key in self.given for key in POLLING)):
            return None
        consumer = self._text("fanoutConfig.consumerArn") or self._text("fanoutConfig.consumerName") or application
        price = "enhanced fan-out is billed for each shard-hour and GB; POLLING is not"
        self.support["retrievalMode"] = Support(
            "retrievalMode", "taken", f"read as consumer {printable(consumer)!r}: {price}"
        )
        return consumer

    def _credentials(self) -> tuple[Credentials, Credentials]:
        """The credentials of the stream and of the table; one pair serves both where the file names no other."""
        found: dict[str, Credentials] = {}
        for given in self.given:
            # Java finds these keys in any case, and no others.
            key = next((each for each in CREDENTIALS if each.lower() == given.lower()), None)
            if key is None or (value := self._text(given)) is None:
                continue
            try:
                found[key] = credentials_of(value)
            except ValueError as error:
                raise ValueError(f"{given}: {error}") from None
            self.support[given] = Support(given, "taken", str(found[key]))
        of_stream = found.get(CREDENTIALS[0], Credentials())
        return of_stream, found.get(CREDENTIALS[1], of_stream)


def _url(scheme: str, place: str, options: Mapping[str, str | None]) -> str:
    told = urlencode({name: value for name, value in options.items() if value is not None}, safe="/:")
    return f"{scheme}://{quote(place)}" + (f"?{told}" if told else "")
