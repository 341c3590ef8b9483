"""How far the reading of a held lease has come, and how many bytes a second it brings: what its owner says on its row.

`Throughput`: that of one lease, measured as KCL 3.x does, so that Java and Python workers can compare leases.

`Progress`: how far behind a lease's reading is. Its owner writes it next to the throughput, so that one listing shows
the whole fleet.

Rule 1: it is a note of ours, which every other library keeps and none reads; it travels with renewals where notes are
free, and costs a write of its own only where checkpoints alone renewed a lease for `TELL_SECONDS`. Rule 2: times in it
are of the owner's wall clock; a reader can only trust them as far as the clocks of the two agree.
Rule 3: to have tried, to have read, and to have failed are three things: a reading that failed is no reading, and lag
is never 0 because nothing came of it.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from threading import Lock

from attrs import asdict, evolve, fields_dict, frozen

from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import WEIGHT_MAX, Lease, Notes


class Throughput:
    """Bytes a second, as an exponential average with weight 0.5 per interval.

    interval  seconds between two updates of the average; KCL 3.x updates it each time it renews
    average   bytes a second to begin with: the last owner's, or None
    """

    def __init__(self, interval: float, average: int | None = None) -> None:
        self._interval = interval
        self._average: float | None = average
        self._bytes, self._began = 0, 0.0
        self._measuring = False
        # One task reads and counts while another renews and asks for the average.
        self._lock = Lock()

    def add(self, size: int, now: float) -> None:
        """Count so many bytes read, perhaps none; the first call begins the first interval."""
        with self._lock:
            if not self._measuring:
                # Not from the claim on: the wait until the shard was opened would lower the rate.
                self._measuring, self._began = True, now
            self._bytes += size

    def rest(self, now: float) -> None:
        """Start the interval anew: reading was held up here, so the bytes read do not measure the shard."""
        with self._lock:
            self._bytes, self._began = 0, now

    def average(self, now: float) -> int | None:
        """Whole bytes a second as of the last update; None before the first if no earlier owner measured."""
        with self._lock:
            elapsed = now - self._began
            if self._measuring and elapsed >= self._interval:
                rate = self._bytes / elapsed
                # Weighed by the time that passed: updates come late or in pairs, and each alone would halve what was
                # known.
                keep = 0.0 if self._average is None else 0.5 ** (elapsed / self._interval)
                self._average = keep * (self._average or 0.0) + (1 - keep) * rate
                self._bytes, self._began = 0, now
            # A lease takes no larger weight, and no renewal may fail for its sake.
            return None if self._average is None else min(round(self._average), WEIGHT_MAX)


NOTE = "reach"
"""Our attribute with a `Progress` as JSON."""

TELL_SECONDS = 20.0
"""A lease that checkpoints alone renew is renewed for the note's sake after so many seconds."""

FIRST_SECONDS = 3.0
"""A new owner writes its note so soon, or a look would miss the lag of a lease that has just moved."""

SILENT_SECONDS = 30.0
"""A reader that read nothing for longer is behind by that time too: what arrived since, nobody knows."""

RENEWED = 0.6
"""Of `lease_seconds`: a living owner renews in less, or by a checkpoint."""

STEP_SECONDS, STEPS = TELL_SECONDS, 6
"""The window over which lag must grow, step by step, for a reading to be falling behind."""

DRIPS = f"an answer of the stream has been on its way for more than {SILENT_SECONDS:g} s"
"""The fault of a reading that neither ends nor fails, as where an answer comes byte by byte."""

FAULT_LENGTH = 200
"""Characters of a fault that a row keeps."""

LARGEST = 1e12
"""No time and no count of a real row comes near."""


def told_within(lease_seconds: float) -> float:
    """Return the seconds within which a living owner writes its next note."""
    return TELL_SECONDS + RENEWED * lease_seconds


def patience(lease_seconds: float) -> float:
    """How long a lease may go unowned, or unread as far as rows tell, in a group that is well.

    A reader says within `SILENT_SECONDS` whether anything came; its owner tells of it within `TELL_SECONDS` and the
    time between two renewals, which is little more than half of `lease_seconds` at most.
    """
    return SILENT_SECONDS + max(TELL_SECONDS, RENEWED * lease_seconds)


def growing(lags: Sequence[tuple[float, float]]) -> bool:
    """Whether lag only grew: Burrow's rule, without a number to set.

    lags  (seconds of a clock, lag) in order; of each step of `STEP_SECONDS` the least counts, so that one slow answer
          is no growth, and one reading at the tip is the end of it
    """
    least: dict[int, float] = {}
    for at, lag in lags:
        step = int(at // STEP_SECONDS)
        least[step] = min(lag, least.get(step, math.inf))
    last = [lag for _, lag in sorted(least.items())][-STEPS:]
    # From the tip everything grows: a first batch that is behind it is no falling behind.
    return len(last) == STEPS and last[0] > 0 and all(one < other for one, other in pairwise(last))


@frozen
class Progress:
    """How far the reading of a lease has come, as its owner told.

    at       when this was written, seconds since 1970
    owner    the worker that wrote it
    host     the machine it runs on
    moves    how often the lease passed from one worker to another, as far as our workers saw
    behind   seconds behind the tip of the shard: of the last reading, and longer while its batch is not done
    end      whether the last reading reached the tip, and its batch is done
    arrived  when the last record that was done had arrived in the stream, seconds since 1970
    read     when the shard last answered, seconds since 1970
    done     when all that had been read was last handled, or the position last moved, seconds since 1970; before that,
             when the lease came to its owner, or what the owner before it told
    tried    when the shard was last asked for records, seconds since 1970
    fault    why it gave no answer then, or why a batch could not be handled; "" once one was
    work     since when the handler has been at work without an end or a checkpoint, seconds since 1970
    grows    whether lag has only grown over the window
    lease    the owner's `lease_seconds`; by which readers of the note know how long is long
    excused  why it is not read, where that is no fault
    oldest   when the first record that was read and is not done arrived in the stream, seconds since 1970
    aside    until when its owner leaves it to other workers, since it could not handle it, seconds since 1970
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

    @property
    def note(self) -> str:
        """The text of the note; what is unknown is left out."""
        known = {name: value for name, value in asdict(self).items() if value is not None and value is not False}
        return json.dumps({name: value for name, value in known.items() if value != ""})

    def resting(self, now: float, long: float) -> bool:
        """Return whether the lease was put aside, and for no longer than until then and `long` seconds."""
        return self.aside is not None and now <= self.aside + long

    def overdue(self, idle: float) -> bool:
        """Return whether a row that was seen to stand still for so long should have been renewed by its owner."""
        return self.lease is not None and RENEWED * self.lease < idle < math.inf

    def lag(self, now: float, *, held: bool) -> float | None:
        """Seconds behind at `now`, at most: what nobody reads since may be as old as the silence.

        held  whether a living owner reads it
        """
        if self.behind is None:
            return None
        silence = max(0.0, now - self.at)
        # A position that stood still when the note was written has most likely stood still since.
        stood = self.done is not None and self.at - self.done > SILENT_SECONDS
        moves = held and not stood and silence <= told_within(self.lease or 0.0)
        if moves:
            return self.behind
        # What came after the last answer is as old as the time since then, at most.
        return max(self.behind + silence, 0.0 if held or self.read is None else now - self.read)

    def unheard(self, now: float, *, held: bool) -> bool:
        """Return whether `lag` is no more than a lower bound: the stream has not answered, and no record is in hand.

        held  whether a living owner reads it
        """
        if self.behind is None or self.oldest is not None:
            return False
        current = held and now - self.at <= told_within(self.lease or 0.0)
        return (self.at if current else now) - (self.read or 0.0) > SILENT_SECONDS


_TIMES = ("at", "behind", "arrived", "done", "tried", "read", "work", "lease", "oldest", "aside")


def progress_of(lease: Lease) -> Progress | None:
    """The reach in the row's note; None without a note that can be read."""
    try:
        said = json.loads(lease.note(NOTE) or "null")
        # In a rolling upgrade a newer worker may tell more than this one knows.
        known = (
            {name: said[name] for name in fields_dict(Progress).keys() & said.keys()} if isinstance(said, dict) else {}
        )
        times = [known[name] for name in _TIMES if name in known]
        moves, flags = known.get("moves", 0), [known.get(name, True) for name in ("end", "grows")]
        texts = all(isinstance(known.get(name, ""), str) for name in ("owner", "host", "fault", "excused"))
        numbers = all(map(_time, times)) and isinstance(moves, int) and _time(moves)
        # A note leaves out a flag that is false, so one that stands there is true.
        return Progress(**known) if known and texts and numbers and flags == [True, True] else None
    # Anybody may have written the attribute: what cannot be read tells nothing, and disturbs no listing.
    except (ValueError, TypeError, RecursionError):
        return None


def _time(value: object) -> bool:
    # To Python True is a number, too, and would pass for a second after 1970.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 <= value < LARGEST  # type: ignore[operator]  # it is a number by now


class ProgressMeter:
    """Measures how far the reading of one held lease has come; silent until `tell` is called.

    lease          as it was when it became ours: its note tells how often it has moved before
    me             its owner
    now            when it became ours, by the clock in which all later times are told
    lease_seconds  of the fleet

    `moved` says whether another worker had the lease before, as far as the note tells.
    """

    def __init__(self, lease: Lease, me: str, now: float = 0.0, lease_seconds: float | None = None) -> None:
        before = progress_of(lease)
        moved = before is not None and before.owner != me
        self.moved = moved
        # A batch that no owner can handle would look young with each of them: what stands still is told on.
        before = before or Progress(0.0, me)
        self._now = Progress(0.0, me, moves=before.moves + moved, done=before.done, lease=lease_seconds)
        self._arrived: float | None = None
        self._fault, self._excused = before.fault, ""
        self._carried = before
        self._oldest: float | None = None
        self._aside: float | None = None
        self._asking: float | None = None
        self._wall: Callable[[], float] | None = None
        self._before = before.behind
        self._behind: float | None = None
        self._began, self._told = now, -math.inf
        self._tried: float | None = None
        self._read: float | None = None
        self._work: float | None = None
        self._done: float | None = None
        self._unfinished = self._pending = False
        self._arriving: float | None = None
        self._lags: deque[tuple[float, float]] = deque(maxlen=STEPS * 64)
        self._lock = Lock()

    def tell(self, host: str, wall: Callable[[], float], now: float) -> None:
        """Write notes from now on; `wall` returns seconds since 1970."""
        self._wall, self._told = wall, now + FIRST_SECONDS - TELL_SECONDS
        self._now = evolve(self._now, host=host)
        before = self._carried
        if self._before is not None and before.at:
            # The time since the note counts, too: the lag that another owner or another run left does not start again.
            self._before += max(0.0, wall() - before.at - (now - self._began))
        if before.oldest is not None:
            self._oldest = now - max(0.0, wall() - before.oldest)

    def asking(self, now: float) -> None:
        """Note that the source is being read; what came of it follows by `read` or `failed`."""
        with self._lock:
            self._asking = now

    def read(self, batch: Batch, now: float) -> None:
        """Note a reading, before its batch is handled; without an answer there was no reading (rule 3)."""
        if batch.fault:
            self.failed(batch.fault, now)
            return
        if not batch.answered:
            self._asking = None
            return
        with self._lock:
            self._asking = None
            # An answer that tells nothing of its lag must not pass for one at the tip.
            self._behind = batch.behind_seconds if batch.behind_seconds is not None else self._behind
            self._tried = self._read = now
            self._unfinished = bool(batch.count)
            if batch.count:
                self._oldest = self._arrival(batch.first_arrived, now, batch.behind_seconds or 0.0)
            elif batch.behind_seconds == 0 or batch.ended:
                self._oldest = None
            # An empty answer on the way to a record that was not handled is no progress.
            self._pending = self._unfinished or self._oldest is None
            self._arriving, self._excused = batch.last_arrived, ""
            if batch.behind_seconds is not None:
                self._keep_lag(max(batch.behind_seconds, self._waiting(now)), now)

    def failed(self, why: str, now: float) -> None:
        """Note that nothing came of a reading, or of a batch, and why."""
        with self._lock:
            self._tried, self._asking = now, None
            self._fault, self._excused = why[:FAULT_LENGTH], ""

    def excused(self, why: str, now: float) -> None:
        """Note why nothing is read now, where that is as it should be."""
        with self._lock:
            self._done = now
            # It counts as done up to now, or a shard that rightly waits would be shown as stalled.
            self._fault, self._excused = "", why

    def working(self, now: float) -> None:
        """Note that the batch is with its handler."""
        with self._lock:
            self._work = now

    def put_aside(self, seconds: float, now: float) -> None:
        """Note that the lease is released, and not taken again by its owner for so many seconds."""
        with self._lock:
            self._aside = now + seconds

    @property
    def aside(self) -> bool:
        """Whether the lease is being put aside."""
        return self._aside is not None

    def progressed(self, now: float, first: float | None = None) -> None:
        """Note that a part of a batch is done: its handler has checkpointed it, or the batch came in pieces.

        first  when the first record of the rest arrived, seconds since 1970, where that is known
        """
        with self._lock:
            if first is not None:
                self._oldest = self._arrival(first, now, 0.0)
                self._keep_lag(max(self._behind or 0.0, self._waiting(now)), now)
            # Where no handler is at work, as between two batches, a checkpoint begins no work.
            self._done, self._work = now, self._work and now

    def rested(self) -> None:
        """Note that no handler is at work any more."""
        with self._lock:
            self._work = None

    def done(self, now: float) -> None:
        """Note that what was read last is done, and no handler at work; where the last reading failed, nothing was."""
        with self._lock:
            self._work = None
            if self._pending:
                self._arrived = self._arrived if self._arriving is None else self._arriving
                self._done, self._fault, self._oldest = now, "", None
            self._unfinished = self._pending = False

    def behind(self, now: float) -> float | None:
        """Seconds behind the tip now; None before the first reading that knew."""
        with self._lock:
            return self._behind_at(now)

    def _arrival(self, first: float | None, now: float, behind: float) -> float:
        """Return when a record arrived, by our clock; it is at least as old as the last answer was behind."""
        age = 0.0 if first is None or self._wall is None else self._wall() - first
        return now - max(0.0, behind, age)

    def _waiting(self, now: float) -> float:
        """Return for how long the first record in hand has waited, or 0 if that is no longer than an answer may take.

        One read may bring all that waits in the stream, which then counts as its tip.
        """
        waited = 0.0 if self._oldest is None else now - self._oldest
        return waited if waited > SILENT_SECONDS else 0.0

    def _keep_lag(self, behind: float, now: float) -> None:
        """Keep the least lag of each step, and no more than the window."""
        if self._lags and self._lags[-1][0] // STEP_SECONDS == now // STEP_SECONDS:
            now, behind = self._lags[-1][0], min(behind, self._lags.pop()[1])
        self._lags.append((now, behind))

    def _behind_at(self, now: float) -> float | None:
        # What was read and is not done grows older until it is, whatever is read or tried meanwhile.
        oldest = 0.0 if self._oldest is None else max(0.0, now - self._oldest)
        if self._behind is None or self._read is None:
            # What the owner before told is the least that it can be, and grows until somebody reads.
            return None if self._before is None else max(oldest, self._before + max(0.0, now - self._began))
        silence = now - self._read
        # An answer that is merely late does not show as lag.
        return max(oldest, self._behind + (silence if self._unfinished or silence > SILENT_SECONDS else 0.0))

    def untold(self, now: float) -> bool:
        """Whether the last note is old."""
        return self._wall is not None and now - self._told >= TELL_SECONDS

    def progress(self, now: float, wall: float) -> Progress:
        """The reach now; `wall` is this moment in seconds since 1970."""

        def since_1970(at: float | None) -> float | None:
            return None if at is None else round(max(0.0, wall - (now - at)), 3)

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
                fault=DRIPS if self._asking is not None and now - self._asking > SILENT_SECONDS else self._fault,
                read=since_1970(self._read),
                work=since_1970(self._work),
                grows=growing(self._lags),
                excused=self._excused,
                oldest=since_1970(self._oldest),
                aside=since_1970(self._aside),
            )

    def notes(self, now: float) -> Notes:
        """The note to write now; none while silent."""
        if self._wall is None:
            return ()
        self._told = now
        return ((NOTE, self.progress(now, self._wall()).note),)
