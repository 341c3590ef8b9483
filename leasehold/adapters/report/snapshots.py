"""Reads snapshots: from a store, looked at several times, or from what `leasehold leases --json` has printed."""

import time
from collections.abc import Callable, Iterable, Iterator

from leasehold.adapters.json_form.fields import BadJsonField, parse
from leasehold.adapters.json_form.question import lease_of
from leasehold.adapters.report.changes import Snapshot
from leasehold.stores.protocol import Store

LAST_SECOND = 253_402_300_799
"""Of the year 9999: no calendar has later times."""


def looked(
    store: Store, times: int, seconds: float, wait: Callable[[float], object] = time.sleep
) -> Iterator[Snapshot]:
    """Take this many snapshots of a store, so many seconds apart. Raises OutcomeUnknown if one fails."""
    for look in range(times):
        if look:
            wait(seconds)
        listing = store.list()
        yield Snapshot(time.time(), listing.leases, len(listing.malformed))


def saved(name: str, lines: Iterable[bytes]) -> Iterator[Snapshot]:
    """The snapshots in these lines of JSON; `name` says whose they are.

    Lines that repeat an earlier look, because a later one failed, are left out.
    Raises BadJsonField, naming the line and the field.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                snapshot = _snapshot(line)
            except BadJsonField as bad:
                raise BadJsonField(f"{name}, line {number}: {bad}") from None
            if snapshot is not None:
                yield snapshot


def _snapshot(line: bytes) -> Snapshot | None:
    fields = parse(line).fields()
    at = fields.need("at").number(most=LAST_SECOND)
    leases = tuple(lease_of(value) for value in fields.need("leases").items())
    malformed = fields.read("malformed", lambda value: len(value.items()), 0)
    trouble = fields.read("trouble", lambda value: value.text(), "")
    for name in ("lags", "status", "says", "statuses"):
        fields.read(name, lambda _: None, None)  # the leases' own notes say the same
    fields.done()
    return None if trouble else Snapshot(at, leases, malformed)
