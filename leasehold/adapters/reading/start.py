"""Where the reading of a lease starts, LATEST pinned before the first read."""

import logging

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.identity import LATEST_MS
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Lease, Position, at_timestamp
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.start"))

MS_DIGITS = 14
"""Enough for three thousand years; a service refuses what lies further off."""


class ReadingStart:
    """Where the reading of one held lease starts."""

    def __init__(self, holding: Holding, source: Source, config: Config) -> None:
        self._holding, self._source, self._config = holding, source, config
        self._latest: Position | None = None

    def find(self) -> Position | None:
        """The position to open a reader at; None if the lease was lost while it was pinned.

        Raises OutcomeUnknown or SourceUnavailable: then nothing has been read yet.
        """
        lease = self._holding.lease
        if lease.checkpoint == LATEST:
            noted = lease.note(LATEST_MS)
            return at_timestamp(int(noted)) if noted and _is_time(noted) else self._pin(lease)
        if lease.checkpoint.sequence == "AT_TIMESTAMP" and not lease.checkpoint.sub:
            return _configured(lease.key, self._config)
        return lease.checkpoint

    def _pin(self, lease: Lease) -> Position | None:
        """Store what LATEST means now: a crash before the first checkpoint must not skip what arrives until then.

        It is asked for once: an unanswered write of it may have been applied, and another reader may start there.
        """
        latest = self._latest = self._latest or self._source.latest(lease)
        holding = self._holding
        kept = holding.checkpoint(latest) if latest.numbered else holding.annotate(LATEST_MS, str(latest.sub))
        return latest if kept else None


def _is_time(noted: str) -> bool:
    return noted.isascii() and noted.isdigit() and len(noted) <= MS_DIGITS


def _configured(key: str, config: Config) -> Position:
    # KCL keeps the time of AT_TIMESTAMP in its settings and not on the row.
    if config.initial_position.sequence == "AT_TIMESTAMP":
        return config.initial_position
    log.warning("lease %s starts AT_TIMESTAMP, and no initial position says when: starting at TRIM_HORIZON", key)
    return TRIM_HORIZON
