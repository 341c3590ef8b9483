"""Computes the lag of each lease, and the status of a lease or group as one word and one sentence.

`leases`, its exit status, `serve`, `/healthz`, metrics, alarms and `explain` all use `status_of`. No thresholds have to
be configured. As in LinkedIn's Burrow, a lease is judged by its progress over a window of time.

1. A status is OK only if there is evidence for it, in a row of the table or in our own observations.
2. If the status cannot be determined, it is UNKNOWN, which does not count as OK.
3. Time limits are derived from `lease_seconds` and from how often leases are read and annotated
   (`worker/progress.py:tolerated_unread_seconds`).

`MEANINGS` lists the words in order, with the worst one last.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Factory, asdict, evolve, frozen

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.progress import (
    LAG_STEP_SECONDS,
    LAG_STEPS,
    RENEWED_FRACTION,
    RETRIED_RENEWAL_FRACTION,
    Progress,
    is_lag_growing,
    max_annotation_age,
    progress_of,
    tolerated_unread_seconds,
)
from leasehold.balancer.contradictions import reported_contradiction
from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease
from leasehold.errors import SourceError

CONFIRM_SECONDS = 10.0
"""The maximum time, in seconds, to watch for a renewal before a lease is considered not renewed."""


@frozen
class LeaseLag:
    """How far the reading of one shard is behind its tip.

    Attributes:
        seconds: The lag in seconds; None if unknown. This is an upper bound, unless `at_least` is true.
        events: The lag as a number of events, if the stream counts them (Event Hubs).
        end: Whether the tip was recently reached.
        age: The age of the last handled record, in seconds, when the owner wrote its annotation.
        host: The machine of the owner that wrote the annotation.
        moves: How many times the lease has moved from one worker to another, as far as our workers noticed.
        at_least: Whether `seconds` is a lower bound, because the stream has stopped responding.
    """

    seconds: float | None = None
    events: int | None = None
    end: bool = False
    age: float | None = None
    host: str = ""
    moves: int | None = None
    at_least: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the values that are known, for `json.dumps`. `at_least` is included only if it is true."""
        values = {name: value for name, value in asdict(self).items() if value not in {None, ""}}
        return values if self.at_least else {name: value for name, value in values.items() if name != "at_least"}


def lag_of(lease: Lease, now: float, limit: float) -> LeaseLag:
    """Return the lag of an unfinished lease, according to its row's annotation.

    Args:
        lease: The lease.
        now: The time in seconds since 1970.
        limit: The number of seconds without a renewal after which an owner is considered dead.
    """
    progress = progress_of(lease)
    # If an owner has not renewed within its own `lease_seconds`, it may be dead, and its last annotation outdated.
    is_held = (
        lease.owner is not None
        and lease.idle <= limit
        and not (progress is not None and progress.renewal_overdue(lease.idle))
    )
    if progress is None:
        return LeaseLag()
    written_by_owner, annotation_limit_seconds = (
        progress.owner == lease.owner,
        tolerated_unread_seconds(progress.lease or limit),
    )
    if (
        is_held
        and not written_by_owner
        and now - progress.at > annotation_limit_seconds
        and not progress.is_put_aside(now, annotation_limit_seconds)
    ):
        return LeaseLag(moves=progress.moves + 1)  # another library reads the lease now, and writes no annotations
    seconds = progress.lag(now, is_held=is_held and written_by_owner)
    return LeaseLag(
        seconds=None if seconds is None else round(seconds, 3),
        end=progress.end and is_held and written_by_owner and now - (progress.done or now) <= annotation_limit_seconds,
        age=None if progress.arrived is None else round(max(0.0, progress.at - progress.arrived), 3),
        host=progress.host if written_by_owner else "",
        moves=progress.moves + (lease.owner is not None and not written_by_owner),
        at_least=progress.lag_may_be_larger(now, is_held=is_held and written_by_owner),
    )


def lags_of(leases: Iterable[Lease], now: float, limit: float) -> dict[str, LeaseLag]:
    """Return the lag of every unfinished lease, by key."""
    return {lease.key: lag_of(lease, now, limit) for lease in leases if not lease.ended}


@frozen
class FleetLag:
    """How far all leases of an application are behind.

    Attributes:
        most: The lag, in seconds, of the lease that is furthest behind; None if no lag is known.
        total: The sum of the lags of all leases, in seconds.
        at_least: Whether `most` and `total` are lower bounds, because the lag of at least one lease is a lower bound.
    """

    most: float | None
    total: float
    at_least: bool = False


def fleet_lag(lags: Mapping[str, LeaseLag]) -> FleetLag:
    """Return the maximum and the sum of the lags of all leases."""
    known_lags = [lag.seconds for lag in lags.values() if lag.seconds is not None]
    return FleetLag(
        max(known_lags, default=None), round(sum(known_lags), 3), any(lag.at_least for lag in lags.values())
    )


def lags_from_stream(source: Source, leases: Iterable[Lease], lags: Mapping[str, LeaseLag]) -> dict[str, LeaseLag]:
    """Return the lags, with missing ones computed from the stream (for rows of Java workers, for example).

    If the stream numbers its events without gaps (Event Hubs), the number of events after the checkpoint is computed.
    For other streams, one batch is read at the checkpoint to find its lag. Raises SourceError.
    """
    all_lags = dict(lags)
    for lease in leases:
        if lease.key not in all_lags or all_lags[lease.key].seconds is not None:
            continue
        latest_position = source.latest(lease)
        if latest_position.numbered and lease.checkpoint.numbered:
            event_count = max(0, int(latest_position.sequence) - int(lease.checkpoint.sequence))
            all_lags[lease.key] = LeaseLag(0.0 if not event_count else None, event_count, not event_count)
        if latest_position.sequence != "AT_TIMESTAMP" or lease.checkpoint.sequence == "LATEST":
            continue  # either the events were counted above, or a batch would not show the lag
        reader = source.open(lease, lease.checkpoint)
        try:
            batch = reader.read()
        except SourceError:
            continue  # the lag stays unknown
        finally:
            reader.close()
        first_arrival = batch.records[0].arrived if batch.records else None
        lag_seconds = (
            batch.behind_seconds if first_arrival is None else max(0.0, latest_position.sub / 1000 - first_arrival)
        )
        if lag_seconds is not None:
            all_lags[lease.key] = LeaseLag(round(lag_seconds, 3), end=not lag_seconds)
    return all_lags


MEANINGS = {
    "OK": "read and handled up to the tip, or not falling behind",
    "UNKNOWN": "not known: the table or its rows contain too little, or were watched too briefly",
    "BEHIND": "read, but falling further behind for two minutes",
    "STALLED": "owned, but its position does not move, because reads or the handler fail",
    "HUNG": "its handler does not end",
    "UNREAD": "owned, but not read, for no known reason",
    "ORPHAN": "without a living owner for longer than it should take",
}
"""The meaning of each word. The worst word is last."""

NUMBERS = {word: number and number + 2 for number, word in enumerate(MEANINGS)}
"""The exit statuses of `leases --check`, and the values of metrics.

OK is 0. The others are 3 to 8, and a worse status has a higher number. As exit statuses, 1 and 2 keep their usual
meanings: the store failed, or the command was used wrongly.
"""


@frozen
class Status:
    """A word of `MEANINGS`, and a sentence with the reason."""

    word: str
    says: str

    @property
    def number(self) -> int:
        """The word's number in `NUMBERS`."""
        return NUMBERS[self.word]

    @property
    def ok(self) -> bool:
        """Whether the word is OK."""
        return self.word == "OK"

    def as_json(self) -> dict[str, Any]:
        """Return the word and the sentence as a dictionary for `json.dumps`."""
        return {"status": self.word, "says": self.says}


@frozen
class LeaseWatch:
    """The observations of one lease over a window of time, used if its owner does not annotate its progress.

    Attributes:
        samples: The time, position and lag at each recent read of the table, over the last `LAG_STEPS` steps.
        previous_owner_wrote_at: The time at which a previous owner wrote its last annotation. If that worker takes
            the lease again, the annotation remains outdated until it writes a new one.
    """

    samples: tuple[tuple[float, tuple[int, int, int], float | None], ...] = ()
    previous_owner_wrote_at: float | None = None

    def after(self, read_at: float, lease: Lease, lag: LeaseLag) -> "LeaseWatch":
        """Return the window after one more read of the table."""
        lag_amount = lag.seconds if lag.events is None else float(lag.events)
        samples = tuple(sample for sample in self.samples if read_at - sample[0] <= LAG_STEPS * LAG_STEP_SECONDS)
        # The table may be read many times per second. Store one sample for all reads that show nothing new, to limit
        # the size of the window.
        is_same_sample = (
            len(samples) > 1 and samples[-1][1] == lease.checkpoint.order and read_at - samples[-2][0] < 1.0
        )
        progress = progress_of(lease)
        # Remember the last annotation of a previous owner. It remains outdated, even if that worker becomes the owner
        # again.
        previous_owner_wrote_at = (
            self.previous_owner_wrote_at if progress is None or progress.owner == lease.owner else progress.at
        )
        return LeaseWatch(
            (*(samples[:-1] if is_same_sample else samples), (read_at, lease.checkpoint.order, lag_amount)),
            previous_owner_wrote_at,
        )

    @property
    def unchanged_seconds(self) -> float:
        """The number of seconds for which the position has not moved."""
        same_position_times = [read_at for read_at, position, _ in self.samples if position == self.samples[-1][1]]
        # Count from the first read of the table in which the lease had this position. Earlier times are unknown.
        return same_position_times[-1] - same_position_times[0] if same_position_times else 0.0

    @property
    def moved(self) -> bool:
        """Whether the position has moved while the table was watched."""
        return len({position for _, position, _ in self.samples}) > 1

    @property
    def grows(self) -> bool:
        """Whether the lag has grown throughout the window."""
        return is_lag_growing(
            [(read_at, lag_amount) for read_at, _, lag_amount in self.samples if lag_amount is not None]
        )


@frozen
class GroupWatch:
    """The observations of all leases of a table over a window of time."""

    leases: Mapping[str, LeaseWatch] = Factory(dict)
    began: float = math.inf
    at: float = math.inf

    def after(self, read_time: float, leases: Iterable[Lease], lags: Mapping[str, LeaseLag]) -> "GroupWatch":
        """Return the window after one more read of the table.

        `read_time` is the time of that read by a monotonic clock.
        """
        lease_watches = {
            lease.key: self.leases.get(lease.key, LeaseWatch()).after(read_time, lease, lags[lease.key])
            for lease in leases
            if lease.key in lags
        }
        return GroupWatch(lease_watches, min(self.began, read_time), read_time)

    @property
    def seconds(self) -> float:
        """The number of seconds for which the table has been watched."""
        return 0.0 if self.at == math.inf else self.at - self.began


def statuses_of(
    leases: Iterable[Lease],
    lags: Mapping[str, LeaseLag],
    now: float,
    lease_seconds: float,
    watch: GroupWatch | None = None,
) -> dict[str, Status]:
    """Return the status of every lease, by key.

    Args:
        leases: The leases.
        lags: The lags of the leases, by key.
        now: The time in seconds since 1970.
        lease_seconds: The lease duration of owners whose rows do not contain it.
        watch: The observations of the table, if it was watched.
    """
    leases_by_key = {lease.key: lease for lease in leases}
    watch = watch or GroupWatch()
    return {
        key: status_of(
            lease,
            lags.get(key, LeaseLag()),
            now,
            lease_seconds,
            watched_seconds=watch.seconds,
            watch=watch.leases.get(key, LeaseWatch()),
            waits_for_parents=not readable(lease, leases_by_key),
            contradiction=reported_contradiction(lease),
        )
        for key, lease in leases_by_key.items()
    }


def status_of(
    lease: Lease,
    lag: LeaseLag,
    now: float,
    lease_seconds: float,
    *,
    watched_seconds: float = 0.0,
    watch: LeaseWatch = LeaseWatch(),
    waits_for_parents: bool = False,
    contradiction: str = "",
) -> Status:
    """Return the status of one lease.

    Args:
        lease: The lease.
        lag: The lease's lag, from the row or from the stream.
        now: The time in seconds since 1970.
        lease_seconds: The owner's lease duration, if the row does not contain it.
        watched_seconds: The number of seconds for which the table was watched. `lease.idle` was measured meanwhile.
        watch: The observations of this lease.
        waits_for_parents: Whether a parent is not done yet, so that the lease must not be read (L12).
        contradiction: The contradiction between table and stream that concerns this lease (L14), or "".
    """
    if contradiction or lease.ended:
        return Status("UNREAD", contradiction) if contradiction else Status("OK", "read to its end")
    progress = progress_of(lease)
    limit_seconds = tolerated_unread_seconds(
        lease_seconds if progress is None or progress.lease is None else progress.lease
    )
    # If the parents are not done, the shard must not be read yet, so this is not a fault. Otherwise, every split would
    # raise an alarm.
    if waits_for_parents:
        return Status("OK", "its parents are not done: it is read after them")
    # The lease has not been renewed for at least this time, according to our observation or its last annotation.
    unrenewed_seconds = lease.idle if lease.idle < math.inf else 0.0
    if (
        progress is not None
        and progress.owner == (lease.owner or progress.owner)
        and watched_seconds <= lease.idle + 1.0
    ):
        unrenewed_seconds = max(
            unrenewed_seconds, now - progress.at
        )  # only if the lease's version did not change while we watched
    is_recent = progress is not None and now - progress.at <= limit_seconds
    # Report a fault before a missing owner. If a worker could not handle the lease, it leaves the lease without an
    # owner for a while, so the fault is the cause.
    if progress is not None and progress.is_put_aside(now, limit_seconds) and (lease.owner is None or not is_recent):
        exclusion_text = (
            f"; {progress.owner} put it aside until {_format_utc(progress.aside or 0.0)}" if lease.owner is None else ""
        )
        return Status("STALLED", f"{_stalled_reason(progress, now)}{exclusion_text}")
    # Check for a missing owner before using the status in the annotation, which is outdated if no worker reads the
    # lease.
    if unrenewed_seconds > limit_seconds or (lease.owner is None and not is_recent):
        return _unowned_status(lease, progress, unrenewed_seconds, limit_seconds, watched_seconds)
    written_by_owner = (
        progress is not None and progress.owner == lease.owner and progress.at != watch.previous_owner_wrote_at
    )
    if progress is None or not (is_recent or written_by_owner):
        return _observed_status(lease, lag, watched_seconds, watch, limit_seconds)
    # If the lease was renewed while we watched, yet its annotation is old, the owner's clock is behind ours. The times
    # in the annotation are then judged by the owner's own clock.
    status = _annotated_status(progress, max(now, progress.at) if is_recent else progress.at, limit_seconds)
    if (
        status.word == "UNREAD"
        and written_by_owner
        and unrenewed_seconds > max_annotation_age(progress.lease or lease_seconds)
    ):
        # The lease was not renewed, and the owner's next annotation is overdue, too. So the owner is gone, and not
        # merely idle.
        return _unowned_status(lease, progress, unrenewed_seconds, 0.0, watched_seconds)
    late_seconds = RETRIED_RENEWAL_FRACTION * (progress.lease or lease_seconds)
    is_unrenewed = late_seconds <= lease.idle < math.inf or (
        unrenewed_seconds >= late_seconds and watched_seconds >= min(late_seconds, CONFIRM_SECONDS)
    )
    if status.ok and lease.owner is not None and is_unrenewed:
        # The owner may be dead. This is not known until the owner renews the lease, or another worker takes it.
        return Status(
            "UNKNOWN",
            f"{lease.owner} owns it and has not renewed it for {unrenewed_seconds:.0f} s; "
            f"a living owner does within {late_seconds:.0f} s",
        )
    if status.ok and written_by_owner and progress.renewal_overdue(lease.idle):
        return Status("OK", f"{status.says} {now - progress.at:.0f} s ago; {lease.owner} should have renewed it since")
    if not status.ok or written_by_owner:
        return status
    return Status(
        "OK",
        "nobody owns it: a worker will find it at its next look"
        if lease.owner is None
        else "its owner changed recently",
    )


def confirmed(lease: Lease, status: Status, now: float, lease_seconds: float, watched_seconds: float) -> bool:
    """Return whether an OK lease is known to have a living owner, so that the table need not be read again.

    A checkpoint renews a lease without writing a new annotation. If the annotation is older than the renewal interval,
    a single read of the table therefore cannot distinguish a busy owner from a dead one. A second read shows whether
    the row has changed.

    Args:
        lease: The lease.
        status: The status of the lease according to the reads of the table so far.
        now: The time in seconds since 1970.
        lease_seconds: The owner's lease duration, if the row does not contain it.
        watched_seconds: For how many seconds the table was watched.
    """
    progress = progress_of(lease)
    if not status.ok or progress is None or lease.owner is None:
        return True
    renews_within = RENEWED_FRACTION * (progress.lease or lease_seconds)
    # If the owner's clock is ahead of ours, the age of the annotation is unknown, so do not consider it recent.
    is_recent = progress.owner == lease.owner and -1.0 <= now - progress.at <= renews_within
    was_renewed = watched_seconds > lease.idle + 1.0 or (
        watched_seconds <= 0 < lease.idle <= renews_within
    )  # we observed the renewal, or the store reported it
    return (
        is_recent
        or was_renewed
        or watched_seconds >= min(RETRIED_RENEWAL_FRACTION * (progress.lease or lease_seconds), CONFIRM_SECONDS)
    )


def _unowned_status(
    lease: Lease, progress: Progress | None, unrenewed_seconds: float, limit_seconds: float, watched_seconds: float
) -> Status:
    """Return the status of a lease that had no owner, or was not renewed by its owner, for this many seconds."""
    owner_text = "nobody owns it" if lease.owner is None else f"{lease.owner} owns it and has not been heard of"
    if unrenewed_seconds > limit_seconds:
        fault = f"; the last fault: {progress.cause}" if progress is not None and progress.cause else ""
        return Status("ORPHAN", f"{owner_text} for {unrenewed_seconds:.0f} s, and no other worker takes it{fault}")
    if watched_seconds <= 0:
        return Status("UNKNOWN", f"{owner_text}; one look does not tell for how long: watch it (--watch)")
    return Status(
        "UNKNOWN",
        f"{owner_text} for {unrenewed_seconds:.0f} s as far as was observed; "
        f"a worker should renew or take it within {limit_seconds:.0f} s",
    )


def _annotated_status(progress: Progress, now: float, limit_seconds: float) -> Status:
    """Return the status according to the owner's annotation."""
    handler_began_at, stalled_seconds = progress.work, 0.0 if progress.done is None else now - progress.done
    if stalled_seconds <= limit_seconds:
        if progress.grows:
            return Status("BEHIND", f"{_lag_text(progress)}, and falling further behind for two minutes")
        # `excused` is the owner's reason for not reading now, for example that the parents are not done.
        return Status("OK", progress.excused or _lag_text(progress))
    # Report a hanging handler in preference to a fault. If a handler never returns, it is the cause, even if something
    # else failed earlier.
    if handler_began_at is not None and now - handler_began_at > limit_seconds:
        return Status(
            "HUNG", f"its handler has been at work for {now - handler_began_at:.0f} s, without an end or a checkpoint"
        )
    if progress.cause:
        return Status("STALLED", _stalled_reason(progress, now))
    return Status(
        "UNREAD",
        f"{progress.owner} owns it, and has not read it for {stalled_seconds:.0f} s, without giving a reason",
    )


def _stalled_reason(progress: Progress, now: float) -> str:
    stalled_seconds = 0.0 if progress.done is None else now - progress.done
    return f"it has not moved for {stalled_seconds:.0f} s: {progress.cause or 'its owner could not continue'}"


def _format_utc(time_seconds: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.gmtime(time_seconds))} UTC"  # rows may exceed datetime's range


def _lag_text(progress: Progress) -> str:
    if progress.behind is None:
        return "not read yet" if progress.read is None else "read, how far behind is not known"
    return "read to the tip" if progress.end else f"{progress.behind:.1f} s behind"


def _observed_status(
    lease: Lease, lag: LeaseLag, watched_seconds: float, watch: LeaseWatch, limit_seconds: float
) -> Status:
    """Return the status of a lease without our annotation (held by another library), according to our observations."""
    lag_amount = lag.seconds if lag.events is None else float(lag.events)
    lag_text = f"{lag.events} events behind" if lag.events is not None else f"{lag_amount or 0.0:.1f} s behind"
    # Check first whether the shard is at its tip. The position of such a shard does not move until more records arrive,
    # so it is not stalled.
    if lag_amount == 0:
        return Status("OK", "read to the tip")
    if watch.grows and watch.moved:
        # The lease makes progress but does not keep up, so it is BEHIND, not STALLED.
        return Status("BEHIND", f"{lag_text}, and falling further behind for two minutes")
    if lag_amount is not None and watch.unchanged_seconds > limit_seconds:
        return Status("STALLED", f"{lag_text}, and its checkpoint has not moved for {watch.unchanged_seconds:.0f} s")
    if watch.moved and watch.unchanged_seconds <= limit_seconds:
        return Status("OK", f"its checkpoint moves; {lag_text}" if lag_amount is not None else "its checkpoint moves")
    if watched_seconds <= 0:
        # A single read of the table shows where the checkpoint is, but not whether it moves.
        return Status("UNKNOWN", f"{lease.owner} tells nothing of its reading: watch it (--watch)")
    hint = "" if lag_amount is not None else "; use --source to check the stream for waiting records"
    return Status("UNKNOWN", f"its checkpoint has not moved in {watch.unchanged_seconds:.0f} s{hint}")


def group_status(statuses: Mapping[str, Status], trouble: str = "") -> Status:
    """Return the status of the group, which is that of its worst lease.

    Args:
        statuses: The status of each lease, by key.
        trouble: Why the table cannot be read, or "".
    """
    if trouble:
        return Status("UNKNOWN", f"the table cannot be read: {trouble}")
    if not statuses:
        return Status("UNKNOWN", "the table has no leases")
    # If one shard is not read, the group is faulty, no matter how many others are read.
    worst_status = max(statuses.values(), key=lambda candidate: candidate.number)
    worst_keys = sorted(key for key, status in statuses.items() if status.word == worst_status.word)
    if worst_status.ok:
        return Status("OK", f"{len(worst_keys)} leases are read, and do not fall behind")
    share_text = f"{len(worst_keys)} of {len(statuses)} leases"
    return evolve(worst_status, says=f"{share_text}, {worst_keys[0]} first: {statuses[worst_keys[0]].says}")
