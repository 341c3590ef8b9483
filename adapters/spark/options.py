"""What a user may set on a leased source, checked by name before anything is opened.

Names are compared in lower case, since Spark hands them over so. Secrets are taken out of every text
that could be shown: they are in no `repr`, no message and no offset.
"""

import logging
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any, TypeVar
from uuid import uuid4

from attrs import field, frozen

from adapters.json_fields import BadField, Value
from adapters.plan_question import RULES, config_of
from balancer.config import Config

log = logging.getLogger("leasehold.spark")

T = TypeVar("T")

MIB = 1 << 20
EMBEDDED_BYTES = 4 * MIB
"""Rows within tasks pass through the driver, so that batches must stay small."""


class Given:
    """Options as Spark hands them over; each is asked for once, and what nobody asked for is unknown."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._left = {name.lower(): value for name, value in options.items()}
        self._known: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        """A text, not empty if it is given at all."""
        self._known.append(name)
        value = self._left.pop(name.lower(), None)
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
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise ValueError(f"option {name}: {text!r} is not a whole number from {least} to {most}")
        return int(text)

    def choice(self, name: str, *choices: str) -> str:
        """One of these, in any case; the first where it is left out."""
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

    def done(self) -> None:
        """Raises ValueError if an option is left that nobody asked for."""
        for name in sorted(self._left):
            raise ValueError(f"option {name}: unknown; choose among {', '.join(sorted(self._known))}")


@frozen
class LeaseOptions:
    """How a query takes part in its group; the same for the two sources.

    store             URL of the lease table
    create            whether it is made where there is none
    worker            what this worker's id begins with, up to its last "-"
    config            rules, seconds and limits of the group
    flush             whether an empty batch follows the last one before idleness, so that it is committed
    transport         "auto", or how rows reach the tasks: "spool" (files on one host), "embedded"
    spool_folder      where the files go; "" for the system's own place
    buffer_rows, buffer_bytes
                      most that is read ahead
    trigger_rows, trigger_bytes
                      most that goes into one batch
    cores             of the whole session
    shards_per_task   0: shards by cores, rounded up
    """

    store: str = field(repr=False)
    create: bool
    worker: str
    config: Config
    flush: bool
    transport: str
    spool_folder: str
    buffer_rows: int
    buffer_bytes: int
    trigger_rows: int
    trigger_bytes: int
    cores: int
    shards_per_task: int

    @property
    def worker_id(self) -> str:
        """A new one for each run of a query: two runs under one id would renew each other's leases."""
        return f"{self.worker}-{os.getpid()}x{uuid4().hex[:8]}"

    def tasks(self, shards: int) -> int:
        """Over how many tasks so many shards are spread: a task costs as much as reading thousands of rows."""
        per_task = self.shards_per_task or -(-shards // self.cores)
        return -(-shards // per_task) if shards else 0


def lease_options(given: Given, store: str, position: Mapping[str, Any], seconds: float, rows: str) -> LeaseOptions:
    """The options of the group. Raises ValueError, naming the option.

    store     the URL where `lease.store` is left out; "" if there is no such default
    position  `initial_position` and `timestamp_ms`, as a configuration has them
    seconds   the lease's duration where none is given
    rows      the name this source's users know for the most rows in a batch
    """
    cores = given.number("lease.cores", os.cpu_count()) or 1
    url = given.text("lease.store", store)
    if not url:
        raise ValueError("option lease.store: is missing; give the URL of the lease table, as dynamodb://TABLE")
    if url.startswith("memory:"):
        raise ValueError("option lease.store: memory:// is seen by one process only, and every query is another")
    buffer_bytes = given.number("lease.bufferBytes", 256 * MIB, least=MIB) or 0
    return LeaseOptions(
        store=url,
        create=given.flag("lease.createTable", default=True),
        worker=given.text("lease.workerId", socket.gethostname()),
        config=_config(given, position, seconds, cores),
        flush=given.flag("lease.flushOnIdle", default=True),
        transport=given.choice("lease.transport", "auto", "spool", "embedded"),
        spool_folder=given.text("lease.spoolFolder"),
        buffer_rows=given.number("lease.bufferRows", 500_000) or 0,
        buffer_bytes=buffer_bytes,
        trigger_rows=given.number(rows, None) or 2**53,
        trigger_bytes=given.number("maxBytesPerTrigger", None) or buffer_bytes,
        cores=cores,
        shards_per_task=given.number("shardsPerTask", 0, least=0) or 0,
    )


def _config(given: Given, position: Mapping[str, Any], seconds: float, cores: int) -> Config:
    milliseconds = given.number("lease.durationMs", int(seconds * 1000), least=500) or 0
    rules = given.choice("lease.rules", "minimal", *(name for name in RULES if name != "minimal"))
    limits = {
        "max_leases": _most_leases(given, cores),
        "max_steals": given.number("lease.maxLeasesToSteal", None),
    }
    fields = {"rules": rules, "lease_seconds": milliseconds / 1000, **position}
    try:
        return config_of(Value("input", fields | _without_none(limits)))
    except BadField as error:
        raise ValueError(f"option lease.rules: {error}") from None


def _most_leases(given: Given, cores: int) -> int | None:
    """By number, or by the session's cores, so that a large cluster takes more of a stream than a laptop (M7)."""
    most, per_core = given.number("lease.maxLeases", None), given.number("lease.maxLeasesPerCore", None)
    if most and per_core:
        raise ValueError("option lease.maxLeasesPerCore: give it or lease.maxLeases, not both")
    return per_core * cores if per_core else most


def _without_none(fields: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in fields.items() if value is not None}


def start_of(name: str, text: str, first: Collection[str], last: Collection[str], timestamp: str) -> dict[str, Any]:
    """A starting position by the words other connectors have for it.

    `timestamp` is the milliseconds since 1970 that a position in time was found to mean, or "".
    Raises ValueError, naming the option.
    """
    if timestamp:
        if not (timestamp.isascii() and timestamp.isdigit()):
            raise ValueError(f"option {name}: the time must be whole milliseconds since 1970, not {timestamp!r}")
        return {"initial_position": "AT_TIMESTAMP", "timestamp_ms": int(timestamp)}
    if text.upper() in first:
        return {"initial_position": "TRIM_HORIZON"}
    if text.upper() in last:
        return {"initial_position": "LATEST"}
    raise ValueError(f"option {name}: {text!r} is none of {', '.join([*first, *last])}, or a time")
