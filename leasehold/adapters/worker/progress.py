"""Measures the progress and throughput of a held lease. The lease's owner writes both on the lease's row.

`Throughput` is measured as KCL 3.x does, so that Java and Python workers can compare leases.

`Progress` describes how far behind the tip of its shard a lease is. The owner writes it next to the throughput, so that
a listing of the table shows the progress of all workers.

1. Progress is an annotation of ours, which other libraries preserve but do not read. If annotations are free, it is
   written with renewals. An extra write is needed only if a lease has been renewed by checkpoints alone for
   `TELL_SECONDS`.
2. The times in the annotation are from the owner's wall clock. They are only as accurate as the owner's and the
   reader's clocks agree.
3. A read that failed does not count as a read, only as a try. Lag is never 0 merely because a read returned nothing.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Lock

from attrs import asdict, evolve, fields_dict, frozen

from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import WEIGHT_MAX, Annotations, Lease


class Throughput:
    """The bytes read per second, as an exponential average with weight 0.5 per interval.

    Args:
        interval: The seconds between two updates of the average. KCL 3.x updates it at each renewal.
        average: The initial value in bytes per second, as the last owner measured it, or None if unknown.
    """

    def __init__(self, interval: float, average: int | None = None) -> None:
        self._interval = interval
        self._average: float | None = average
        self._bytes, self._began = 0, 0.0
        self._measuring = False
        # One task reads records and counts bytes while another one renews the lease and computes the average.
        self._lock = Lock()

    def add(self, size: int, now: float) -> None:
        """Count bytes that were read, perhaps none. The first call begins the first interval."""
        with self._lock:
            if not self._measuring:
                # Do not begin the first interval when the lease is claimed. Otherwise the wait until the shard is
                # opened would lower the rate.
                self._measuring, self._began = True, now
            self._bytes += size

    def rest(self, now: float) -> None:
        """Restart the interval. This worker delayed reading, so the bytes that it read don't measure the shard."""
        with self._lock:
            self._bytes, self._began = 0, now

    def average(self, now: float) -> int | None:
        """Return the bytes per second as of the last update, or None if no owner has measured the shard yet."""
        with self._lock:
            elapsed = now - self._began
            if self._measuring and elapsed >= self._interval:
                rate = self._bytes / elapsed
                # The weight depends on the elapsed time, because updates may come late or two in a row. With a fixed
                # weight, each update would halve the previous average.
                weight = 0.0 if self._average is None else 0.5 ** (elapsed / self._interval)
                self._average = weight * (self._average or 0.0) + (1 - weight) * rate
                self._bytes, self._began = 0, now
            # Limit the weight to WEIGHT_MAX. Otherwise a renewal with a larger rate would fail.
            return None if self._average is None else min(round(self._average), WEIGHT_MAX)


NOTE = "reach"
"""The name of the row attribute with a `Progress` as JSON."""

TELL_SECONDS = 20.0
"""The longest time for which only checkpoints renew a lease.

Then a renewal is needed, because only renewals write the annotation.
"""

FIRST_SECONDS = 3.0
"""How soon a new owner writes its annotation, so that the lag of a lease that has just moved is known early."""

SILENT_SECONDS = 30.0
"""After this time without a read, the time since the last read counts as lag, as new records may exist."""

RENEWED = 0.6
"""The fraction of `lease_seconds` within which a living owner renews its lease or writes a checkpoint."""

LATE = 0.8
"""The fraction of `lease_seconds` within which a renewal succeeds if its first try has failed."""

STEP_SECONDS, STEPS = TELL_SECONDS, 6
"""The time window for detecting consumers that fall behind. Lag must grow from step to step during the whole window."""

DRIPS = f"an answer of the stream has been on its way for more than {SILENT_SECONDS:g} s"
"""The fault shown for a read that neither ends nor fails, for example because the response arrives byte by byte."""

FAULT_LENGTH = 200
"""The maximum length of a fault on a row, in characters."""

LARGEST = 1e12
"""An upper limit for times and counts in annotations, far above every real value."""


def told_within(lease_seconds: float) -> float:
    """Return the number of seconds within which a living owner writes its next annotation."""
    return TELL_SECONDS + RENEWED * lease_seconds


def patience(lease_seconds: float) -> float:
    """Return for how long a lease of a healthy group may have no owner, or be shown as unread in its row.

    An owner notices within `SILENT_SECONDS` that it has read nothing. It then writes this to the row within
    `TELL_SECONDS`, or within the time between two renewals if that is longer. The time between two renewals is little
    more than half of `lease_seconds`.
    """
    return SILENT_SECONDS + max(TELL_SECONDS, RENEWED * lease_seconds)


def growing(lags: Sequence[tuple[float, float]]) -> bool:
    """Return whether lag has only grown over the window. This is Burrow's rule, which needs no threshold.

    Only the smallest lag of each step of `STEP_SECONDS` counts. Therefore a single slow response does not count as
    growth, and a single read at the tip ends the growth.

    Args:
        lags: Pairs of a time and the lag at that time, both in seconds, in order of time.
    """
    least: dict[int, float] = {}
    for time, lag in lags:
        step = int(time // STEP_SECONDS)
        least[step] = min(lag, least.get(step, math.inf))
    steps = [lag for _, lag in sorted(least.items())][-STEPS:]
    # Ignore windows that begin at the tip. Any lag is an increase compared to the tip, but a reader that is one batch
    # behind is not falling behind.
    return len(steps) == STEPS and steps[0] > 0 and all(earlier < following for earlier, following in pairwise(steps))


@frozen
class Progress:
    """The owner's record of how far its lease is behind the tip of the shard. All times are in seconds since 1970.

    Attributes:
        at: When this was written.
        owner: The worker that wrote it.
        host: The machine on which the worker runs.
        moves: How often the lease has moved from one worker to another, as far as our workers have observed.
        behind: The seconds behind the tip of the shard at the last read, or more while the batch is not done.
        end: Whether the last read reached the tip and its batch is done.
        arrived: When the last record that is done arrived in the stream.
        read: When the shard last responded.
        done: When all records that had been read were last done, or when the position last moved, whichever is later.
            Until then, the previous owner's value or, without one, the time at which the lease was taken.
        tried: When a read last succeeded, or a read or a batch last failed.
        fault: The reason why a read or a batch failed, or "" once a batch was handled.
        work: Since when the handler has been running without ending or checkpointing.
        grows: Whether lag has only grown over the window.
        lease: The owner's `lease_seconds`, from which readers derive what counts as late.
        excused: The reason why the lease is not read, if that is no fault.
        oldest: When the first record that was read and is not done arrived in the stream.
        aside: Until when the owner leaves the lease to other workers, because it could not handle the records.
        dead_letter: The reason why a record could not be dead-lettered, or "" once a record was handled or
            dead-lettered.
    """

    at: float
    owner: str
    host: str = ""
    moves: int = 0
    behind: float | None = None
    end: bool = False
    arrived: float | None = None
    read: float | None = None
    done: float | None = None
    tried: float | None = None
    fault: str = ""
    work: float | None = None
    grows: bool = False
    lease: float | None = None
    excused: str = ""
    oldest: float | None = None
    aside: float | None = None
    dead_letter: str = ""

    @property
    def cause(self) -> str:
        """The reason why the position does not move, or "".

        It includes the error if a dead letter could not be written.
        """
        return "; ".join(filter(None, (self.fault, self.dead_letter)))

    @property
    def note(self) -> str:
        """The value of the annotation, without fields that are not set."""
        values = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps({name: value for name, value in values.items() if value != ""})

    def resting(self, now: float, long: float) -> bool:
        """Return whether the lease is left to other workers at `now`, or was until at most `long` seconds earlier."""
        return self.aside is not None and now <= self.aside + long

    def overdue(self, idle: float) -> bool:
        """Return whether the owner should have renewed a row that was not renewed for `idle` seconds."""
        return self.lease is not None and RENEWED * self.lease < idle < math.inf

    def lag(self, now: float, *, held: bool) -> float | None:
        """Return an upper bound of the lag in seconds at `now`, a lower bound if `unheard`, or None if it is unknown.

        Args:
            now: The time in seconds since 1970.
            held: Whether a living owner reads the lease. If no living owner reads the lease, unread records may be as
                old as the shard's last response.
        """
        silence = max(0.0, now - self.at)
        is_current = held and silence <= told_within(self.lease or 0.0)
        if self.behind is None:
            # A living owner writes a lag itself after `SILENT_SECONDS` of silence. If no owner is alive, compute the
            # lag from the time since the last response.
            unread_for = now - max(self.read or 0.0, self.done or self.at)
            return None if is_current or self.excused or unread_for <= SILENT_SECONDS else unread_for
        # If the position had not moved for a while when the owner wrote this, it has most likely not moved since.
        is_stalled = self.done is not None and self.at - self.done > SILENT_SECONDS
        if is_current and not is_stalled:
            return self.behind
        # Records that came after the last response are at most as old as the time since then.
        return max(self.behind + silence, 0.0 if held or self.read is None else now - self.read)

    def unheard(self, now: float, *, held: bool) -> bool:
        """Return whether the real lag may exceed `lag`, because the stream is silent and no unfinished record is held.

        Args:
            now: The time in seconds since 1970.
            held: Whether a living owner reads the lease.
        """
        if self.oldest is not None or self.lag(now, held=held) is None:
            return False
        is_current = held and now - self.at <= told_within(self.lease or 0.0)
        return (self.at if is_current else now) - (self.read or 0.0) > SILENT_SECONDS


_TEXTS = ("owner", "host", "fault", "excused", "dead_letter")
_TIMES = ("at", "behind", "arrived", "done", "tried", "read", "work", "lease", "oldest", "aside")


def progress_of(lease: Lease) -> Progress | None:
    """Return the progress in the row's annotation, or None if there is no valid annotation."""
    try:
        document = json.loads(lease.annotation(NOTE) or "null")
        # In a rolling upgrade, a newer worker may write fields that this version does not know.
        attributes = (
            {name: document[name] for name in fields_dict(Progress).keys() & document.keys()}
            if isinstance(document, dict)
            else {}
        )
        times = [attributes[name] for name in _TIMES if name in attributes]
        moves, flags = attributes.get("moves", 0), [attributes.get(name, True) for name in ("end", "grows")]
        strings_are_valid = all(isinstance(attributes.get(name, ""), str) for name in _TEXTS)
        times_are_valid = all(map(_is_time, times)) and isinstance(moves, int) and _is_time(moves)
        # A flag that is false is left out, so one that is present must be true.
        return (
            Progress(**attributes)
            if attributes and strings_are_valid and times_are_valid and flags == [True, True]
            else None
        )
    # Any program may have written the attribute. An invalid value is ignored and must not break a listing.
    except (ValueError, TypeError, RecursionError):
        return None


def _is_time(value: object) -> bool:
    # In Python True is a number, too.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < LARGEST  # type: ignore[operator]  # a number, as just checked


class ProgressMeter:
    """Measures the progress of one held lease. Returns no annotations until `tell` is called.

    Args:
        lease: The lease as it was taken, whose annotation contains the previous progress.
        me: The owner.
        now: When the lease was taken, by the clock of all later times.
        lease_seconds: The setting of the fleet.

    Attributes:
        moved: Whether another worker had the lease before, according to the annotation.
        heard: When the stream last responded about this shard, or minus infinity before the first response.
        silent_since: Since when this shard has been waiting for a response, or None if none is due.
        failed_at: When the last read that failed began, or minus infinity if the stream has responded about this shard
            since.
        waited: How long the last response was waited for, in seconds.
        called: When the current call of the source began, or None while no call is running.
        left: Whether the lease is released without its reader, which waits for a call of the source.
    """

    def __init__(self, lease: Lease, me: str, now: float = 0.0, lease_seconds: float | None = None) -> None:
        previous = progress_of(lease)
        owner_changed = previous is not None and previous.owner != me
        self.moved = owner_changed
        # Start from the previous owner's values. Otherwise, after each change of owner, a batch that keeps failing
        # would look as if it were new.
        previous = previous or Progress(0.0, me)
        self._now = Progress(0.0, me, moves=previous.moves + owner_changed, done=previous.done, lease=lease_seconds)
        self._arrived: float | None = None
        self._fault, self._dead_letter, self._excused = previous.fault, previous.dead_letter, ""
        self._inherited = previous
        self._oldest: float | None = None
        self._aside: float | None = None
        self.called: float | None = None
        self.left = False
        self.silent_since: float | None = None
        self.heard = -math.inf
        self.failed_at, self.waited = -math.inf, 0.0
        self._wall: Callable[[], float] | None = None
        self._inherited_behind = previous.behind
        self._behind: float | None = None
        self._began, self._annotated_at = now, -math.inf
        # The time at which the lease was taken. If the previous owners have not read anything either, this is when the
        # first of them took it.
        self._taken_at = now
        self._tried: float | None = None
        self._read: float | None = None
        self._work: float | None = None
        self._done: float | None = None
        self._batch_unfinished = self._pending = False
        self._batch_arrived: float | None = None
        self._lags: deque[tuple[float, float]] = deque(maxlen=STEPS * 64)
        self._lock = Lock()

    def tell(self, host: str, wall: Callable[[], float], now: float) -> None:
        """Enable annotations. `wall` must return the time in seconds since 1970."""
        self._wall, self._annotated_at = wall, now + FIRST_SECONDS - TELL_SECONDS
        self._now = evolve(self._now, host=host)
        previous = self._inherited
        if self._inherited_behind is not None and previous.at:
            # Add the time since the annotation was written, so that the lag continues to grow from the value of the
            # previous owner.
            self._inherited_behind += max(0.0, wall() - previous.at - (now - self._began))
        if previous.oldest is not None:
            self._oldest = now - max(0.0, wall() - previous.oldest)
        if previous.done is not None:
            self._taken_at = now - max(0.0, wall() - previous.done)

    def awaited(self, now: float) -> None:
        """Note that the shard should be read from now on. It then counts as silent even if no request is made."""
        with self._lock:
            self.silent_since = now

    def asking(self, now: float) -> None:
        """Note that the source is being called. A call of `called_back`, `read` or `failed` must follow."""
        with self._lock:
            self.called = now
            self.silent_since = now if self.silent_since is None else self.silent_since

    def not_awaited(self) -> None:
        """Note that the shard need not be read for now, so it does not count as silent."""
        with self._lock:
            self.silent_since = None

    def called_back(self) -> None:
        """Note that the call has returned, but without any information about the records of the shard."""
        with self._lock:
            self.called = None

    def leave(self) -> bool:
        """Prevent the reader from dispatching the result of its current call. Return False if no call is running.

        No handler runs during the call, and none is called afterwards. The lease can therefore be released without
        waiting for its lease reader.
        """
        with self._lock:
            self.left = self.left or self.called is not None
            return self.left

    def since_1970(self, at: float, now: float) -> float | None:
        """Return the time `at` in seconds since 1970, or None until `tell` was called."""
        return None if self._wall is None else self._wall() - (now - at)

    def read_lately(self, now: float, seconds: float) -> bool:
        """Return whether the shard has responded to this owner or an earlier one within the last `seconds`."""
        previous = self._inherited
        if self.heard > -math.inf or self._wall is None or previous.read is None:
            return self.heard > -math.inf
        return self.moved and self._wall() - (now - self._began) - previous.read <= seconds

    def read(self, batch: Batch, now: float, waits: str = "") -> None:
        """Note a read before its batch is handled. Ignore a read without a response (rule 3).

        Args:
            batch: The batch, including earlier records that were not delivered yet.
            now: The time by the worker's clock.
            waits: The reason why the records must not be delivered yet, or "" if they may be.
        """
        if batch.answered:
            with self._lock:
                self.waited = 0.0 if self.silent_since is None else now - self.silent_since
                self.silent_since, self.heard, self.failed_at = None, now, -math.inf
        if batch.fault:
            self.failed(batch.fault, now)
            return
        if not batch.answered:
            with self._lock:
                # The source made no request, because an idle connection has no new records.
                self.called = self.silent_since = None
            return
        with self._lock:
            self.called = None
            # A response may contain no lag. Such a response must not look as if the reader were at the tip.
            self._behind = batch.behind_seconds if batch.behind_seconds is not None else self._behind
            self._tried = self._read = now
            self._batch_unfinished = bool(batch.count)
            if batch.count:
                self._oldest = self._arrival(batch.first_arrival_time, now, batch.behind_seconds or 0.0)
            elif batch.behind_seconds == 0 or batch.ended:
                self._oldest = None
            # An empty response is no progress while an earlier record is not handled.
            self._pending = self._batch_unfinished or self._oldest is None
            self._batch_arrived, self._excused = batch.last_arrival_time, waits
            if waits:
                self._done = now  # otherwise a shard whose records must wait would look stalled
            if batch.behind_seconds is not None:
                # If records must wait, their age counts as lag. It does not show that the consumer falls behind.
                self._keep_lag(batch.behind_seconds if waits else max(batch.behind_seconds, self._waiting(now)), now)

    def failed(self, why: str, now: float) -> None:
        """Note that a read or a batch failed, and why."""
        with self._lock:
            self._tried = self.failed_at = now
            self.called = None
            self._fault, self._excused = why[:FAULT_LENGTH], ""

    def dead_letter_failed(self, why: str, now: float) -> None:
        """Note that writing a dead letter has failed, and why. The handler could not handle the record either."""
        with self._lock:
            self._tried, self._dead_letter = now, why[:FAULT_LENGTH]

    def excused(self, why: str, now: float) -> None:
        """Note why nothing is read now although nothing is wrong."""
        with self._lock:
            # Treat the shard as done until now. Otherwise it would be shown as stalled, although there is a good reason
            # to wait.
            self._done, self.silent_since = now, None
            self._fault, self._dead_letter, self._excused = "", "", why

    def working(self, now: float) -> None:
        """Note that the handler was called with the batch."""
        with self._lock:
            self._work = now

    def put_aside(self, seconds: float, now: float) -> None:
        """Note that the lease is released and that its owner does not take it again for this many seconds."""
        with self._lock:
            self._aside = now + seconds

    @property
    def aside(self) -> bool:
        """Whether the lease is being put aside."""
        return self._aside is not None

    def progressed(self, now: float, first: float | None = None) -> None:
        """Note that a part of a batch is done, because the handler checkpointed or the batch is dispatched in parts.

        Args:
            now: The time by the worker's clock.
            first: When the first unfinished record arrived in the stream, in seconds since 1970, or None if unknown.
        """
        with self._lock:
            if first is not None:
                self._oldest = self._arrival(first, now, 0.0)
                self._keep_lag(max(self._behind or 0.0, self._waiting(now)), now)
            self._dead_letter = ""
            # A checkpoint restarts the handler's time only if a handler is running.
            self._done, self._work = now, self._work and now

    def rested(self) -> None:
        """Note that no handler is running any more."""
        with self._lock:
            self._work = None

    def done(self, now: float) -> None:
        """Note that no handler is running. Unless the last read failed, also note that the last batch is done."""
        with self._lock:
            self._work = None
            if self._pending:
                self._arrived = self._arrived if self._batch_arrived is None else self._batch_arrived
                self._done, self._fault, self._dead_letter, self._oldest = now, "", "", None
            self._batch_unfinished = self._pending = False

    def behind(self, now: float) -> float | None:
        """Return the lag behind the tip in seconds at this moment, or None if it was never known."""
        with self._lock:
            return self._behind_at(now)

    def _arrival(self, first: float | None, now: float, behind: float) -> float:
        """Return when a record arrived, by this worker's clock. The record is at least `behind` seconds old."""
        age = 0.0 if first is None or self._wall is None else self._wall() - first
        return now - max(0.0, behind, age)

    def _waiting(self, now: float) -> float:
        """Return how many seconds the oldest unfinished record has waited, or 0 if no more than `SILENT_SECONDS`.

        A single read may return all records up to the tip. The source then reports no lag although the records are not
        done.
        """
        waited = 0.0 if self._oldest is None else now - self._oldest
        return waited if waited > SILENT_SECONDS else 0.0

    def _keep_lag(self, behind: float, now: float) -> None:
        """Keep the least lag of each step."""
        if self._lags and self._lags[-1][0] // STEP_SECONDS == now // STEP_SECONDS:
            now, behind = self._lags[-1][0], min(behind, self._lags.pop()[1])
        self._lags.append((now, behind))

    def _behind_at(self, now: float) -> float | None:
        # Records that are not done grow older, even if others are read in the meantime.
        oldest_age = 0.0 if self._oldest is None else max(0.0, now - self._oldest)
        if self._behind is None or self._read is None:
            if self._inherited_behind is not None:
                # The lag is at least what the previous owner wrote, and grows until the first read.
                return max(oldest_age, self._inherited_behind + max(0.0, now - self._began))
            # No response has contained a lag. Records may have arrived right after the last response, so use the time
            # since then.
            silence = now - max(time for time in (self._taken_at, self._read, self._done) if time is not None)
            is_silent = silence > SILENT_SECONDS and not self._excused
            return max(oldest_age, silence if is_silent else 0.0) or None
        silence = now - self._read
        # A response that is merely late does not count as lag.
        return max(oldest_age, self._behind + (silence if self._batch_unfinished or silence > SILENT_SECONDS else 0.0))

    def annotation_due(self, now: float) -> bool:
        """Return whether a new annotation is due."""
        return self._wall is not None and now - self._annotated_at >= TELL_SECONDS

    def progress(self, now: float, wall: float) -> Progress:
        """Return the progress at `now`. `wall` is the same time in seconds since 1970."""

        def since_1970(time: float | None) -> float | None:
            return None if time is None else round(max(0.0, wall - (now - time)), 3)

        with self._lock:
            behind = self._behind_at(now)
            return evolve(
                self._now,
                at=round(wall, 3),
                behind=None if behind is None else round(behind, 3),
                end=behind == 0.0,
                arrived=self._arrived,
                done=(self._now.done or since_1970(self._began)) if self._done is None else since_1970(self._done),
                tried=since_1970(self._tried),
                fault=DRIPS if self.called is not None and now - self.called > SILENT_SECONDS else self._fault,
                read=since_1970(self._read),
                work=since_1970(self._work),
                grows=growing(self._lags),
                excused=self._excused,
                oldest=since_1970(self._oldest),
                aside=since_1970(self._aside),
                dead_letter=self._dead_letter,
            )

    def annotations(self, now: float) -> Annotations:
        """Return the annotation to write now, or an empty tuple until `tell` was called."""
        if self._wall is None:
            return ()
        self._annotated_at = now
        return ((NOTE, self.progress(now, self._wall()).note),)
