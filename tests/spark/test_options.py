"""Options work as users of other connectors write them, and impossible options get errors that name the option."""

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast
from zipfile import ZipFile

import pytest
from pyspark.sql.types import StringType, StructField, StructType

import leasehold
from leasehold.adapters.spark.event_hubs.options import parse_event_hubs_options
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.kinesis.options import parse_kinesis_options
from leasehold.adapters.spark.options import Address, OptionReader, SparkOption
from leasehold.adapters.spark.registration import read_driver_address
from leasehold.balancer.model import TRIM_HORIZON, Position, at_timestamp
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECTION = "Endpoint=sb://namespace.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey=hush=;EntityPath=h"
KINESIS = {"kinesis.streamname": "s", "lease.applicationname": "orders"}


def test_kcl_application_is_joined_by_its_name() -> None:
    parsed_options = parse_kinesis_options(
        {
            **KINESIS,
            "kinesis.region": "eu-west-1",
            "kinesis.startingposition": "earliest",
            "lease.rules": "kcl",
            "lease.maxleases": "7",
            "lease.durationms": "20000",
        }
    )
    assert (parsed_options.stream, parsed_options.region, parsed_options.lease.store) == (
        "s",
        "eu-west-1",
        "dynamodb://orders?region=eu-west-1",
    )
    assert (parsed_options.lease.config.rules, parsed_options.lease.config.lease_seconds) == (Kcl(max_leases=7), 20.0)
    assert parsed_options.lease.config.initial_position == TRIM_HORIZON


def test_stream_and_lease_table_have_separate_credentials() -> None:
    arn = "arn:aws:iam::123456789012:role/reader"
    credential_options = {"kinesis.roleArn": arn, "kinesis.externalId": "x-17", "lease.profile": "leases"}
    parsed_options = parse_kinesis_options({**KINESIS, **credential_options})
    assert {name: parsed_options.url_options[name] for name in ("role_arn", "external_id")} == {
        "role_arn": arn,
        "external_id": "x-17",
    }
    assert parsed_options.lease.store == "dynamodb://orders?profile=leases"
    parsed_options = parse_kinesis_options({**KINESIS, "lease.roleArn": arn, "lease.externalId": "x-17"})
    assert (
        parsed_options.lease.store
        == "dynamodb://orders?role_arn=arn%3Aaws%3Aiam%3A%3A123456789012%3Arole%2Freader&external_id=x-17"
    )
    options_with_bucket = {"kinesis.streamname": "s", "lease.store": "s3://leases/orders", "lease.profile": "leases"}
    with pytest.raises(ValueError, match=r"in lease\.store, write role_arn="):
        parse_kinesis_options(options_with_bucket)


def test_query_limits_its_shards_by_its_cores() -> None:
    parsed_options = parse_kinesis_options({**KINESIS, "lease.cores": "40", "lease.maxLeasesPerCore": "2"})
    assert parsed_options.lease.config.rules == Minimal(max_leases=80)
    assert [parsed_options.lease.count_tasks(shards) for shards in (0, 1, 40, 81)] == [0, 1, 40, 27]
    with pytest.raises(ValueError, match=r"or lease\.maxLeases, not both"):
        parse_kinesis_options({**KINESIS, "lease.maxLeases": "3", "lease.maxLeasesPerCore": "2"})


@pytest.mark.parametrize(
    "text",
    ["AT_TIMESTAMP 1700000000000", '{"at_timestamp": "2023-11-14T22:13:20Z"}', '{"AT_TIMESTAMP": 1700000000000}'],
)
def test_time_may_be_written_as_in_other_connectors(text: str) -> None:
    parsed_options = parse_kinesis_options({**KINESIS, "kinesis.startingPosition": text})
    assert parsed_options.lease.config.initial_position == at_timestamp(1_700_000_000_000)


@pytest.mark.parametrize(
    ("name", "value", "error_text"),
    [
        ("kinesis.getrecords.fetchintervalms", "100", "'100' is not a whole number from 223"),  # K5
        ("kinesis.stsrolearn", "arn", "unknown; did you mean kinesis.roleArn?"),
        ("kinesis.rolearn", "reader", "write arn:aws:iam::ACCOUNT:role/NAME"),
        ("lease.externalid", "x-17", "it goes with a role; give lease.roleArn, or leave it out"),
        (
            "kinesis.startingposition",
            "yesterday",
            "'yesterday' is none of TRIM_HORIZON, EARLIEST, LATEST; write a time as AT_TIMESTAMP 2026",
        ),
        ("kinesis.startingposition", '{"at_timestamp": "25/06/2020 10:23"}', "write a time as"),
        ("lease.store", "memory://x", "exists within one process"),
        ("lease.maxleases", "0", "'0' is not a whole number"),
        ("lease.maxleases", "9" * 5000, "' is not a whole number"),
        ("kinesis.startingposition", '{"at_timestamp": ' + "[" * 20_000, "not the JSON of a position"),
        ("lease.ifrecreated", "NOW", "'NOW' is neither TRIM_HORIZON nor LATEST"),
        ("lease.rules", "fair", "'fair' is not one of minimal, kcl, kcl-rust, event-hubs"),
        ("lease.transport", "", "it is empty"),
        ("kinesis.stream", "s", "unknown; choose among kinesis.consumerName"),
        ("initialposition", "latest", "unknown; did you mean kinesis.startingPosition?"),
        ("streamname", "s", "unknown; did you mean kinesis.streamName?"),
        ("kinesis.consumertype", "efo", "name the consumer with kinesis.consumerName"),
        ("kinesis.consumername", "app", "set kinesis.consumerType to SubscribeToShard"),
        ("consumermode", "efo", "unknown; did you mean kinesis.consumerType?"),
        ("lease.transport", "spool", "'spool' is not one of auto, fetch, embedded"),
        ("lease.transport", "fetch", "give lease.fetchHost"),
        ("lease.fetchport", "70000", "is not a whole number from 1 to 65535"),
    ],
)
def test_bad_option_is_named(name: str, value: str, error_text: str) -> None:
    with pytest.raises(ValueError, match="option") as exc_info:
        parse_kinesis_options({**KINESIS, name: value})
    message = str(exc_info.value)
    assert message.lower().startswith(f"option {name}")
    assert error_text in message


def test_connection_string_names_the_hub_and_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The secrets of a connection string do not appear in logs or errors. They may also be in a file."""
    store_options, file = {"lease.store": "azblob://account/leases?x=hush"}, tmp_path / "hub"
    monkeypatch.setenv("EVENTHUBS_CONNECTION_STRING", CONNECTION)
    parsed_options = parse_event_hubs_options(store_options)
    assert (parsed_options.namespace, parsed_options.hub, parsed_options.group) == (
        "namespace.servicebus.windows.net",
        "h",
        "$Default",
    )
    assert "hush" not in repr(parsed_options)
    file.write_text(CONNECTION.replace("EntityPath=h", "EntityPath=another") + "\n")
    options_from_file = parse_event_hubs_options({**store_options, "eventhubs.connectionStringFile": str(file)})
    assert (options_from_file.hub, options_from_file.secret) == ("another", file.read_text().strip())


@pytest.mark.parametrize(
    ("options", "error_text"),
    [
        ({"eventhubs.connectionString": CONNECTION}, "option eventhubs.connectionString: Spark would show it"),
        ({"EVENTHUBS.CONNECTIONSTRING": CONNECTION}, "option eventhubs.connectionString: Spark would show it"),
        ({"eventhubs.connectionStringFile": "nowhere"}, "option eventhubs.connectionStringFile: 'nowhere' cannot be"),
        ({}, "EVENTHUBS_CONNECTION_STRING: this is not an Event Hubs connection string"),
    ],
)
def test_secret_is_rejected_where_spark_would_show_it(
    options: dict[str, str], error_text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark shows a signature in its plans, and any secret on the page of a Connect server."""
    monkeypatch.setenv("EVENTHUBS_CONNECTION_STRING", "hush")
    with pytest.raises(ValueError, match="^" + re.escape(error_text)) as exc_info:
        parse_event_hubs_options({**options, "lease.store": "sqlite://x"})
    assert "hush" not in str(exc_info.value)


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, None),
        ({"lease.fetchHost": "driver"}, Address("driver", "driver")),
        (
            {"lease.fetchHost": "driver", "lease.fetchBindHost": "192.0.2.1", "lease.fetchPort": "7"},
            Address("driver", "192.0.2.1", 7),
        ),
        ({"lease.fetchHost": "driver", "lease.transport": "embedded"}, None),
    ],
    ids=["unknown", "as Spark", "bound elsewhere", "not wanted"],
)
def test_rows_are_fetched_if_the_driver_is_known(options: dict[str, str], address: Address | None) -> None:
    """If tasks can fetch rows, they connect to an address on which the driver listens, and batches may exceed 4 MB."""
    assert parse_kinesis_options({**KINESIS, **options}).lease.fetch_address == address


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"spark.master": "local[4]", "spark.driver.host": "192.0.2.7"}, {"lease.fetchHost": "127.0.0.1"}),
        (
            {"spark.master": "spark://m:7077", "spark.driver.host": "192.0.2.7"},
            {"lease.fetchHost": "192.0.2.7", "lease.fetchBindHost": "192.0.2.7"},
        ),
        (
            {"spark.master": "k8s://x", "spark.driver.host": "driver-svc", "spark.driver.bindAddress": "10.0.0.2"},
            {"lease.fetchHost": "driver-svc", "lease.fetchBindHost": "10.0.0.2"},
        ),
        (
            {"spark.master": "yarn", "spark.driver.host": "[2001:db8::7]"},
            {"lease.fetchHost": "2001:db8::7", "lease.fetchBindHost": "2001:db8::7"},
        ),
        ({"spark.master": "yarn", "spark.driver.host": "h", "spark.network.crypto.enabled": "true"}, {}),
        ({"spark.master": "yarn"}, {}),
    ],
    ids=["this machine", "a cluster", "a bound address", "IPv6", "encrypted", "unknown"],
)
def test_address_is_that_of_sparks_own_driver(settings: dict[str, str], expected: dict[str, str]) -> None:
    """On a single machine, rows are fetched from the loopback address.

    If Spark encrypts its traffic, no address is used.
    """

    class Session:
        conf = settings

    assert read_driver_address(cast("SparkSession", Session)) == expected


def test_users_schema_is_rejected_at_once() -> None:
    source = KinesisLeased({**KINESIS, "lease.store": "sqlite://x"})
    with pytest.raises(ValueError, match=r"^schema: the columns are data, streamName, .* leave out \.schema"):
        source.streamReader(StructType([StructField("data", StringType())]))


@pytest.mark.parametrize(("options", "place"), [({}, "keep"), ({"kinesis.misplaced": "DROP"}, "drop")])
def test_misplaced_option_reaches_the_source(options: dict[str, str], place: str) -> None:
    assert parse_kinesis_options({**KINESIS, **options}).url_options["misplaced"] == place
    with pytest.raises(ValueError, match=r"^option kinesis.misplaced: 'whole' is not one of keep, drop$"):
        parse_kinesis_options({**KINESIS, "kinesis.misplaced": "whole"})


def test_query_takes_no_part_in_a_swap_of_lease_tables() -> None:
    """A repeated batch is recognized by the epochs of its leases, so the rows of a moved lease would be omitted."""
    with pytest.raises(ValueError, match=r"^option lease\.to: queries of Spark take no part in `leasehold swap`; stop"):
        parse_kinesis_options({**KINESIS, "lease.to": "sqlite:///there.db"})


def test_missing_dependencies_are_one_sentence() -> None:
    code = "import sys; sys.modules['attrs'] = None; import leasehold.adapters.spark"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    (last_line,) = completed.stderr.strip().splitlines()[-1:]
    assert last_line.startswith("ModuleNotFoundError: import of attrs halted")
    assert "--py-files ships it" in last_line
    assert "venv-pack and --archives" in last_line


def test_package_unpacked_by_spark_finds_its_zip(tmp_path: Path) -> None:
    """Spark does not tell tasks the path of a package that --py-files ships."""
    home = Path(leasehold.__file__).parents[1]
    root, zip_path = str(home), str(tmp_path / "shipped.zip")
    with ZipFile(zip_path, "w") as archive:
        for path in (home / "leasehold").rglob("*.py"):
            archive.write(path, str(path.relative_to(home)))
    without_root = f"import sys; sys.path = [each for each in sys.path if each != {root!r}]; "
    packing_code = (
        f"{without_root} sys.path.insert(0, {zip_path!r}); from leasehold.adapters.sources.call_timeouts import "
        "Backoff; "
        "from leasehold.adapters.spark.processes import make_recreator; from pyspark.cloudpickle import dumps; "
        "sys.stdout.buffer.write(dumps(make_recreator(Backoff, {})))"
    )
    packed = subprocess.run([sys.executable, "-c", packing_code], cwd=tmp_path, capture_output=True, check=True).stdout
    unpacking_code = (
        f"{without_root} import pickle; pickle.load(sys.stdin.buffer)(); "
        "sys.stdout.write(sys.modules['leasehold'].__file__)"
    )
    completed = subprocess.run(
        [sys.executable, "-c", unpacking_code], cwd=tmp_path, input=packed, capture_output=True, check=False
    )
    assert completed.stdout.decode() == f"{zip_path}/leasehold/__init__.py", completed.stderr.decode()[-500:]


def test_shards_start_at_their_own_positions() -> None:
    text = (
        '{"metadata": {"streamName": "s"}, "shardId-1": {"iteratorType": "AFTER_SEQUENCE_NUMBER", '
        '"iteratorPosition": "4957"}, "shardId-2": "TRIM_HORIZON", '
        '"shardId-3": {"iteratorType": "AT_TIMESTAMP", "iteratorPosition": "1700000000000"}, "default": "EARLIEST"}'
    )
    parsed_options = parse_kinesis_options({**KINESIS, "kinesis.startingPosition": text})
    assert parsed_options.start_positions == {
        "shardId-1": Position("4957", 2**31 - 1),
        "shardId-2": TRIM_HORIZON,
        "shardId-3": at_timestamp(1_700_000_000_000),
    }
    assert parsed_options.bounds.begins == TRIM_HORIZON
    for invalid_text in ('{"shardId-1": "LATEST"}', '{"shardId-1": {"iteratorType": "AFTER_SEQUENCE_NUMBER"}}'):
        with pytest.raises(ValueError, match=r"^option kinesis.startingPosition: shardId-1 begins at"):
            parse_kinesis_options({**KINESIS, "kinesis.startingPosition": invalid_text})
    with pytest.raises(ValueError, match=r"shardId-1 needs iteratorType and iteratorPosition$"):
        parse_kinesis_options({**KINESIS, "kinesis.startingPosition": '{"shardId-1": {"type": "x"}}'})


@pytest.mark.parametrize("absent", ["boto3", "azure"])
def test_formats_are_registered_without_another_clouds_library(absent: str) -> None:
    """If only one of the two extras is installed, `register` still offers the formats of the cloud that it is for."""
    formats = ("kinesis.data_source", "kinesis.table_changes", "event_hubs.data_source")
    blocking_statements = "; ".join(
        f"sys.modules[{name!r}] = None" for name in {absent, absent.replace("boto3", "botocore")}
    )
    imports = ", ".join(f"leasehold.adapters.spark.{format_name}" for format_name in formats)
    completed_process = subprocess.run(
        [sys.executable, "-c", f"import sys; {blocking_statements}; import {imports}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (completed_process.returncode, completed_process.stderr) == (0, "")


def test_number_may_be_each_of_its_limits() -> None:
    option = SparkOption("Number", "Count.", 4, minimum=2, maximum=9)
    assert [OptionReader({"nUMBER": text}, [option]).read_number("Number") for text in ("2", " 9 ")] == [2, 9]
    assert OptionReader({}, [option]).read_number("Number") == 4
    for text in ("1", "10", "-2", "2.0", "two"):
        with pytest.raises(ValueError, match="not a whole number from 2 to 9"):
            OptionReader({"Number": text}, [option]).read_number("Number")
    for text in ("", "  "):
        with pytest.raises(ValueError, match="it is empty"):
            OptionReader({"Number": text}, [option]).read_number("Number")


def test_option_is_unknown_until_it_is_read() -> None:
    options = OptionReader({"NAME": "x", "lease.other": "y"}, [SparkOption("name", "Name."), SparkOption("other", "")])
    with pytest.raises(ValueError, match="did you mean name"):
        options.reject_renamed({"Lease.Other": "name"})
    with pytest.raises(ValueError, match=r"option LEASE\.other: no"):
        options.reject_options({"LEASE.other": "no"})
    assert options.read_text("name") == "x"
    with pytest.raises(ValueError, match=r"option lease\.other: unknown; choose among name, other"):
        options.reject_unknown()


@pytest.mark.parametrize("shards_per_task", [0, 3])
@pytest.mark.parametrize("shards", [0, 1, 7, 8, 9, 100])
def test_tasks_have_room_for_all_shards(shards_per_task: int, shards: int) -> None:
    options = parse_kinesis_options(
        {"kinesis.streamName": "s", "lease.cores": "8"} | ({"shardsPerTask": "3"} if shards_per_task else {})
    )
    tasks = options.lease.count_tasks(shards)
    size = shards_per_task or max(1, -(-shards // 8))
    assert (tasks - 1) * size < shards <= tasks * size or shards == tasks == 0
