"""Rights, each used once, and what came of it.

Rule 1: a refusal by name is told apart from silence. Rule 2: where the service cannot be reached, or what everything
else is about is not there, nothing more is asked. Rule 3: what has no consequence is found out by `ask`; whatever
it writes, it removes.

A `Finding` is what an examination has found. `recognised` tells, purely, whether the rows of a table are leases of this
stream.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import asdict, frozen

from leasehold.balancer.model import Lease, Shard
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError
from leasehold.stores.protocol import Listing
from leasehold.stores.requests import SKEW_SECONDS, SkewWarning
from leasehold.stores.urls import date_of

FindingState = Literal["ok", "wrong", "unknown"]
"""`unknown` is what could not, or should not, be tried."""


@frozen
class Finding:
    """The result of one examination.

    what  its name: a right by the service's own name, or a word such as "clock"
    says  a sentence
    todo  what to do about it; "" where nothing is to be done, or the sentence says it
    """

    what: str
    state: FindingState
    says: str
    todo: str = ""

    def as_json(self) -> dict[str, str]:
        """The fields by their names."""
        return asdict(self)


def well(findings: Iterable[Finding]) -> bool:
    """Whether nothing is wrong; what is unknown is not."""
    return all(finding.state != "wrong" for finding in findings)


def clock_of(service: str, ahead: float | None) -> Finding:
    """The finding about our clock, which is so many seconds ahead of this service's; None: it did not say."""
    what = f"clock of {service}"
    if ahead is None:
        return Finding(what, "unknown", "the service told no time")
    said = f"ours is {abs(ahead):.1f} s {'ahead of' if ahead >= 0 else 'behind'} it (told in whole seconds)"
    if abs(ahead) <= SKEW_SECONDS:
        return Finding(what, "ok", said)
    return Finding(
        what, "wrong", said, "set the clock: requests are refused at 5 min, and lag is as true as clocks are"
    )


_DENIED = frozenset({"AccessDeniedException", "AccessDenied", "KMSAccessDeniedException"})
_DENIED_STATUS = 403
_DENIED_SQL = "42501"
REQUEST_SECONDS = 5.0
"""Most time of one request, which is sent once: somebody waits for the answer."""

HALF_SECOND = 0.5
"""A Date header is cut to whole seconds, so it is that much early on the average."""


class NotTried(Exception):
    """A right could not be used without another one, or without a consequence."""


class NotThere(Exception):
    """The table, container, bucket or consumer does not exist, which the first worker may mend."""


class NotOurs(StoreError):
    """The table is of another shape than a lease table."""


@frozen
class RightAttempt:
    """The use of one right.

    right   by the service's own name
    ask     uses it without a consequence, and returns a text if there is more to say than that it is allowed; raises
            StoreError, SourceError, or one of the three above
    writes  whether it is a right to write
    """

    right: str
    ask: Callable[[], object]
    writes: bool = False


@frozen
class RightsTrial:
    """The rights on a store, or on one stream, and how to try them.

    name      for sentences and for the clock
    attempts  its rights; the first one reaches it
    clock     what the service's answers said about the time; None where it has no clock of its own
    prove     tries conditional writes; raises StoreError if they are ignored; None: there are none
    close     closes all connections
    """

    name: str
    attempts: tuple[RightAttempt, ...]
    clock: "ServiceClock | None" = None
    prove: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None


class ServiceClock(SkewWarning):
    """Keeps how far our clock is ahead of a service's, in place of warning of it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._now = clock
        self.ahead: float | None = None

    def saw(self, service_now: float) -> None:
        """Note the difference to the service's clock (seconds since 1970, in whole ones)."""
        self.ahead = self._now() - service_now - HALF_SECOND

    def heard(self, http_response: Any, **_more: object) -> None:  # noqa: ANN401  botocore gives hooks what it likes
        """Take the time from an answer's Date header: a hook after a call of botocore's, refusals included."""
        if (now := date_of(http_response.headers.get("date"))) is not None:
            self.saw(now)


def attempted(trial: RightsTrial, *, read_only: bool) -> Iterator[Finding]:
    """Try one right after the other, until the attempts that are left would fail alike (rule 2)."""
    for attempt in trial.attempts:
        right, name = attempt.right, trial.name
        if attempt.writes and read_only:
            yield Finding(right, "unknown", f"{name}: not tried, as it is a right to write (--read-only)")
            continue
        try:
            said = attempt.ask()
            yield Finding(right, "ok", f"{name}: {said if isinstance(said, str) else 'allowed'}")
        except NotThere as error:
            yield Finding(right, "unknown", str(error), "let the first worker make it, and ask again")
            return
        except NotTried as error:
            yield Finding(right, "unknown", f"{name}: {error}")
        except NotOurs as error:
            yield Finding("table", "wrong", str(error))
            return
        except (OutcomeUnknown, SourceUnavailable) as error:
            # A service that said something at all is reached, whatever it said.
            if getattr(error.__cause__, "response", None) is None:
                yield Finding(right, "wrong", f"not reached: {error}", "check the name, the region, the network")
                return
            yield Finding(right, "unknown", f"no usable answer: {error}", "ask again later")
        except (StoreError, SourceError) as error:
            denied = _denied(error)
            yield Finding(right, "wrong", str(error), f"allow {right}" if denied else "")
            if not denied:
                return


def _denied(error: Exception) -> bool:
    """Whether it is a refusal by name (rule 1), in the words of the services' clients."""
    cause: Any = error.__cause__
    if getattr(cause, "sqlstate", None) == _DENIED_SQL or getattr(cause, "code", None) == _DENIED_STATUS:
        return True
    answer = getattr(cause, "response", None)
    if isinstance(answer, dict):
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return answer.get("Error", {}).get("Code") in _DENIED or status == _DENIED_STATUS
    return getattr(cause, "status_code", None) == _DENIED_STATUS


WHAT = "table"
_OTHER = "name another table, or the source that this one belongs to"
NAMED = 3
"""Rows are named up to so many."""


def recognised(listing: Listing, shards: tuple[Shard, ...], reads: Callable[[Lease], bool]) -> tuple[Finding, ...]:
    """Tell whose rows these are. `reads` says whether a source reads a lease's stream, and may raise SourceError."""
    bad, leases = listing.malformed, listing.leases
    if bad:
        one = min(bad, key=lambda row: row.key)
        why = f"for one {one.key!r}: {one.field}: {one.why}"
        if leases:
            said = f"{len(bad)} of {len(leases) + len(bad)} rows cannot be read as leases, {why}"
            return (Finding(WHAT, "wrong", said, "mend or remove these rows: their shards are read by nobody"),)
        said = f"none of its {len(bad)} rows is a lease, {why}: it is another application's"
        return (Finding(WHAT, "wrong", said, _OTHER),)
    if not leases:
        return (Finding(WHAT, "ok", f"it has no leases yet; workers make those of {len(shards)} shards"),)
    try:
        ours = tuple(lease for lease in leases if reads(lease))
    except SourceError as error:
        return (Finding(WHAT, "wrong", str(error), _OTHER),)
    return (_of_shards(ours, len(leases) - len(ours), {shard.id: shard for shard in shards}),)


def _of_shards(leases: tuple[Lease, ...], others: int, listed: Mapping[str, Shard]) -> Finding:
    beside = f"; {others} leases are of streams that are not read here" if others else ""
    known = [lease for lease in leases if lease.key in listed]
    if leases and not known:
        said = f"the stream has the shards of none of its {len(leases)} leases ({_names(leases)}): it is another's"
        return Finding(WHAT, "wrong", said + beside, _OTHER)
    ranges = [(lease, lease.hash_range, listed[lease.key].hash_range) for lease in known]
    if strange := [lease for lease, ours, theirs in ranges if ours and theirs and ours != theirs]:
        said = f"{len(strange)} leases ({_names(strange)}) have other hash ranges than the stream's shards"
        return Finding(WHAT, "wrong", f"{said}: it is another stream's, or the stream was made anew{beside}", _OTHER)
    if gone := [lease for lease in leases if lease.key not in listed and not lease.ended]:
        said = f"the stream has not the shards of {len(gone)} unfinished leases ({_names(gone)}): past retention"
        return Finding(WHAT, "unknown", said + beside, "workers remove them; check that nobody was that far behind")
    owners = len({lease.owner for lease in leases if lease.owner})
    return Finding(WHAT, "ok", f"it has {len(leases)} leases of this stream, and {owners} owners{beside}")


def _names(leases: Sequence[Lease]) -> str:
    named = ", ".join(lease.key for lease in leases[:NAMED])
    return f"{named} …" if len(leases) > NAMED else named
