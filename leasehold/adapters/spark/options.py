"""Parses the options of a leased source before any connection is opened.

Each option is declared once, as a `SparkOption` in a table. `ALL_SOURCES` is the table for all sources, and each source
and sink has another table of its own. `OptionReader` reads options as these tables declare them, and
`mkdocs_reference.py` generates the tables of docs/spark-options.md and docs/spark-writing.md from them.

Option names are compared in lower case, because Spark passes some of them in lower case. No `repr`, message or offset
contains a secret.
"""

import logging
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal, cast
from uuid import uuid4

from attrs import field, frozen

from leasehold.adapters.inputs import SETTING_LIMITS, check_duration, check_time_ms
from leasehold.adapters.json_form import RULES, BadJsonField, JsonValue, parse_config
from leasehold.balancer.config import Config
from leasehold.stores.fields import parse_decimal
from leasehold.stores.printable import limited_error_text, make_safe_logger, printable

log = make_safe_logger(logging.getLogger("leasehold.spark"))

MIB = 1 << 20
EMBEDDED_BYTES = 4 * MIB
"""The maximum size of a batch whose rows are embedded in tasks. It is small, because embedded rows pass through the
driver."""


@frozen
class SparkOption:
    """The declaration of an option.

    Attributes:
        name: The option's name, in the case that the reference shows.
        help: The effect of the option. Begins with a verb in the imperative.
        default: The value that is used if the option is left out; None if there is no default.
        required: If the option must not be left out, the advice in the error for a missing option; otherwise "".
        minimum: The smallest allowed value, if the value is a whole number.
        maximum: The largest allowed value, if the value is a whole number.
        choices: All allowed values, if the option has a fixed set of them.
        values: A description of the allowed values; "" if the limits or `choices` show them.
        unset: A description of the value that is used if the option is left out; "" if `default` shows the value.
        page: The page of docs/ with the details, with an anchor if needed.
        in_docs: Whether the reference lists the option. The reference omits Spark's own options, and the options of
            other connectors that are read only so that they can be rejected.
    """

    name: str
    help: str
    default: int | str | None = None
    required: str = ""
    minimum: int = 1
    maximum: int = 2**53
    choices: tuple[str, ...] = ()
    values: str = ""
    unset: str = ""
    page: str = ""
    in_docs: bool = True


def declare_endpoint(prefix: str) -> tuple[SparkOption, SparkOption]:
    """Return the options `<prefix>.region` and `<prefix>.endpointUrl` of an AWS service."""
    return (
        SparkOption(f"{prefix}.region", "Send requests to this region.", unset="the environment's"),
        SparkOption(
            f"{prefix}.endpointUrl", "Send requests to this URL instead of the region's.", unset="the environment's"
        ),
    )


FLAG = ("true", "false")
"""The choices of an option that is on or off."""

LEASE_DURATION = SparkOption(
    "lease.durationMs",
    "Let another worker take a lease that was not renewed for this long.",
    10_000,
    minimum=500,
    values="1000 or more",
)
MAX_ROWS = SparkOption("maxRowsPerTrigger", "Put at most this many rows of all shards into a batch.", unset="no limit")

ALL_SOURCES = (
    SparkOption(
        "lease.store",
        "Keep the leases in the table at this URL: `dynamodb://…`, `azblob://…`, `s3://…` or `sqlite:///…`.",
        unset="required by queries",
    ),
    SparkOption(
        "lease.to",
        "Leave this out: queries take no part in `leasehold swap`, so the option is rejected.",
        page="swap.md",
    ),
    SparkOption(
        "lease.workerId",
        "Begin the query's worker ids with this. Each run adds a suffix of its own.",
        unset="the host name",
    ),
    SparkOption(
        "lease.rules",
        "Take leases by these rules. All workers of the group must use the same ones.",
        "minimal",
        choices=("minimal", *(name for name in RULES if name != "minimal")),
    ),
    LEASE_DURATION,
    SparkOption("lease.maxLeases", "Hold at most this many leases.", unset="no limit"),
    SparkOption("lease.maxLeasesToSteal", "Steal at most this many leases at a time.", unset="set by the rules"),
    SparkOption(
        "lease.maxLeasesPerCore",
        "Hold at most this many leases for each core of the session. Cannot be combined with `lease.maxLeases`.",
        unset="no limit",
    ),
    SparkOption("lease.cores", "Set the number of the session's cores.", unset="counted by `register`"),
    SparkOption(
        "lease.flushOnIdle",
        "If no rows arrive, plan an empty batch, so that Spark commits the last one. After a batch that ends a shard, "
        "this is done even if the option is `false`.",
        "true",
        choices=FLAG,
    ),
    SparkOption("lease.createTable", "Create the lease table if there is none.", "true", choices=FLAG),
    SparkOption(
        "lease.ifRecreated",
        "Begin all leases at this position if the stream was deleted and created again under the same name.",
        values="`TRIM_HORIZON`, `LATEST`",
        unset="the query ends with an error",
        page="table-lost.md#when-a-stream-is-deleted-and-created-again",
    ),
    SparkOption(
        "lease.transport",
        "Let tasks fetch rows from the driver, or embed rows in the tasks. `auto` fetches if the driver's address is "
        "known.",
        "auto",
        choices=("auto", "fetch", "embedded"),
    ),
    SparkOption(
        "lease.fetchHost", "Let tasks connect to the driver by this host name or address.", unset="the session's"
    ),
    SparkOption(
        "lease.fetchBindHost",
        "Let the driver listen for tasks on this address.",
        unset="the session's, or `lease.fetchHost`",
    ),
    SparkOption(
        "lease.fetchPort",
        "Let the driver listen on this port or, if it is taken, on the first free one of the next fifteen.",
        maximum=65_535,
        unset="any free port",
    ),
    SparkOption(
        "lease.spoolFolder",
        "Use this folder for rows that do not fit into memory.",
        unset="the system's temporary one",
    ),
    SparkOption("lease.bufferRows", "Read ahead at most this many rows, from all shards together.", 500_000),
    SparkOption(
        "lease.bufferBytes",
        "Read ahead at most this many bytes, from all shards together. At most half of them wait in memory for tasks.",
        256 * MIB,
        minimum=MIB,
    ),
    SparkOption("maxBytesPerTrigger", "Put at most this many bytes into a batch.", unset="`lease.bufferBytes`"),
    SparkOption(
        "lease.lingerMs",
        "Let a batch grow for this long, up to 32 MiB, while shards are behind.",
        1000,
        minimum=0,
        maximum=60_000,
    ),
    SparkOption(
        "minPartitions",
        "Divide a backfill into at least this many tasks if the shards allow it.",
        unset="the session's cores",
        page="spark-backfill.md",
    ),
    SparkOption(
        "shardsPerTask",
        "Read this many shards in one task. A task costs about 40 ms, so shards are grouped.",
        0,
        minimum=0,
        unset="shards divided by cores",
    ),
)
"""The options that every source has."""


class OptionReader:
    """Reads options by name, ignoring case, as their tables declare them. Each option can be read only once.

    Args:
        options: The options that were set by the user and by Spark.
        tables: The tables of declared options. If two tables declare the same option, the later one applies.
    """

    def __init__(self, options: Mapping[str, str], *tables: Iterable[SparkOption]) -> None:
        self._unread = {name.lower(): value for name, value in options.items()}
        self._declared = {option.name: option for table in tables for option in table}
        self._ignored: list[str] = []

    def read_text(self, name: str) -> str:
        """Return the value of an option, or its default, or "" if it has none.

        Raises ValueError if the option is present but empty, or missing although it is required.
        """
        option, option_value = self._declared[name], self._take(name)
        if option_value is None and option.required:
            raise ValueError(f"option {name}: is missing; {option.required}")
        return str(option.default or "") if option_value is None else option_value

    def read_number(self, name: str) -> int:
        """Return the value of a whole-number option, or its default. The option must have a default."""
        number = self.read_optional_number(name)
        return cast("int", self._declared[name].default) if number is None else number

    def read_optional_number(self, name: str) -> int | None:
        """Return the value of a whole-number option, or None if it is left out.

        Raises ValueError if the value is not a whole number within the option's limits.
        """
        option, option_text = self._declared[name], self._take(name)
        if option_text is None:
            return None
        parsed_number = parse_decimal(option_text, option.maximum)
        if parsed_number is None or parsed_number < option.minimum:
            raise ValueError(
                f"option {name}: {option_text!r} is not a whole number from {option.minimum} to {option.maximum}"
            )
        return parsed_number

    def read_choice(self, name: str) -> str:
        """Return the choice that equals the option's value, ignoring case, or the default."""
        option_text, choices = self.read_text(name), self._declared[name].choices
        for choice in choices:
            if choice.lower() == option_text.lower():
                return choice
        raise ValueError(f"option {name}: {option_text!r} is not one of {', '.join(choices)}")

    def read_flag(self, name: str) -> bool:
        return self.read_choice(name) == "true"

    def _take(self, name: str) -> str | None:
        # Spark ignores the case of option names, and passes some of them in lower case.
        option_value = self._unread.pop(name.lower(), None)
        # Reject an empty value, which usually comes from an unset environment variable. Using the default instead would
        # hide the mistake.
        if option_value is not None and not option_value.strip():
            raise ValueError(f"option {name}: it is empty; leave it out, or give a value")
        return None if option_value is None else option_value.strip()

    def ignore_options(self, names: Mapping[str, str]) -> None:
        """Accept options of other connectors although they have no effect, and log a warning for each that is set."""
        self._ignored += names
        for name, reason in names.items():
            if self._take(name):
                log.warning("option %s has no effect: %s", name, reason)

    def reject_renamed(self, names: Mapping[str, str]) -> None:
        """Raise ValueError if an option is given by the name that another connector uses, and suggest our name."""
        for other_name, our_name in names.items():
            if other_name.lower() in self._unread:
                raise ValueError(f"option {other_name}: unknown; did you mean {our_name}?")

    def reject_options(self, names: Mapping[str, str]) -> None:
        """Raise ValueError for an option of another connector that is not supported here, with the reason."""
        for name, reason in names.items():
            if name.lower() in self._unread:
                raise ValueError(f"option {name}: {reason}")

    def reject_unknown(self) -> None:
        """Raise ValueError for an option that was not read."""
        # If a misspelled option were silently ignored, the query would not do what the user meant.
        for name in sorted(self._unread):
            known_names = sorted([*self._declared, *self._ignored])
            raise ValueError(f"option {printable(name)}: unknown; choose among {', '.join(known_names)}")


@frozen
class Address:
    """The address at which tasks connect to the process that has their rows.

    Attributes:
        host: The host name that tasks use.
        bind: The address that the process listens on.
        port: The first port to try; 0 for any free one.
    """

    host: str
    bind: str
    port: int = 0


@frozen
class LeaseOptions:
    """The options for how a query takes part in its group. Every source has these options.

    Attributes:
        store: The URL of the lease table; "" if none is named.
        create: Whether to create the lease table if it does not exist.
        worker_id_prefix: The part of the worker's id before the last "-".
        config: The rules, durations and limits of the group.
        flushes_when_idle: Whether an empty batch is planned when no rows arrive, so that Spark commits the previous
            batch.
        fetch_address: The address from which tasks fetch rows, or None to embed rows in tasks.
        spool_folder: The folder for rows that are kept on disk until tasks fetch them; "" for the system's default.
        buffer_rows: The maximum number of rows to read ahead.
        buffer_bytes: The maximum number of bytes to read ahead.
        trigger_rows: The maximum number of rows in one batch.
        trigger_bytes: The maximum number of bytes in one batch.
        cores: The number of cores of the whole session.
        shards_per_task: The number of shards per task; 0 for the number of shards divided by the cores, rounded up.
        if_recreated: The position at which all leases begin again if the stream was deleted and recreated under the
            same name; None to end the query instead.
        linger_seconds: The maximum time, in seconds, that a batch waits for more rows while shards are behind.
    """

    store: str = field(repr=False)
    create: bool
    worker_id_prefix: str
    config: Config
    flushes_when_idle: bool
    fetch_address: Address | None
    spool_folder: str
    buffer_rows: int
    buffer_bytes: int
    trigger_rows: int
    trigger_bytes: int
    cores: int
    shards_per_task: int
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None
    linger_seconds: float = 0.0

    @property
    def worker_id(self) -> str:
        """A new worker id at each access, because two runs with the same id would renew each other's leases."""
        return f"{self.worker_id_prefix}-{os.getpid()}x{uuid4().hex[:8]}"

    def count_tasks(self, shards: int) -> int:
        """Return the number of tasks for `shards` shards.

        Several shards may share a task, because a task costs as much as reading thousands of rows.
        """
        # By default make at most one task per core, because further tasks would have to wait for a free core.
        shards_per_task = self.shards_per_task or -(-shards // self.cores)
        return -(-shards // shards_per_task) if shards else 0


def parse_lease_options(
    opts: OptionReader, default_store: str, position: Mapping[str, Any], row_limit_option: str
) -> LeaseOptions:
    """Parse the options for how a query takes part in its group. Raises ValueError, naming the option.

    Args:
        opts: All options.
        default_store: The URL to use if `lease.store` is left out; "" if there is no such default.
        position: The fields `initial_position` and, if needed, `timestamp_ms` of a configuration.
        row_limit_option: The name that this source uses for the option that limits the rows of a batch.
    """
    # `register` sets `lease.cores` for the session. For a client of Spark Connect it does not, so the number of this
    # machine's CPUs is used.
    core_count = opts.read_optional_number("lease.cores") or os.cpu_count() or 1
    store_url = opts.read_text("lease.store") or default_store
    if store_url.startswith("memory:"):
        raise ValueError(
            "option lease.store: memory:// exists within one process, but each query has a process of its own; use "
            "sqlite:// here"
        )
    if opts.read_text("lease.to"):
        raise ValueError(
            "option lease.to: queries of Spark take no part in `leasehold swap`; stop them, copy their leases with "
            "`leasehold copy-leases FROM TO`, and start them again with the new lease.store"
        )
    buffer_bytes = opts.read_number("lease.bufferBytes")
    # `register` sets the default of `lease.fetchHost` to the driver's address.
    transport = opts.read_choice("lease.transport")
    host, port = opts.read_text("lease.fetchHost"), opts.read_optional_number("lease.fetchPort") or 0
    bind_address = opts.read_text("lease.fetchBindHost") or host
    # If the user chose `fetch`, do not fall back to embedding rows, which would take memory that was not planned for.
    if transport == "fetch" and not host:
        raise ValueError("option lease.transport: fetch needs the driver's address; give lease.fetchHost")
    # Without a host, executors have no address to connect to, so rows are embedded in the tasks.
    fetch_address = None if transport == "embedded" or not host else Address(host, bind_address, port)
    if_recreated = opts.read_text("lease.ifRecreated").upper() or None
    if if_recreated not in {"TRIM_HORIZON", "LATEST", None}:
        raise ValueError(f"option lease.ifRecreated: {if_recreated!r} is neither TRIM_HORIZON nor LATEST")
    return LeaseOptions(
        store=store_url,
        create=opts.read_flag("lease.createTable"),
        worker_id_prefix=opts.read_text("lease.workerId") or socket.gethostname(),
        config=_parse_config(opts, position, core_count),
        flushes_when_idle=opts.read_flag("lease.flushOnIdle"),
        fetch_address=fetch_address,
        spool_folder=opts.read_text("lease.spoolFolder"),
        buffer_rows=opts.read_number("lease.bufferRows"),
        buffer_bytes=buffer_bytes,
        trigger_rows=opts.read_optional_number(row_limit_option) or 2**53,
        trigger_bytes=opts.read_optional_number("maxBytesPerTrigger") or buffer_bytes,
        cores=core_count,
        shards_per_task=opts.read_number("shardsPerTask"),
        if_recreated=cast("Literal['TRIM_HORIZON', 'LATEST'] | None", if_recreated),
        linger_seconds=opts.read_number("lease.lingerMs") / 1000,
    )


def _parse_config(opts: OptionReader, position: Mapping[str, Any], cores: int) -> Config:
    duration_ms = opts.read_number("lease.durationMs")
    if warning := check_duration(SETTING_LIMITS["lease_seconds"], duration_ms / 1000, "option lease.durationMs"):
        log.warning("%s", warning)
    rules_name = opts.read_choice("lease.rules")
    # The limit is a fixed number of leases, or a number per core. With a number per core, a large cluster takes more
    # leases than a laptop (M7).
    limit, per_core = opts.read_optional_number("lease.maxLeases"), opts.read_optional_number("lease.maxLeasesPerCore")
    if limit and per_core:
        raise ValueError("option lease.maxLeasesPerCore: give it or lease.maxLeases, not both")
    limits = {
        "max_leases": per_core * cores if per_core else limit,
        "max_steals": opts.read_optional_number("lease.maxLeasesToSteal"),
    }
    # Leave out limits that are not set, because the configuration has its own defaults and does not accept null.
    fields: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    fields |= {"rules": rules_name, "lease_seconds": duration_ms / 1000, **position}
    try:
        return parse_config(JsonValue("input", fields))
    except BadJsonField as error:
        raise ValueError(f"option lease.rules: {printable(limited_error_text(error))}") from None


def parse_start(
    name: str,
    text: str,
    oldest_words: Collection[str],
    newest_words: Collection[str],
    timestamp: str,
    *,
    time_form: str,
) -> dict[str, Any]:
    """Parse a position in the form that other connectors use. Raises ValueError, naming the option.

    Args:
        name: The option.
        text: The value of the option.
        oldest_words: The words that mean "start at the oldest record".
        newest_words: The words that mean "start after the newest record".
        timestamp: The time in milliseconds since 1970, if the option's value is a time; otherwise "".
        time_form: How to write a time. The error message shows it.
    """
    if timestamp:
        timestamp_ms = parse_decimal(timestamp, 2**53)
        if timestamp_ms is None:
            raise ValueError(f"option {name}: the time must be whole milliseconds since 1970, not {timestamp!r}")
        return {"initial_position": "AT_TIMESTAMP", "timestamp_ms": check_time_ms(timestamp_ms, f"option {name}")}
    if text.upper() in oldest_words:
        return {"initial_position": "TRIM_HORIZON"}
    if text.upper() in newest_words:
        return {"initial_position": "LATEST"}
    accepted_words = ", ".join([*oldest_words, *newest_words])
    raise ValueError(f"option {name}: {text!r} is none of {accepted_words}; write a time as {time_form}")
