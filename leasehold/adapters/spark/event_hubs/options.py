"""Parses the options of `eventhubs-leased`, which are those of other Event Hubs connectors and those of the group."""

import json
import os
import socket
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from leasehold.adapters.spark.batch import ReadBounds, parse_bounds
from leasehold.adapters.spark.options import (
    ALL_SOURCES,
    LEASE_DURATION,
    LeaseOptions,
    OptionReader,
    SparkOption,
    parse_lease_options,
    parse_start,
)

CONNECTION_STRING = "EVENTHUBS_CONNECTION_STRING"
FILE_OPTION = "eventhubs.connectionStringFile"

HUB = (
    SparkOption(
        "eventhubs.connectionString",
        "Not supported: Spark would show it in plans and on its pages, so it is rejected.",
        in_docs=False,
    ),
    SparkOption(
        FILE_OPTION,
        "Read the connection string from this file, on each machine that connects to the hub.",
        unset=f"the variable `{CONNECTION_STRING}`; without it, an identity is used",
        page="spark-cluster.md#give-it-credentials",
    ),
    SparkOption("eventhubs.namespace", "Use this fully qualified namespace.", unset="the connection string's"),
    SparkOption("eventhubs.name", "Use the event hub with this name.", unset="the connection string's"),
)
"""The options that name a hub. The source and the sink both have these options."""

EVENT_HUBS_SOURCE = (
    *HUB,
    SparkOption("eventhubs.consumerGroup", "Read as this consumer group.", "$Default"),
    SparkOption(
        "eventhubs.startingPosition",
        "Begin partitions without a lease here: at the oldest event (`-1`), at the present end (`@latest`), or at the "
        "`offset` or `enqueuedTime` in the JSON of the Azure connector.",
        values="`-1`, `@latest`, JSON",
        unset="`@latest`; for a backfill, `-1`",
    ),
    SparkOption(
        "eventhubs.startingPositions",
        "Not supported: a partition starts at its lease's checkpoint, so it is rejected.",
        in_docs=False,
    ),
    SparkOption(
        "eventhubs.endingPosition",
        "End a backfill at this `enqueuedTime`. `@latest`, for a batch only, is the present end.",
        values="`@latest`, JSON",
        page="spark-backfill.md",
    ),
    SparkOption(
        "eventhubs.prefetchCount",
        "Let the service send this many events of a partition ahead.",
        1000,
        maximum=10_000,
    ),
    SparkOption(
        "maxEventsPerTrigger", "Put at most this many events of all partitions into a batch.", unset="no limit"
    ),
    # With the Azure SDKs' workers, leases expire after two minutes.
    evolve(LEASE_DURATION, help=f"{LEASE_DURATION.help} The default is that of the Azure SDKs.", default=120_000),
)
"""The options of the source `eventhubs-leased`, in addition to those of all sources. The last option here overrides the
one of the same name there."""

WITHOUT_EFFECT = {
    "eventhubs.useExclusiveReceiver": "the lease's owner always reads exclusively",
    "eventhubs.receiverTimeout": "events are read ahead, between batches",
    "eventhubs.operationTimeout": "events are read ahead, between batches",
}


@frozen
class EventHubsOptions:
    """The event hub that a query reads, in one consumer group.

    Attributes:
        namespace: The fully qualified namespace.
        hub: The hub's name.
        group: The consumer group.
        secret: The connection string, or "" to use an identity.
        file: The file with the connection string; "" for the environment.
        prefetch: The number of events to prefetch from each partition.
        lease: The options of the group. Its `store` is "" if no option names a store, as for a batch.
        bounds: The bounds of the records to read.
    """

    namespace: str
    hub: str
    group: str
    secret: str = field(repr=False)
    file: str
    prefetch: int
    lease: LeaseOptions
    bounds: ReadBounds


def parse_event_hubs_options(options: Mapping[str, str]) -> EventHubsOptions:
    """Parse the options. Raises ValueError, naming the option and never repeating a secret."""
    opts = OptionReader(options, ALL_SOURCES, EVENT_HUBS_SOURCE)
    namespace, hub, secret, file = parse_hub(opts)
    consumer_group = opts.read_text("eventhubs.consumerGroup")
    prefetch_count = opts.read_number("eventhubs.prefetchCount")
    opts.ignore_options(WITHOUT_EFFECT)
    if opts.read_text("eventhubs.startingPositions"):
        raise ValueError(
            "option eventhubs.startingPositions: a partition starts at its lease's checkpoint; see the docs"
        )
    start_fields = _parse_position(opts, "eventhubs.startingPosition", ("-1", "TRIM_HORIZON", "EARLIEST"))
    bounds = parse_bounds(opts, "eventhubs", start_fields, _parse_position(opts, "eventhubs.endingPosition", ()))
    lease_options = parse_lease_options(opts, "", bounds.find_initial_position(), "maxEventsPerTrigger")
    opts.reject_unknown()
    return EventHubsOptions(namespace, hub, consumer_group, secret, file, prefetch_count, lease_options, bounds)


def parse_hub(opts: OptionReader) -> tuple[str, str, str, str]:
    """Return the namespace, the hub, the connection string (or ""), and the file that contains the string (or "").

    Raises ValueError, naming the option.
    """
    reject_secrets(opts)
    secret, origin = read_secret(file := opts.read_text(FILE_OPTION))
    connection_pairs = (part.partition("=") for part in secret.split(";") if part)
    connection_fields = {name.strip().lower(): value.strip() for name, _, value in connection_pairs}
    if secret and "endpoint" not in connection_fields:
        raise ValueError(f"{origin}: this is not an Event Hubs connection string")
    endpoint = connection_fields.get("endpoint", "").partition("://")[2].strip("/")
    namespace = opts.read_text("eventhubs.namespace") or endpoint
    hub = opts.read_text("eventhubs.name") or connection_fields.get("entitypath", "")
    if not namespace:
        raise ValueError(f"option eventhubs.namespace: is missing, and neither is {CONNECTION_STRING} set")
    if not hub:
        raise ValueError("option eventhubs.name: is missing; name the event hub")
    return namespace, hub, secret, file


def reject_secrets(opts: OptionReader) -> None:
    """Raise ValueError if a secret is given as an option, because Spark shows options in plans and on its pages."""
    if opts.read_text("eventhubs.connectionString"):
        raise ValueError(
            "option eventhubs.connectionString: Spark would show it in plans and on its pages; set "
            f"{CONNECTION_STRING} in the driver's environment, or name a file on the driver with {FILE_OPTION}"
        )


def read_secret(path: str) -> tuple[str, str]:
    """Return the connection string (or "") and the name of its origin, for error messages.

    The string is read from the file at `path`, or from the environment if `path` is "". Raises ValueError if the file
    cannot be read.
    """
    if not path:
        return os.environ.get(CONNECTION_STRING, ""), CONNECTION_STRING
    try:
        return Path(path).read_text().strip(), f"option {FILE_OPTION}"
    except (OSError, UnicodeDecodeError) as fault:
        # Name the machine, because the file may be missing on a single executor.
        failure_place = f"on {socket.gethostname()} ({type(fault).__name__})"
        raise ValueError(f"option {FILE_OPTION}: {path!r} cannot be read {failure_place}") from None


def find_executor_secret(path: str, *, has_secret: bool) -> str:
    """Return the connection string that this process can read.

    Raises ValueError if only the driver has a connection string (`has_secret`).
    """
    secret, _ = read_secret(path)
    # Raise an error here. Otherwise, the executor would use its own identity, and the service would reject it with a
    # confusing error.
    if has_secret and not secret:
        raise ValueError(
            f"{CONNECTION_STRING}: executors need it, but it is not set on {socket.gethostname()}; set it there, too, "
            f"or name a file that exists on all machines with {FILE_OPTION}"
        )
    return secret


def _parse_position(opts: OptionReader, name: str, oldest_words: tuple[str, ...]) -> dict[str, Any] | None:
    """Parse a position: a word, or the Azure connector's JSON with an offset ("-1", "@latest") or an enqueuedTime."""
    if not (text := opts.read_text(name)):
        return None
    offset, timestamp_text = text, ""
    if text.startswith("{"):
        try:
            position_document = json.loads(text)
            offset, iso_time = str(position_document.get("offset") or ""), position_document.get("enqueuedTime")
            timestamp_text = str(int(datetime.fromisoformat(iso_time).timestamp() * 1000)) if iso_time else ""
        # JSON of another form, such as a list or a number, causes various exceptions. Report all of them in the same
        # way.
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            raise ValueError(f"option {name}: not the JSON of a position (offset, enqueuedTime)") from None
    return parse_start(
        name,
        offset,
        oldest_words,
        ("@LATEST", "LATEST", "END"),
        timestamp_text,
        time_form='{"enqueuedTime": "2026-11-22T06:00:00Z"}',
    )
