"""Where snapshots come from: a store looked at now and again, or what `leasehold leases --json` has printed."""

import time
from collections.abc import Callable, Iterable, Iterator

from adapters.json_fields import BadField, parse
from adapters.plan_question import lease_of
from adapters.report.changes import Snapshot
from stores.protocol import Store


def looked(
    store: Store, times: int, seconds: float, wait: Callable[[float], object] = time.sleep
) -> Iterator[Snapshot]:
    """This many snapshots of a store, so many seconds apart. Raises OutcomeUnknown if one fails."""
    for look in range(times):
        if look:
            wait(seconds)
        listing = store.list()
        yield Snapshot(time.time(), listing.leases, len(listing.malformed))


def saved(name: str, lines: Iterable[bytes]) -> Iterator[Snapshot]:
    """The snapshots in these lines of JSON; `name` says whose they are.

    Lines that repeat an earlier look, because a later one failed, are left out.
    Raises BadField, naming the line and the field.
    """
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                snapshot = _snapshot(line)
            except BadField as bad:
                raise BadField(f"{name}, line {number}: {bad}") from None
            if snapshot is not None:
                yield snapshot


def _snapshot(line: bytes) -> Snapshot | None:
    fields = parse(line).fields()
    at = fields.need("at").number()
    leases = tuple(lease_of(value) for value in fields.need("leases").items())
    malformed = fields.read("malformed", lambda value: len(value.items()), 0)
    trouble = fields.read("trouble", lambda value: value.text(), "")
    fields.done()
    return None if trouble else Snapshot(at, leases, malformed)
