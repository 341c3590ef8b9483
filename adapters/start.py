"""Where the reading of a lease starts, LATEST pinned before the first read."""

import logging

from adapters.holding import Holding
from adapters.source import Source
from balancer.config import Config
from balancer.model import LATEST, TRIM_HORIZON, Position, at_timestamp

log = logging.getLogger("leasehold.start")

LATEST_MS = "latest_ms"
"""Our attribute: the time that LATEST means on this row, in milliseconds since 1970."""


def start_of(holding: Holding, source: Source, config: Config) -> Position | None:
    """The position to open a reader at; None if the lease was lost while it was pinned.

    Raises OutcomeUnknown or SourceUnavailable: then nothing has been read yet.
    """
    lease = holding.lease
    if lease.checkpoint == LATEST:
        noted = lease.note(LATEST_MS)
        return at_timestamp(int(noted)) if noted and noted.isdigit() else _pin(holding, source.latest(lease))
    if lease.checkpoint.sequence == "AT_TIMESTAMP" and not lease.checkpoint.sub:
        return _configured(lease.key, config)
    return lease.checkpoint


def _pin(holding: Holding, latest: Position) -> Position | None:
    """Store what LATEST means now: a crash before the first checkpoint must not skip what arrives until then."""
    kept = holding.checkpoint(latest) if latest.numbered else holding.annotate(LATEST_MS, str(latest.sub))
    return latest if kept else None


def _configured(key: str, config: Config) -> Position:
    # KCL keeps the time of AT_TIMESTAMP in its settings and not on the row.
    if config.initial_position.sequence == "AT_TIMESTAMP":
        return config.initial_position
    log.warning("lease %s starts AT_TIMESTAMP, and no initial position says when: starting at TRIM_HORIZON", key)
    return TRIM_HORIZON
