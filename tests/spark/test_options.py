"""What users of other connectors write, and what they are told when it cannot be."""

import re
from pathlib import Path

import pytest

from adapters.spark.event_hubs_options import event_hubs_options
from adapters.spark.kinesis_options import kinesis_options
from balancer.config import Kcl, Minimal
from balancer.model import TRIM_HORIZON, at_timestamp

CONNECTION = "Endpoint=sb://namespace.servicebus.windows.net/;SharedAccessKeyName=k;SharedAccessKey=hush=;EntityPath=h"
KINESIS = {"kinesis.streamname": "s", "lease.applicationname": "orders"}


def test_a_kcl_application_is_joined_by_its_name() -> None:
    """Without it a query would not meet the Java workers whose table it is to share."""
    asked = kinesis_options(
        {
            **KINESIS,
            "kinesis.region": "eu-west-1",
            "kinesis.startingposition": "earliest",
            "lease.rules": "kcl",
            "lease.maxleases": "7",
            "lease.durationms": "20000",
        }
    )
    assert (asked.stream, asked.region, asked.lease.store) == ("s", "eu-west-1", "dynamodb://orders?region=eu-west-1")
    assert (asked.lease.config.rules, asked.lease.config.lease_seconds) == (Kcl(max_leases=7), 20.0)
    assert asked.lease.config.initial_position == TRIM_HORIZON


def test_a_query_may_hold_as_many_shards_as_its_cores_can_carry() -> None:
    """Without it a laptop's query would be given as much of a stream as a large cluster's."""
    asked = kinesis_options({**KINESIS, "lease.cores": "40", "lease.maxLeasesPerCore": "2"})
    assert asked.lease.config.rules == Minimal(max_leases=80)
    assert [asked.lease.tasks(shards) for shards in (0, 1, 40, 81)] == [0, 1, 40, 27]
    with pytest.raises(ValueError, match=r"or lease\.maxLeases, not both"):
        kinesis_options({**KINESIS, "lease.maxLeases": "3", "lease.maxLeasesPerCore": "2"})


@pytest.mark.parametrize(
    "text",
    ["AT_TIMESTAMP 1700000000000", '{"at_timestamp": "2023-11-14T22:13:20Z"}', '{"AT_TIMESTAMP": 1700000000000}'],
)
def test_a_time_may_be_written_as_elsewhere(text: str) -> None:
    """Without it a query moved from another connector would start somewhere else."""
    asked = kinesis_options({**KINESIS, "kinesis.startingPosition": text})
    assert asked.lease.config.initial_position == at_timestamp(1_700_000_000_000)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kinesis.getrecords.fetchintervalms", "100", "'100' is not a whole number from 223"),  # K5
        ("kinesis.consumertype", "efo", "by GetRecords only"),
        ("kinesis.stsrolearn", "arn", "not supported"),
        ("kinesis.startingposition", "yesterday", "'yesterday' is none of TRIM_HORIZON"),
        ("kinesis.startingposition", '{"at_timestamp": "25/06/2020 10:23"}', "write a time as"),
        ("lease.store", "memory://x", "seen by one process only"),
        ("lease.maxleases", "0", "'0' is not a whole number"),
        ("lease.rules", "fair", "'fair' is not one of minimal, kcl, kcl-rust, event-hubs"),
        ("lease.transport", "", "it is empty"),
        ("kinesis.stream", "s", "unknown; choose among kinesis.consumerName"),
    ],
)
def test_a_bad_option_is_named(name: str, value: str, said: str) -> None:
    """Without it a user would have to guess which of thirty options is wrong."""
    with pytest.raises(ValueError, match="option") as caught:
        kinesis_options({**KINESIS, name: value})
    told = str(caught.value)
    assert told.lower().startswith(f"option {name}")
    assert said in told


def test_a_connection_string_says_where_and_is_never_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without it a secret would reach logs and error messages, or one that stands in a file could not be used."""
    store, file = {"lease.store": "azblob://account/leases?x=hush"}, tmp_path / "hub"
    monkeypatch.setenv("EVENTHUBS_CONNECTION_STRING", CONNECTION)
    asked = event_hubs_options(store)
    assert (asked.namespace, asked.hub, asked.group) == ("namespace.servicebus.windows.net", "h", "$Default")
    assert "hush" not in repr(asked)
    file.write_text(CONNECTION.replace("EntityPath=h", "EntityPath=another") + "\n")
    found = event_hubs_options({**store, "eventhubs.connectionStringFile": str(file)})
    assert (found.hub, found.secret) == ("another", file.read_text().strip())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"eventhubs.connectionString": CONNECTION}, "option eventhubs.connectionString: Spark would show it"),
        ({"EVENTHUBS.CONNECTIONSTRING": CONNECTION}, "option eventhubs.connectionString: Spark would show it"),
        ({"eventhubs.connectionStringFile": "nowhere"}, "option eventhubs.connectionStringFile: 'nowhere' cannot be"),
        ({}, "EVENTHUBS_CONNECTION_STRING: it is no Event Hubs connection string"),
    ],
)
def test_a_secret_is_refused_where_spark_would_show_it(
    given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a signature would stand in plans, and any secret on the page of a Connect server."""
    monkeypatch.setenv("EVENTHUBS_CONNECTION_STRING", "hush")
    with pytest.raises(ValueError, match="^" + re.escape(said)) as caught:
        event_hubs_options({**given, "lease.store": "sqlite://x"})
    assert "hush" not in str(caught.value)
