"""Measures the progress and the throughput of a held lease, which its owner writes on the lease's row.

`Throughput` measures in the same way as the KCL 3.x, so that Java and Python workers can compare leases.

`Progress` describes how far a lease is behind the tip of its shard. The owner writes this description next to the
throughput, so that a listing of the table shows the progress of all workers.

1. Progress is stored in an annotation of ours, which other libraries preserve but do not read. If annotations are free,
   the annotation is written together with renewals. An extra write is needed only if a lease has been renewed by
   checkpoints alone for `ANNOTATE_SECONDS`.
2. The times in the annotation come from the owner's wall clock. If the clock of a worker that reads the annotation
   differs, the times are off by the difference.
3. A failed read counts as an attempt, not as a read. An empty response alone does not make the lag 0.
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
    """Computes the bytes read per second, as an exponential average with a weight of 0.5 per interval.

    Args:
        interval: The number of seconds between two updates of the average. KCL 3.x updates its average at each renewal.
        average: The initial value in bytes per second, as the last owner measured it; None if it is unknown.
    """

    def __init__(self, interval: float, average: int | None = None) -> None:
        self._interval = interval
        self._average: float | None = average
        self._bytes, self._began = 0, 0.0
        self._measuring = False
        # The lock is needed because one task reads records and counts bytes while another renews the lease and computes
        # the average.
        self._lock = Lock()

    def add(self, size: int, now: float) -> None:
        """Add `size` to the number of bytes read. It may be 0. The first call begins the first interval."""
        with self._lock:
            if not self._measuring:
                # Begin the first interval only now. If it began when the lease was claimed, the wait until the shard is
                # opened would lower the rate.
                self._measuring, self._began = True, now
            self._bytes += size

    def rest(self, now: float) -> None:
        """Restart the interval, because this worker delayed its reads. Its bytes do not show the shard's throughput."""
        with self._lock:
            self._bytes, self._began = 0, now

    def average(self, now: float) -> int | None:
        """Return the bytes per second as of the last update, or None if no owner has measured the shard yet."""
        with self._lock:
            elapsed_seconds = now - self._began
            if self._measuring and elapsed_seconds >= self._interval:
                rate = self._bytes / elapsed_seconds
                # The weight depends on the elapsed time, because updates may come late or in quick succession. With a
                # fixed weight, every update would halve the previous average, however long the interval was.
                weight = 0.0 if self._average is None else 0.5 ** (elapsed_seconds / self._interval)
                self._average = weight * (self._average or 0.0) + (1 - weight) * rate
                self._bytes, self._began = 0, now
            # Limit the average to WEIGHT_MAX. Otherwise, a renewal with a larger rate would fail.
            return None if self._average is None else min(round(self._average), WEIGHT_MAX)


PROGRESS_ANNOTATION = "reach"
"""The name of the row attribute that contains a `Progress` as JSON."""

ANNOTATE_SECONDS = 20.0
"""The longest time for which a lease may be renewed by checkpoints alone.

After this time, a renewal is needed, because only renewals write the annotation.
"""

FIRST_ANNOTATION_SECONDS = 3.0
"""How soon a new owner writes its annotation. It is short, so that the lag of a lease that has just moved is known
early."""

SILENT_SECONDS = 30.0
"""If there was no read for this long, the time since the last read counts as lag, because there may be new records."""

RENEWED_FRACTION = 0.6
"""The fraction of `lease_seconds` within which a living owner renews its lease or writes a checkpoint."""

RETRIED_RENEWAL_FRACTION = 0.8
"""The fraction of `lease_seconds` within which a renewal succeeds if the first attempt has failed."""

LAG_STEP_SECONDS, LAG_STEPS = ANNOTATE_SECONDS, 6
"""The window for detecting a consumer that falls behind.

The window consists of `LAG_STEPS` steps, and the consumer's lag must grow from each step to the next.
"""

STUCK_READ_FAULT = f"an answer of the stream has been on its way for more than {SILENT_SECONDS:g} s"
"""The fault that is shown for a read that neither ends nor fails, for example because the response arrives byte by
byte."""

FAULT_LENGTH = 200
"""The maximum length of a fault on a row, in characters."""

NUMBER_MAX = 1e12
"""An upper limit for times and counts in annotations, far above every real value."""


def max_annotation_age(lease_seconds: float) -> float:
    """Return the number of seconds within which a living owner writes its next annotation."""
    return ANNOTATE_SECONDS + RENEWED_FRACTION * lease_seconds


def tolerated_unread_seconds(lease_seconds: float) -> float:
    """Return for how many seconds a lease of a healthy group may have no owner, or appear unread according to its row.

    An owner notices within `SILENT_SECONDS` that it has read nothing. It then writes this fact on the row within
    `ANNOTATE_SECONDS`, or within the time between two renewals if that time is longer. The time between two renewals is
    slightly more than half of `lease_seconds`.
    """
    return SILENT_SECONDS + max(ANNOTATE_SECONDS, RENEWED_FRACTION * lease_seconds)


def is_lag_growing(lags: Sequence[tuple[float, float]]) -> bool:
    """Return whether the lag has grown in every step of the window. This is the rule of Burrow. It needs no threshold.

    Only the smallest lag in each step of `LAG_STEP_SECONDS` counts. Therefore, a single slow response does not count as
    growth, and a single read at the tip ends the growth.

    Args:
        lags: Pairs of a time and the lag at that time, both in seconds, in order of time.
    """
    least_lag_by_step: dict[int, float] = {}
    for time, lag in lags:
        step = int(time // LAG_STEP_SECONDS)
        least_lag_by_step[step] = min(lag, least_lag_by_step.get(step, math.inf))
    step_lags = [lag for _, lag in sorted(least_lag_by_step.items())][-LAG_STEPS:]
    # Ignore a window that begins at the tip, where the lag is 0. Any lag is an increase from 0, but a reader that is
    # only one batch behind is not falling behind.
    return (
        len(step_lags) == LAG_STEPS
        and step_lags[0] > 0
        and all(earlier_lag < next_lag for earlier_lag, next_lag in pairwise(step_lags))
    )


@frozen
class Progress:
    """The owner's record of how far its lease is behind the tip of the shard. All times are in seconds since 1970.

    Attributes:
        at: The time at which this progress was written.
        owner: The worker that wrote this progress.
        host: The name of the machine on which the worker runs.
        moves: The number of times that the lease has moved from one worker to another, as far as our workers observed.
        behind: The number of seconds by which the last read was behind the tip of the shard. It grows while the batch
            of that read is not done.
        end: Whether the last read reached the tip and its batch is done.
        arrived: The time at which the last record that is done arrived in the stream.
        read: The time of the shard's last response.
        done: The last time at which all records that had been read were done, or at which the position moved, whichever
            is later. Until then, it is the previous owner's value, or the time at which the lease was taken.
        tried: The last time at which a read succeeded or failed, or a batch failed.
        fault: The reason why a read or a batch failed. It becomes "" once a batch was handled.
        work: The time at which the running call of the handler began or last checkpointed; None if no handler is
            running.
        grows: Whether the lag has grown in every step of the window.
        lease: The owner's `lease_seconds`, from which readers derive what counts as late.
        excused: The reason why the lease is not being read, if that reason is not a fault.
        oldest: The time at which the oldest record that was read but is not done arrived in the stream.
        aside: The time until which the owner leaves the lease to other workers, because it could not handle the
            records.
        dead_letter: The reason why a record could not be dead-lettered. It becomes "" once a record was handled or
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

        If a dead letter could not be written, the reason includes that error.
        """
        return "; ".join(filter(None, (self.fault, self.dead_letter)))

    @property
    def note(self) -> str:
        """The value of the annotation as JSON, without fields that are not set."""
        values = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps({name: value for name, value in values.items() if value != ""})

    def is_put_aside(self, now: float, seconds: float) -> bool:
        """Return whether the lease is left to other workers now, or was left to them until at most `seconds` ago."""
        return self.aside is not None and now <= self.aside + seconds

    def renewal_overdue(self, idle: float) -> bool:
        """Return whether the owner should have renewed a row that was not renewed for `idle` seconds."""
        return self.lease is not None and RENEWED_FRACTION * self.lease < idle < math.inf

    def lag(self, now: float, *, is_held: bool) -> float | None:
        """Return an upper bound of the lag in seconds at `now`, or None if it is unknown.

        If `lag_may_be_larger` returns true, the result is a lower bound instead.

        Args:
            now: The time in seconds since 1970.
            is_held: Whether a living owner reads the lease. If not, unread records may be as old as the shard's last
                response.
        """
        silent_seconds = max(0.0, now - self.at)
        is_current = is_held and silent_seconds <= max_annotation_age(self.lease or 0.0)
        if self.behind is None:
            # After `SILENT_SECONDS` of silence, a living owner writes a lag itself. If no owner is alive, compute the
            # lag from the time since the last response.
            unread_for = now - max(self.read or 0.0, self.done or self.at)
            return None if is_current or self.excused or unread_for <= SILENT_SECONDS else unread_for
        # If the position had not moved for a while when the owner wrote this progress, it has most likely not moved
        # since then.
        is_stalled = self.done is not None and self.at - self.done > SILENT_SECONDS
        if is_current and not is_stalled:
            return self.behind
        # Records that arrived after the last response are not older than that response.
        return max(self.behind + silent_seconds, 0.0 if is_held or self.read is None else now - self.read)

    def lag_may_be_larger(self, now: float, *, is_held: bool) -> bool:
        """Return whether the real lag may exceed the value of `lag`.

        The real lag may be larger if the stream is silent and no unfinished record is known.

        Args:
            now: The time in seconds since 1970.
            is_held: Whether a living owner reads the lease.
        """
        if self.oldest is not None or self.lag(now, is_held=is_held) is None:
            return False
        is_current = is_held and now - self.at <= max_annotation_age(self.lease or 0.0)
        return (self.at if is_current else now) - (self.read or 0.0) > SILENT_SECONDS


_STRING_FIELDS = ("owner", "host", "fault", "excused", "dead_letter")
_NUMBER_FIELDS = ("at", "behind", "arrived", "done", "tried", "read", "work", "lease", "oldest", "aside")


def progress_of(lease: Lease) -> Progress | None:
    """Return the progress in the row's annotation, or None if there is no valid annotation."""
    try:
        document = json.loads(lease.annotation(PROGRESS_ANNOTATION) or "null")
        # Ignore unknown fields, because during a rolling upgrade a newer worker may write fields that this version does
        # not know.
        values = (
            {name: document[name] for name in fields_dict(Progress).keys() & document.keys()}
            if isinstance(document, dict)
            else {}
        )
        time_values = [values[name] for name in _NUMBER_FIELDS if name in values]
        move_count, flag_values = values.get("moves", 0), [values.get(name, True) for name in ("end", "grows")]
        strings_are_valid = all(isinstance(values.get(name, ""), str) for name in _STRING_FIELDS)
        times_are_valid = all(map(_is_time, time_values)) and isinstance(move_count, int) and _is_time(move_count)
        # Flags that are false are omitted, so a flag that is present must be true.
        return (
            Progress(**values)
            if values and strings_are_valid and times_are_valid and flag_values == [True, True]
            else None
        )
    # Any program may have written the attribute, so an invalid value is ignored. It must not break a listing.
    except (ValueError, TypeError, RecursionError):
        return None


def _is_time(value: object) -> bool:
    # In Python, True and False are numbers, too.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value < NUMBER_MAX  # type: ignore[operator]  # a number, as just checked


class ProgressMeter:
    """Measures the progress of one held lease. It returns no annotations until `enable_annotations` is called.

    Args:
        lease: The lease as it was taken, whose annotation contains the previous progress.
        me: The id of the owner.
        now: The time at which the lease was taken, by the same clock as the times that are passed to the methods.
        lease_seconds: The `lease_seconds` of the group, or None if it is unknown.

    Attributes:
        owner_changed_before: Whether another worker had the lease before, according to the annotation.
        last_response_at: The time of the last response about this shard, or minus infinity before the first response.
        silent_since: The time since which a response about this shard has been expected; None if none is expected.
        failed_at: The time at which the last failed read began, or minus infinity if the stream has responded about
            this shard since then.
        response_seconds: The number of seconds that the last response took.
        call_began_at: The time at which the running call of the source began; None if no call is running.
        call_abandoned: Whether the lease is released without waiting for its reader. The reader is blocked in a call of
            the source.
    """

    def __init__(self, lease: Lease, me: str, now: float = 0.0, lease_seconds: float | None = None) -> None:
        previous_progress = progress_of(lease)
        owner_changed = previous_progress is not None and previous_progress.owner != me
        self.owner_changed_before = owner_changed
        # Start from the previous owner's values. Otherwise, a batch that keeps failing would look new after each change
        # of owner.
        previous_progress = previous_progress or Progress(0.0, me)
        self._initial_progress = Progress(
            0.0, me, moves=previous_progress.moves + owner_changed, done=previous_progress.done, lease=lease_seconds
        )
        self._arrived: float | None = None
        self._fault, self._dead_letter, self._excused = previous_progress.fault, previous_progress.dead_letter, ""
        self._previous_progress = previous_progress
        self._oldest_unfinished_at: float | None = None
        self._aside: float | None = None
        self.call_began_at: float | None = None
        self.call_abandoned = False
        self.silent_since: float | None = None
        self.last_response_at = -math.inf
        self.failed_at, self.response_seconds = -math.inf, 0.0
        self._wall_clock: Callable[[], float] | None = None
        self._inherited_lag = previous_progress.behind
        self._behind: float | None = None
        self._began, self._annotated_at = now, -math.inf
        # The time at which the lease was taken. If the previous owners have not read anything either, it is the time at
        # which the first of them took the lease.
        self._taken_at = now
        self._tried: float | None = None
        self._read: float | None = None
        self._handler_since: float | None = None
        self._done: float | None = None
        self._batch_unfinished = self._done_is_progress = False
        self._batch_arrived: float | None = None
        self._lags: deque[tuple[float, float]] = deque(maxlen=LAG_STEPS * 64)
        self._lock = Lock()

    def enable_annotations(self, host: str, wall: Callable[[], float], now: float) -> None:
        """Enable annotations. `wall` must return the time in seconds since 1970."""
        self._wall_clock, self._annotated_at = wall, now + FIRST_ANNOTATION_SECONDS - ANNOTATE_SECONDS
        self._initial_progress = evolve(self._initial_progress, host=host)
        previous_progress = self._previous_progress
        if self._inherited_lag is not None and previous_progress.at:
            # Add the time since the annotation was written, so that the lag continues to grow from the previous owner's
            # value.
            self._inherited_lag += max(0.0, wall() - previous_progress.at - (now - self._began))
        if previous_progress.oldest is not None:
            self._oldest_unfinished_at = now - max(0.0, wall() - previous_progress.oldest)
        if previous_progress.done is not None:
            self._taken_at = now - max(0.0, wall() - previous_progress.done)

    def expect_response(self, now: float) -> None:
        """Note that the shard should be read from now on.

        The shard counts as silent until it responds, even if no request is made.
        """
        with self._lock:
            self.silent_since = now

    def call_began(self, now: float) -> None:
        """Note that the source is being called. Afterwards, `call_returned`, `read` or `failed` must be called."""
        with self._lock:
            self.call_began_at = now
            self.silent_since = now if self.silent_since is None else self.silent_since

    def expect_no_response(self) -> None:
        """Note that the shard need not be read for now, so it does not count as silent."""
        with self._lock:
            self.silent_since = None

    def call_returned(self) -> None:
        """Note that the call of the source has returned without any information about the records of the shard."""
        with self._lock:
            self.call_began_at = None

    def abandon_call(self) -> bool:
        """Prevent the reader from dispatching the result of its current call. Return False if no call is running.

        No handler runs during the call, and none is called afterwards. Therefore, the lease can be released without
        waiting for its reader.
        """
        with self._lock:
            self.call_abandoned = self.call_abandoned or self.call_began_at is not None
            return self.call_abandoned

    def since_1970(self, time: float, now: float) -> float | None:
        """Convert `time` to seconds since 1970. Return None until `enable_annotations` was called."""
        return None if self._wall_clock is None else self._wall_clock() - (now - time)

    def has_responded_within(self, now: float, seconds: float) -> bool:
        """Return whether the shard has responded to this owner, or within the last `seconds` to an earlier owner."""
        previous_progress = self._previous_progress
        if self.last_response_at > -math.inf or self._wall_clock is None or previous_progress.read is None:
            return self.last_response_at > -math.inf
        return (
            self.owner_changed_before and self._wall_clock() - (now - self._began) - previous_progress.read <= seconds
        )

    def read(self, batch: Batch, now: float, wait_reason: str = "") -> None:
        """Note a read whose batch is not handled yet. A read without a response does not count as a read (rule 3).

        Args:
            batch: The batch, including earlier records that were not delivered yet.
            now: The time by the worker's clock.
            wait_reason: The reason why the records must not be delivered yet, or "" if they may be delivered.
        """
        if batch.answered:
            with self._lock:
                self.response_seconds = 0.0 if self.silent_since is None else now - self.silent_since
                self.silent_since, self.last_response_at, self.failed_at = None, now, -math.inf
        if batch.fault:
            self.failed(batch.fault, now)
            return
        if not batch.answered:
            with self._lock:
                # The source has made no request, because it keeps a connection open that has no new records.
                self.call_began_at = self.silent_since = None
            return
        with self._lock:
            self.call_began_at = None
            # If the response does not contain the lag, keep the last known lag. Otherwise, the reader would seem to be
            # at the tip.
            self._behind = batch.behind_seconds if batch.behind_seconds is not None else self._behind
            self._tried = self._read = now
            self._batch_unfinished = bool(batch.count)
            if batch.count:
                self._oldest_unfinished_at = self._local_arrival_time(
                    batch.first_arrival_time, now, batch.behind_seconds or 0.0
                )
            elif batch.behind_seconds == 0 or batch.ended:
                self._oldest_unfinished_at = None
            # While an earlier record is not handled yet, an empty response is no progress.
            self._done_is_progress = self._batch_unfinished or self._oldest_unfinished_at is None
            self._batch_arrived, self._excused = batch.last_arrival_time, wait_reason
            if wait_reason:
                self._done = now  # otherwise, a shard whose records must wait would look stalled
            if batch.behind_seconds is not None:
                # If records must wait, their age counts as lag, but it does not show that the consumer falls behind.
                self._record_lag(
                    batch.behind_seconds if wait_reason else max(batch.behind_seconds, self._unfinished_wait(now)), now
                )

    def failed(self, reason: str, now: float) -> None:
        """Note that a read or a batch failed, and the reason."""
        with self._lock:
            self._tried = self.failed_at = now
            self.call_began_at = None
            self._fault, self._excused = reason[:FAULT_LENGTH], ""

    def dead_letter_failed(self, reason: str, now: float) -> None:
        """Note that a record that the handler could not handle could not be dead-lettered either, and the reason."""
        with self._lock:
            self._tried, self._dead_letter = now, reason[:FAULT_LENGTH]

    def excused(self, reason: str, now: float) -> None:
        """Note that nothing is being read now, for a reason that is not a fault."""
        with self._lock:
            # Treat the shard as done up to now. Otherwise, it would be shown as stalled, although there is a good
            # reason to wait.
            self._done, self.silent_since = now, None
            self._fault, self._dead_letter, self._excused = "", "", reason

    def handler_began(self, now: float) -> None:
        """Note that the handler was called with the batch."""
        with self._lock:
            self._handler_since = now

    def put_aside(self, seconds: float, now: float) -> None:
        """Note that the lease is being released, and that this owner will not take it again for the next `seconds`."""
        with self._lock:
            self._aside = now + seconds

    @property
    def aside(self) -> bool:
        """Whether the lease is being released and left to other workers for a while."""
        return self._aside is not None

    def part_done(self, now: float, first_arrival: float | None = None) -> None:
        """Note that a part of a batch is done, after the handler has checkpointed or one of several parts has ended.

        Args:
            now: The time by the worker's clock.
            first_arrival: The time at which the first unfinished record arrived in the stream, in seconds since 1970;
                None if it is unknown.
        """
        with self._lock:
            if first_arrival is not None:
                self._oldest_unfinished_at = self._local_arrival_time(first_arrival, now, 0.0)
                self._record_lag(max(self._behind or 0.0, self._unfinished_wait(now)), now)
            self._dead_letter = ""
            # If a handler is running, its time limit starts again at the checkpoint.
            self._done, self._handler_since = now, self._handler_since and now

    def handler_ended(self) -> None:
        """Note that no handler is running any more."""
        with self._lock:
            self._handler_since = None

    def done(self, now: float) -> None:
        """Note that no handler is running. Unless the last read failed, also note that the last batch is done."""
        with self._lock:
            self._handler_since = None
            if self._done_is_progress:
                self._arrived = self._arrived if self._batch_arrived is None else self._batch_arrived
                self._done, self._fault, self._dead_letter, self._oldest_unfinished_at = now, "", "", None
            self._batch_unfinished = self._done_is_progress = False

    def behind(self, now: float) -> float | None:
        """Return by how many seconds the lease is behind the tip at `now`, or None if this was never known."""
        with self._lock:
            return self._behind_at(now)

    def _local_arrival_time(self, first_arrival: float | None, now: float, minimum_age: float) -> float:
        """Return the time at which a record arrived, by this worker's clock.

        The record is at least `minimum_age` seconds old.
        """
        age = 0.0 if first_arrival is None or self._wall_clock is None else self._wall_clock() - first_arrival
        return now - max(0.0, minimum_age, age)

    def _unfinished_wait(self, now: float) -> float:
        """Return how many seconds the oldest unfinished record has waited, or 0 if no more than `SILENT_SECONDS`.

        The wait counts as lag, because a single read may return all records up to the tip. The source then reports no
        lag although the records are not done.
        """
        unfinished_seconds = 0.0 if self._oldest_unfinished_at is None else now - self._oldest_unfinished_at
        return unfinished_seconds if unfinished_seconds > SILENT_SECONDS else 0.0

    def _record_lag(self, lag: float, now: float) -> None:
        """Record the lag, keeping only the smallest one of each step."""
        if self._lags and self._lags[-1][0] // LAG_STEP_SECONDS == now // LAG_STEP_SECONDS:
            now, lag = self._lags[-1][0], min(lag, self._lags.pop()[1])
        self._lags.append((now, lag))

    def _behind_at(self, now: float) -> float | None:
        # Records that are not done grow older, even if others are read in the meantime.
        oldest_age = 0.0 if self._oldest_unfinished_at is None else max(0.0, now - self._oldest_unfinished_at)
        if self._behind is None or self._read is None:
            if self._inherited_lag is not None:
                # The lag is at least the value that the previous owner wrote, and it grows until the first read.
                return max(oldest_age, self._inherited_lag + max(0.0, now - self._began))
            # No response has contained a lag yet. Records may have arrived right after the last response, so use the
            # time since that response.
            silent_seconds = now - max(time for time in (self._taken_at, self._read, self._done) if time is not None)
            is_silent = silent_seconds > SILENT_SECONDS and not self._excused
            return max(oldest_age, silent_seconds if is_silent else 0.0) or None
        silent_seconds = now - self._read
        # The time since the last read counts as lag only after `SILENT_SECONDS`, because a response may merely be late.
        return max(
            oldest_age,
            self._behind + (silent_seconds if self._batch_unfinished or silent_seconds > SILENT_SECONDS else 0.0),
        )

    def annotation_due(self, now: float) -> bool:
        """Return whether a new annotation is due."""
        return self._wall_clock is not None and now - self._annotated_at >= ANNOTATE_SECONDS

    def progress(self, now: float, wall: float) -> Progress:
        """Return the progress at `now`. `wall` is the same moment in seconds since 1970."""

        def since_1970(time: float | None) -> float | None:
            return None if time is None else round(max(0.0, wall - (now - time)), 3)

        with self._lock:
            behind_seconds = self._behind_at(now)
            return evolve(
                self._initial_progress,
                at=round(wall, 3),
                behind=None if behind_seconds is None else round(behind_seconds, 3),
                end=behind_seconds == 0.0,
                arrived=self._arrived,
                done=(self._initial_progress.done or since_1970(self._began))
                if self._done is None
                else since_1970(self._done),
                tried=since_1970(self._tried),
                fault=STUCK_READ_FAULT
                if self.call_began_at is not None and now - self.call_began_at > SILENT_SECONDS
                else self._fault,
                read=since_1970(self._read),
                work=since_1970(self._handler_since),
                grows=is_lag_growing(self._lags),
                excused=self._excused,
                oldest=since_1970(self._oldest_unfinished_at),
                aside=since_1970(self._aside),
                dead_letter=self._dead_letter,
            )

    def annotations(self, now: float) -> Annotations:
        """Return the annotation to write now, or an empty tuple until `enable_annotations` was called."""
        if self._wall_clock is None:
            return ()
        self._annotated_at = now
        return ((PROGRESS_ANNOTATION, self.progress(now, self._wall_clock()).note),)
