"""Tries each right with one request, and returns the results as findings.

Rule 1: A denied right is distinguished from a service that does not respond.
Rule 2: If the service cannot be reached, or the table, bucket or stream does not exist, no further requests are sent.
Rule 3: An attempt has no lasting effect. If it has to write an object, it deletes the object again.

A `Finding` is the result of one check. `compare_with_stream` is a pure function that checks whether the rows of a table
are leases of this stream.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import asdict, frozen

from leasehold.balancer.model import Lease, Shard
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError
from leasehold.stores.protocol import Listing
from leasehold.stores.requests import SKEW_SECONDS, SkewWarning
from leasehold.stores.urls import parse_date_header

FindingState = Literal["ok", "wrong", "unknown"]
"""The result of a check. It is `unknown` if the check was impossible or not allowed."""


@frozen
class Finding:
    """The result of one check.

    Attributes:
        what: What was checked: a right, by the service's name for it, or something else such as "clock".
        state: Whether the check succeeded.
        says: A sentence that describes the result.
        todo: What the user should do; "" if there is nothing to do, or if `says` contains the remedy.
    """

    what: str
    state: FindingState
    says: str
    todo: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the fields as JSON values."""
        return asdict(self)


def has_no_wrong_finding(findings: Iterable[Finding]) -> bool:
    """Return whether no finding is wrong. Unknown results don't count as wrong."""
    return all(finding.state != "wrong" for finding in findings)


def clock_finding(service: str, seconds_ahead: float | None) -> Finding:
    """Return the finding about our clock.

    Args:
        service: The name of the service.
        seconds_ahead: How many seconds our clock is ahead of the service's clock; None if the service sent no time.
    """
    clock_name = f"clock of {service}"
    if seconds_ahead is None:
        return Finding(clock_name, "unknown", "the service's responses contain no time")
    difference_text = (
        f"ours is {abs(seconds_ahead):.1f} s {'ahead of' if seconds_ahead >= 0 else 'behind'} it (measured in whole "
        "seconds)"
    )
    if abs(seconds_ahead) <= SKEW_SECONDS:
        return Finding(clock_name, "ok", difference_text)
    return Finding(
        clock_name,
        "wrong",
        difference_text,
        "set the clock: the service rejects requests from 5 min on, and lag is only as accurate as the clocks",
    )


_DENIED = frozenset({"AccessDeniedException", "AccessDenied", "KMSAccessDeniedException"})
_DENIED_STATUS = 403
_DENIED_SQL = "42501"
REQUEST_SECONDS = 5.0
"""The timeout of a request. Failed requests are not retried, because a user is waiting for the result."""

HALF_SECOND = 0.5
"""The average error of a Date header in seconds, because the header's time is truncated to whole seconds."""


class NotTried(Exception):
    """A permission was not tested, because the test would need another permission or have a lasting effect."""


class Absent(Exception):
    """The table, container, bucket or consumer does not exist. The first worker may create it."""


class NotALeaseTable(StoreError):
    """The table does not have the shape of a lease table."""


@frozen
class RightAttempt:
    """An attempt to use one right.

    Attributes:
        right: The service's name of the right.
        try_request: Sends the request that uses the right. May return a string, which replaces "allowed" in the
            finding. Raises StoreError, SourceError, NotTried, Absent or NotALeaseTable.
        writes: Whether this is a right to write.
    """

    right: str
    try_request: Callable[[], object]
    writes: bool = False


@frozen
class RightsTrial:
    """The rights on a store or a stream, and the requests that show whether they are granted.

    Attributes:
        name: The name of the store or stream in messages.
        attempts: One attempt per right. The first one shows whether the service can be reached.
        clock: Measures the service's clock from its responses; None if the responses contain no time.
        check_conditions: Tries conditional writes, and raises StoreError if their conditions are ignored; None for
            a stream.
        close: Closes all connections.
    """

    name: str
    attempts: tuple[RightAttempt, ...]
    clock: "ServiceClock | None" = None
    check_conditions: Callable[[], object] | None = None
    close: Callable[[], None] = lambda: None


class ServiceClock(SkewWarning):
    """Measures the difference between our clock and a service's clock, without logging a warning."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._now = clock
        self.seconds_ahead: float | None = None

    def observe(self, service_now: float) -> None:
        """Record by how much our clock is ahead of the service's clock.

        `service_now` is in whole seconds since 1970.
        """
        self.seconds_ahead = self._now() - service_now - HALF_SECOND

    def read_date_header(self, http_response: Any, **_more: object) -> None:  # noqa: ANN401  botocore passes any arguments to hooks
        """Read the time from a response's Date header.

        Botocore calls this hook after every request, even a failed one.
        """
        if (service_time := parse_date_header(http_response.headers.get("date"))) is not None:
            self.observe(service_time)


def try_rights(trial: RightsTrial, *, read_only: bool) -> Iterator[Finding]:
    """Try the rights one after another. Stop after a failure that every remaining attempt would also meet (rule 2)."""
    for attempt in trial.attempts:
        right_name, trial_name = attempt.right, trial.name
        if attempt.writes and read_only:
            yield Finding(
                right_name, "unknown", f"{trial_name}: not tried, because it is a right to write (--read-only)"
            )
            continue
        try:
            remark = attempt.try_request()
            yield Finding(right_name, "ok", f"{trial_name}: {remark if isinstance(remark, str) else 'allowed'}")
        except Absent as error:
            yield Finding(right_name, "unknown", str(error), "let the first worker create it, and run this again")
            return
        except NotTried as error:
            yield Finding(right_name, "unknown", f"{trial_name}: {error}")
        except NotALeaseTable as error:
            yield Finding("table", "wrong", str(error))
            return
        except (OutcomeUnknown, SourceUnavailable) as error:
            # Any response, even an error, shows that the service was reached.
            if getattr(error.__cause__, "response", None) is None:
                yield Finding(
                    right_name, "wrong", f"not reached: {error}", "check the name, the region and the network"
                )
                return
            yield Finding(right_name, "unknown", f"no usable response: {error}", "run this again later")
        except (StoreError, SourceError) as error:
            is_denied = _is_denied(error)
            yield Finding(right_name, "wrong", str(error), f"allow {right_name}" if is_denied else "")
            if not is_denied:
                return


def _is_denied(error: Exception) -> bool:
    """Return whether an error of any client library means that the service denied access (rule 1)."""
    cause: Any = error.__cause__
    if getattr(cause, "sqlstate", None) == _DENIED_SQL or getattr(cause, "code", None) == _DENIED_STATUS:
        return True
    response = getattr(cause, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return response.get("Error", {}).get("Code") in _DENIED or status == _DENIED_STATUS
    return getattr(cause, "status_code", None) == _DENIED_STATUS


TABLE_CHECK = "table"
_OTHER_TABLE = "name another table, or the source that this one belongs to"
NAMED_MAX = 3
"""The maximum number of rows that a message names."""


def compare_with_stream(
    listing: Listing, shards: tuple[Shard, ...], reads: Callable[[Lease], bool]
) -> tuple[Finding, ...]:
    """Return findings about whether the rows are leases of this stream.

    Args:
        listing: The rows of the table.
        shards: The shards of the stream.
        reads: Returns whether the source reads the stream of a lease. May raise SourceError, which becomes a finding.
    """
    malformed_rows, leases = listing.malformed, listing.leases
    if malformed_rows:
        row = min(malformed_rows, key=lambda row: row.key)
        reason = f"for one {row.key!r}: {row.field}: {row.why}"
        if leases:
            problem = (
                f"{len(malformed_rows)} of {len(leases) + len(malformed_rows)} rows cannot be read as leases, {reason}"
            )
            return (
                Finding(TABLE_CHECK, "wrong", problem, "correct or delete these rows: no worker reads their shards"),
            )
        problem = (
            f"none of its {len(malformed_rows)} rows is a lease, {reason}: the table belongs to another application"
        )
        return (Finding(TABLE_CHECK, "wrong", problem, _OTHER_TABLE),)
    if not leases:
        return (Finding(TABLE_CHECK, "ok", f"it has no leases yet; workers create those of {len(shards)} shards"),)
    try:
        own_leases = tuple(lease for lease in leases if reads(lease))
    except SourceError as error:
        return (Finding(TABLE_CHECK, "wrong", str(error), _OTHER_TABLE),)
    return (_compare_with_shards(own_leases, len(leases) - len(own_leases), {shard.id: shard for shard in shards}),)


def _compare_with_shards(
    leases: tuple[Lease, ...], other_lease_count: int, shards_by_id: Mapping[str, Shard]
) -> Finding:
    other_streams_remark = (
        f"; {other_lease_count} leases belong to streams that are not read here" if other_lease_count else ""
    )
    listed_leases = [lease for lease in leases if lease.key in shards_by_id]
    if leases and not listed_leases:
        key_list = _first_keys(leases)
        problem = (
            f"the stream has no shard for any of its {len(leases)} leases ({key_list}): it belongs to another stream"
        )
        return Finding(TABLE_CHECK, "wrong", problem + other_streams_remark, _OTHER_TABLE)
    ranges = [(lease, lease.hash_range, shards_by_id[lease.key].hash_range) for lease in listed_leases]
    if mismatched_leases := [
        lease
        for lease, lease_range, shard_range in ranges
        if lease_range and shard_range and lease_range != shard_range
    ]:
        problem = (
            f"{len(mismatched_leases)} leases ({_first_keys(mismatched_leases)}) have other hash ranges than the "
            "stream's shards"
        )
        return Finding(
            TABLE_CHECK,
            "wrong",
            f"{problem}: it belongs to another stream, or the stream was recreated{other_streams_remark}",
            _OTHER_TABLE,
        )
    if unlisted_leases := [lease for lease in leases if lease.key not in shards_by_id and not lease.ended]:
        problem = (
            f"the stream has no shard for {len(unlisted_leases)} unfinished leases ({_first_keys(unlisted_leases)}): "
            "past retention"
        )
        return Finding(
            TABLE_CHECK,
            "unknown",
            problem + other_streams_remark,
            "workers remove them; check that no worker was that far behind",
        )
    owner_count = len({lease.owner for lease in leases if lease.owner})
    return Finding(
        TABLE_CHECK, "ok", f"it has {len(leases)} leases of this stream, and {owner_count} owners{other_streams_remark}"
    )


def _first_keys(leases: Sequence[Lease]) -> str:
    key_list = ", ".join(lease.key for lease in leases[:NAMED_MAX])
    return f"{key_list} …" if len(leases) > NAMED_MAX else key_list
