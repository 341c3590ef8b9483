"""Tests how the keys of a MultiLangDaemon's `.properties` file are interpreted."""

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.multilang.properties import (
    IGNORED_REASONS,
    KEYS,
    NEAREST_EQUIVALENTS,
    MultiLangSettings,
    PropertySupport,
    interpret_properties,
    read_properties,
)
from leasehold.adapters.sources.urls import source_address
from leasehold.balancer.model import at_timestamp

REQUIRED_PROPERTIES = {"executableName": "app.py", "applicationName": "app", "streamName": "clicks"}

# All keys that the KCL's own tests of its property mapping set, with their values, for KCL 3 and KCL 2.
KCL3 = """
executableName = sample_kclpy_app.py
streamArn = arn:aws:kinesis:us-east-5:000000000000:stream/kclpysample
streamName = kclpysample
applicationName = MultiLangTest
AwsCredentialsProvider = DefaultCredentialsProvider
processingLanguage = python/3.8
initialPositionInStream = TRIM_HORIZON
regionName = us-east-1
failoverTimeMillis = 10000
workerId = "workerId"
shardSyncIntervalMillis = 60000
maxRecords = 10000
idleTimeBetweenReadsInMillis = 1000
callProcessRecordsEvenForEmptyRecordList = false
parentShardPollIntervalMillis = 10000
cleanupLeasesUponShardCompletion = true
taskBackoffTimeMillis = 500
metricsBufferTimeMillis = 10000
metricsMaxQueueSize = 10000
validateSequenceNumberBeforeCheckpointing = true
maxActiveThreads = -1
clientVersionConfig = CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2x
coordinatorStateTableName = MultiLangTest-CoordinatorState-CustomName
coordinatorStateBillingMode = PROVISIONED
coordinatorStateReadCapacity = 1000
coordinatorStateWriteCapacity = 500
gracefulLeaseHandoffTimeoutMillis = 10000
isGracefulLeaseHandoffEnabled = false
workerMetricsTableName = MultiLangTest-WorkerMetrics-CustomName
workerMetricsBillingMode = PROVISIONED
workerMetricsReadCapacity = 250
workerMetricsWriteCapacity = 90
inMemoryWorkerMetricsCaptureFrequencyMillis = 5000
workerMetricsReporterFreqInMillis = 60000
noOfPersistedMetricsPerWorkerMetrics = 50
disableWorkerMetrics = true
maxThroughputPerHostKBps = 10000
dampeningPercentage = 90
reBalanceThresholdPercentage = 5
allowThroughputOvershoot = false
varianceBalancingFrequency = 5
workerMetricsEMAAlpha = 0.18
staleWorkerMetricsEntryCleanupDuration = PT12H
"""
KCL2 = KCL3.partition("clientVersionConfig")[0].replace(
    "AwsCredentialsProvider = DefaultCredentialsProvider", "AWSCredentialsProvider = DefaultAWSCredentialsProviderChain"
)


def _interpret(**properties: str) -> MultiLangSettings:
    return interpret_properties(
        REQUIRED_PROPERTIES | {key.replace("__", "."): value for key, value in properties.items()}
    )


@pytest.mark.parametrize("text", [KCL2, KCL3])
def test_kcl_property_files_load(text: str, tmp_path: Path) -> None:
    """A file that works with the KCL's daemon also works here."""
    path = tmp_path / "app.properties"
    path.write_text(text)
    settings = interpret_properties(read_properties(path))
    assert (settings.source, settings.store) == (
        "kinesis://kclpysample?region=us-east-1&poll_seconds=1",
        "dynamodb://MultiLangTest?region=us-east-1",
    )
    assert settings.argv == ("sample_kclpy_app.py",)
    assert (settings.max_records, settings.timeout_seconds) == (10_000, None)
    assert [entry.key for entry in settings.support if entry.level == "unknown"] == []
    described = check_consumption_options(settings.source, settings.store, lambda _batch: None, settings.options)
    assert (described.me, described.config.lease_seconds) == ('"workerId"', 10.0)


def test_every_key_is_supported_or_reported() -> None:
    special_values = {"initialPositionInStream": "LATEST", "retrievalMode": "POLLING"}
    for key in KEYS:
        if key == "initialPositionInStreamExtended":
            continue
        value = special_values.get(key, "DefaultCredentialsProvider" if "Credentials" in key else "1")
        if key in {"leaseTableDeletionProtectionEnabled", "leaseTablePitrEnabled"} or key.startswith("callProcess"):
            value = "false"
        properties = REQUIRED_PROPERTIES | {
            key: "arn:aws:kinesis:us-east-1:000000000000:stream/s" if key == "streamArn" else value
        }
        assert key in {entry.key for entry in interpret_properties(properties).support if entry.level != "unknown"}


def test_file_without_a_polling_key_uses_fan_out() -> None:
    """Without a polling key, Java's daemon uses fan-out with the application's name. Polling would use up quota."""
    assert _interpret(regionName="eu-west-1").source == "kinesis://clicks?region=eu-west-1&consumer=app"
    assert _interpret(retrievalMode="polling").source == "kinesis://clicks"
    foreign_arn = "arn:aws:kinesis:eu-west-1:123456789012:stream/clicks"
    assert source_address(_interpret(retrievalMode="polling", streamArn=foreign_arn).source)[1] == foreign_arn
    assert _interpret(maxRecords="100").source == "kinesis://clicks"
    assert _interpret(maxRecords="100", retrievalMode="FanOut", fanoutConfig__consumerName="me").source == (
        "kinesis://clicks?consumer=me"
    )
    assert _interpret().support[-1] == PropertySupport(
        "retrievalMode", "taken", "read as consumer 'app': enhanced fan-out is billed for each shard-hour and GB; "
        "POLLING is not"
    )  # fmt: skip


def test_valid_properties_are_accepted() -> None:
    settings = _interpret(
        executableName="python  app.py  --x",
        tableName="leases",
        workerIdentifier="me",
        kinesisEndpoint="http://localhost:4567",
        dynamoDBEndpoint="http://localhost:8000",
        initialPositionInStreamExtended="1700000000",
        failoverTimeMillis="20000",
        maxLeasesForWorker="7",
        maxLeasesToStealAtOneTime="2",
        maxRecords="100",
        timeoutInSeconds="30",
        shutdownGraceMillis="0",
        logWarningForTaskAfterMillis="5000",
    )
    assert settings.argv == ("python", "app.py", "--x")
    assert settings.source == "kinesis://clicks?endpoint=http://localhost:4567"
    assert settings.store == "dynamodb://leases?endpoint=http://localhost:8000"
    assert (settings.max_records, settings.timeout_seconds) == (100, 30)
    assert settings.options == {
        "worker": "me",
        "initial_position": at_timestamp(1_700_000_000_000),
        "lease_seconds": 20.0,
        "drain_seconds": 0.0,
        "slow_seconds": 5.0,
        "set": {"max_leases": 7, "max_steals": 2},
    }


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"executableName": ""}, "executableName: it is missing"),
        (
            {"applicationName": "", "ApplicationName": "a"},
            "applicationName: it is missing; did you mean 'ApplicationName'?",
        ),
        ({"streamName": ""}, "streamName: it is missing"),
        ({"streamArn": "clicks"}, "streamArn: 'clicks' is not the ARN of a stream"),
        ({"maxRecords": "many"}, "maxRecords: 'many' is not a whole number of at least 1"),
        ({"maxRecords": "0"}, "maxRecords: '0' is not a whole number of at least 1"),
        (
            {"callProcessRecordsEvenForEmptyRecordList": "yes"},
            "callProcessRecordsEvenForEmptyRecordList: 'yes' is neither true nor false",
        ),
        (
            {"initialPositionInStreamExtended": "1700000000000"},
            "initialPositionInStreamExtended: 1700000000000 s since 1970 is after the year 9999; give it in seconds",
        ),
        (
            {"initialPositionInStreamExtended": "28333333"},
            "initialPositionInStreamExtended: 28333333 s since 1970 is 1970-11-24T22:22:13.000Z; give it in seconds",
        ),
        (
            {"initialPositionInStream": "LATEST", "initialPositionInStreamExtended": "5"},
            "initialPositionInStreamExtended: set either this or initialPositionInStream, not both",
        ),
        (
            {"initialPositionInStream": "AT_TIMESTAMP"},
            "initialPositionInStream: choose LATEST or TRIM_HORIZON; a time is initialPositionInStreamExtended,*",
        ),
        ({"retrievalMode": "PUSH"}, "retrievalMode: choose DEFAULT, POLLING or FANOUT"),
        (
            {"leaseTablePitrEnabled": "true"},
            "leaseTablePitrEnabled: set it on the table itself; leasehold creates tables without it",
        ),
        (
            {"kinesisClient.accountIdEndpointMode": "x"},
            "kinesisClient.accountIdEndpointMode: it configures Java's SDK; *",
        ),
        (
            {"AwsCredentialsProvider": "DefaultCredentialsProvider,com.acme.Vault|secret"},
            "AwsCredentialsProvider: 'Vault' is only available in a JVM; use DefaultCredentialsProvider, or *",
        ),
    ],
)  # fmt: skip
def test_unusable_properties_are_rejected(properties: dict[str, str], message: str) -> None:
    """A daemon must not start if it would not read the stream from where its file says."""
    with pytest.raises(ValueError, match=r"^\w+(\.\w+)?: ") as exception_info:
        interpret_properties(REQUIRED_PROPERTIES | properties)
    assert fnmatchcase(str(exception_info.value), message)


def test_syntax_matches_javas(tmp_path: Path) -> None:
    path = tmp_path / "app.properties"
    path.write_bytes(b"# a comment\n! another\na=1\nb:2\nc 3\n  d  =  4 \ne=5\\\n   6\nf=\\u2603\xe9\na=7\n\\:g=\n")
    assert read_properties(path) == {
        "a": "7", "b": "2", "c": "3", "d": "4 ", "e": "56", "f": "\u2603\xe9", ":g": "",
    }  # fmt: skip


def test_settings_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "app.properties"
    path.write_text("streamName = ${STREAM}\napplicationName = a\n")
    assert read_properties(path, ["applicationName=b=c"]) == {"streamName": "${STREAM}", "applicationName": "b=c"}
    assert read_properties(path, (), {"STREAM": "clicks"}) == {"streamName": "clicks", "applicationName": "a"}
    with pytest.raises(ValueError, match=r"^streamName: \$\{STREAM\} is not in the environment$"):
        read_properties(path, (), {})
    with pytest.raises(ValueError, match=r"^--set: 'x' is not of the form key=value$"):
        read_properties(path, ["x"])
    path.write_text("a = \\u12\n")
    with pytest.raises(ValueError, match=r"it cannot be read: |is not a character"):
        read_properties(path)
    with pytest.raises(ValueError, match=r"no\.properties: it cannot be read: No such file or directory$"):
        read_properties(tmp_path / "no.properties")


def test_table_names_unknown_keys_and_shows_no_values() -> None:
    table = _interpret(RetrievalMode="POLLING", timeoutInSeconds="77", processingLanguage="secret").support_table()
    assert table.splitlines()[3:6] == [
        "RetrievalMode       unknown  KCL has no such key; did you mean 'retrievalMode'?",
        f"timeoutInSeconds    nearest  {NEAREST_EQUIVALENTS['timeoutInSeconds']}",
        f"processingLanguage  ignored  {IGNORED_REASONS['processingLanguage']}",
    ]
    assert "secret" not in table


@given(st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=9)), st.text(max_size=20), max_size=6))
def test_any_file_loads_or_is_rejected_by_key(properties: dict[str, str]) -> None:
    """If a file is rejected, the error names the key."""
    expected_keys: object
    try:
        expected_keys = {entry.key for entry in interpret_properties(REQUIRED_PROPERTIES | properties).support}
    except ValueError as error:
        expected_keys = {str(error).partition(": ")[0]} | REQUIRED_PROPERTIES.keys() | properties.keys()
    assert expected_keys in (
        REQUIRED_PROPERTIES.keys() | properties.keys(),
        {"retrievalMode"} | REQUIRED_PROPERTIES.keys() | properties.keys(),
    )
