"""The options of a leased source, checked by name before anything is opened.

Names are compared in lower case, since Spark hands them over so. Secrets are taken out of every text
that could be shown: they are in no `repr`, no message and no offset.
"""

import logging
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast
from uuid import uuid4

from attrs import field, frozen

from leasehold.adapters.inputs import checked_duration, checked_time
from leasehold.adapters.json_form import RULES, BadJsonField, JsonValue, config_of
from leasehold.balancer.config import Config
from leasehold.stores.fields import decimal
from leasehold.stores.printable import escaped, printable, text_of

log = escaped(logging.getLogger("leasehold.spark"))

MIB = 1 << 20
EMBEDDED_BYTES = 4 * MIB
"""Rows within tasks pass through the driver, so that batches must stay small."""


READERS_MOST = 15
"""Sixteen ports are tried from `lease.fetchPort` on, and the process that plans needs one, too."""


class Given:
    """Options as Spark hands them over; each is read once, and one that was not read is unknown."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._left = {name.lower(): value for name, value in options.items()}
        self._known: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        """A text, not empty if it is given at all."""
        self._known.append(name)
        # Spark knows options in any case, and hands some on in small letters.
        value = self._left.pop(name.lower(), None)
        # Most often a variable of the environment that is not set: the default would then hide it.
        if value is not None and not value.strip():
            raise ValueError(f"option {name}: it is empty; leave it out, or give a value")
        return default if value is None else value.strip()

    def need(self, name: str, hint: str) -> str:
        """A text that must be there."""
        if not (value := self.text(name)):
            raise ValueError(f"option {name}: is missing; {hint}")
        return value

    def number(self, name: str, default: int | None, *, least: int = 1, most: int = 2**53) -> int | None:
        """A whole number within limits."""
        text = self.text(name)
        if not text:
            return default
        found = decimal(text, most)
        if found is None or found < least:
            raise ValueError(f"option {name}: {text!r} is not a whole number from {least} to {most}")
        return found

    def choice(self, name: str, *choices: str) -> str:
        """Read a word out of these, in any case; the first where it is left out."""
        text = self.text(name, choices[0])
        for choice in choices:
            if choice.lower() == text.lower():
                return choice
        raise ValueError(f"option {name}: {text!r} is not one of {', '.join(choices)}")

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        return self.choice(name, *(("true", "false") if default else ("false", "true"))) == "true"

    def ignore(self, names: Mapping[str, str]) -> None:
        """Options of other connectors that have no meaning here: said, and let pass."""
        for name, why in names.items():
            if self.text(name):
                log.warning("option %s has no effect: %s", name, why)

    def elsewhere(self, names: Mapping[str, str]) -> None:
        """Raises ValueError for an option of another connector that has another name here."""
        for theirs, ours in names.items():
            if theirs.lower() in self._left:
                raise ValueError(f"option {theirs}: unknown; did you mean {ours}?")

    def refuse(self, names: Mapping[str, str]) -> None:
        """Raises ValueError for an option of another connector that cannot be had here, and says why."""
        for name, why in names.items():
            if name.lower() in self._left:
                raise ValueError(f"option {name}: {why}")

    def done(self) -> None:
        """Raises ValueError for an option that was not read."""
        # A name with a slip would be passed over in silence, and the query be another than was meant.
        for name in sorted(self._left):
            raise ValueError(f"option {printable(name)}: unknown; choose among {', '.join(sorted(self._known))}")


@frozen
class Address:
    """Where tasks reach the reading process.

    host  by which name tasks look for it
    bind  the address it listens on
    port  the first to try; 0: any that is free
    """

    host: str
    bind: str
    port: int = 0


@frozen
class LeaseOptions:
    """How a query takes part in its group; the same for the two sources.

    store             URL of the lease table; "" where none is named
    create            whether it is made where there is none
    worker            what this worker's id begins with, up to its last "-"
    config            rules, seconds and limits of the group
    flush             whether an empty batch follows the last one before idleness, so that it is committed
    fetch             where tasks fetch rows; None: rows are embedded in them
    spool_folder      where rows wait to be fetched; "" for the system's own place
    buffer_rows, buffer_bytes
                      most that is read ahead
    trigger_rows, trigger_bytes
                      most that goes into one batch
    cores             of the whole session
    shards_per_task   0: shards by cores, rounded up
    readers           how many processes read; 0: the one that plans reads, too; None: as many as there is room for
    reader_jobs       where readers on executors are asked for; "": they are children of the process that plans
    if_recreated      where leases begin anew if the stream was made anew under its name; None: the query ends then
    linger_seconds    how long a batch may grow while shards are behind
    """

    store: str = field(repr=False)
    create: bool
    worker: str
    config: Config
    flush: bool
    fetch: Address | None
    spool_folder: str
    buffer_rows: int
    buffer_bytes: int
    trigger_rows: int
    trigger_bytes: int
    cores: int
    shards_per_task: int
    readers: int | None = 0
    reader_jobs: str = ""
    if_recreated: Literal["TRIM_HORIZON", "LATEST"] | None = None
    linger_seconds: float = 0.0

    @property
    def worker_id(self) -> str:
        """A new one for each run of a query: two runs under one id would renew each other's leases."""
        return f"{self.worker}-{os.getpid()}x{uuid4().hex[:8]}"

    def tasks(self, shards: int) -> int:
        """Over how many tasks so many shards are spread: a task costs as much as reading thousands of rows."""
        # Each task on a core of its own, as far as there are cores: with more tasks than that the last ones wait.
        per_task = self.shards_per_task or -(-shards // self.cores)
        return -(-shards // per_task) if shards else 0


def lease_options(given: Given, store: str, position: Mapping[str, Any], seconds: float, rows: str) -> LeaseOptions:
    """The options of the group. Raises ValueError, naming the option.

    store     the URL where `lease.store` is left out; "" if there is no such default
    position  `initial_position` and `timestamp_ms`, as a configuration has them
    seconds   the lease's duration where none is given
    rows      the name this source's users know for the most rows in a batch
    """
    # `register` answers for the session; a client of Spark Connect can only count the cores of its own machine.
    cores = given.number("lease.cores", os.cpu_count()) or 1
    url = given.text("lease.store", store)
    if url.startswith("memory:"):
        raise ValueError("option lease.store: memory:// is seen by one process only, and every query is another")
    if given.text("lease.to"):
        raise ValueError(
            "option lease.to: queries of Spark take no part in `leasehold swap`; stop them, move their leases by "
            "`leasehold copy-leases FROM TO`, and start them again with the new lease.store"
        )
    buffer_bytes = given.number("lease.bufferBytes", 256 * MIB, least=MIB) or 0
    # Spark's own address, as the session tells it.
    transport = given.choice("lease.transport", "auto", "fetch", "embedded")
    host, port = given.text("lease.fetchHost"), given.number("lease.fetchPort", 0, most=65_535) or 0
    bind = given.text("lease.fetchBindHost", host)
    # Asked for by name: embedding the rows in place of it would cost memory that nobody reckoned with.
    if transport == "fetch" and not host:
        raise ValueError("option lease.transport: fetch needs the driver's address; give lease.fetchHost")
    # Without a host there is nothing that an executor could connect to: rows travel with their tasks.
    fetch = None if transport == "embedded" or not host else Address(host, bind, port)
    text = given.text("lease.readers", "0")
    readers = decimal(text, READERS_MOST)
    if readers is None and text.lower() != "auto":
        raise ValueError(f"option lease.readers: {text!r} is not a whole number from 0 to {READERS_MOST}, or auto")
    if readers != 0 and fetch is None:
        # A reader's rows never pass through the planner, so they cannot be embedded in its tasks.
        raise ValueError("option lease.readers: tasks fetch from readers; give lease.fetchHost, and no lease.transport")
    if_recreated = given.text("lease.ifRecreated").upper() or None
    if if_recreated not in {"TRIM_HORIZON", "LATEST", None}:
        raise ValueError(f"option lease.ifRecreated: {if_recreated!r} is neither TRIM_HORIZON nor LATEST")
    return LeaseOptions(
        store=url,
        create=given.flag("lease.createTable", default=True),
        worker=given.text("lease.workerId", socket.gethostname()),
        config=_config(given, position, seconds, cores),
        flush=given.flag("lease.flushOnIdle", default=True),
        fetch=fetch,
        spool_folder=given.text("lease.spoolFolder"),
        buffer_rows=given.number("lease.bufferRows", 500_000) or 0,
        buffer_bytes=buffer_bytes,
        trigger_rows=given.number(rows, None) or 2**53,
        trigger_bytes=given.number("maxBytesPerTrigger", None) or buffer_bytes,
        cores=cores,
        shards_per_task=given.number("shardsPerTask", 0, least=0) or 0,
        readers=readers,
        reader_jobs=given.text("lease.readerJobs"),
        if_recreated=cast("Literal['TRIM_HORIZON', 'LATEST'] | None", if_recreated),
        linger_seconds=(given.number("lease.lingerMs", 1000, least=0, most=60_000) or 0) / 1000,
    )


def _config(given: Given, position: Mapping[str, Any], seconds: float, cores: int) -> Config:
    milliseconds = given.number("lease.durationMs", int(seconds * 1000), least=500) or 0
    if warning := checked_duration("lease_seconds", milliseconds / 1000, "option lease.durationMs"):
        log.warning("%s", warning)
    rules = given.choice("lease.rules", "minimal", *(name for name in RULES if name != "minimal"))
    # By number, or by the session's cores, so that a large cluster takes more of a stream than a laptop (M7).
    most, per_core = given.number("lease.maxLeases", None), given.number("lease.maxLeasesPerCore", None)
    if most and per_core:
        raise ValueError("option lease.maxLeasesPerCore: give it or lease.maxLeases, not both")
    limits = {
        "max_leases": per_core * cores if per_core else most,
        "max_steals": given.number("lease.maxLeasesToSteal", None),
    }
    # What is not given is left out: a configuration has defaults of its own, and null is none of their values.
    fields: dict[str, Any] = {name: value for name, value in limits.items() if value is not None}
    fields |= {"rules": rules, "lease_seconds": milliseconds / 1000, **position}
    try:
        return config_of(JsonValue("input", fields))
    except BadJsonField as error:
        raise ValueError(f"option lease.rules: {printable(text_of(error))}") from None


def start_of(name: str, text: str, first: Collection[str], last: Collection[str], timestamp: str) -> dict[str, Any]:
    """A starting position by the words other connectors have for it.

    `timestamp` is the milliseconds since 1970 that a position in time was found to mean, or "".
    Raises ValueError, naming the option.
    """
    if timestamp:
        milliseconds = decimal(timestamp, 2**53)
        if milliseconds is None:
            raise ValueError(f"option {name}: the time must be whole milliseconds since 1970, not {timestamp!r}")
        return {"initial_position": "AT_TIMESTAMP", "timestamp_ms": checked_time(milliseconds, f"option {name}")}
    if text.upper() in first:
        return {"initial_position": "TRIM_HORIZON"}
    if text.upper() in last:
        return {"initial_position": "LATEST"}
    raise ValueError(f"option {name}: {text!r} is none of {', '.join([*first, *last])}, or a time")
