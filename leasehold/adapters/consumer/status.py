"""How far behind each lease is, and the status of a lease and of a group: one word and one sentence, by one function.

`leases`, its exit status, `serve`, `/healthz`, metrics, alarms and `explain` all say what `status_of` says. There is
no threshold to set: as in LinkedIn's Burrow, a lease is judged by what happened over a window of time. Rule 1: OK is
said only where a row, or our own watching, shows it. Rule 2: who does not know says UNKNOWN, which is not OK either.
Rule 3: how long is long follows `lease_seconds` and the pace of readings and notes (`worker/holding.py:patience`).

The words, the worst last: see `MEANINGS`.
"""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from attrs import Factory, asdict, evolve, frozen

from leasehold.adapters.sources.protocol import Source
from leasehold.adapters.worker.progress import (
    STEP_SECONDS,
    STEPS,
    Progress,
    growing,
    patience,
    progress_of,
    told_within,
)
from leasehold.balancer.contradictions import noted_on
from leasehold.balancer.lineage import readable
from leasehold.balancer.model import Lease
from leasehold.errors import SourceError


@frozen
class LeaseLag:
    """How far behind the reading of one lease is.

    seconds  behind the tip of the shard, at most; None where nobody told
    events   the same as a count, where the stream tells counts (Event Hubs)
    end      whether reading had reached the tip, and lately
    age      seconds that the last record that was done had been in the stream, when its owner told of it
    host     the machine of the owner that told
    moves    how often the lease passed from one worker to another, as far as our workers saw
    at_least whether the seconds are a lower bound: the stream has not answered since, so nobody knows what waits
    """

    seconds: float | None = None
    events: int | None = None
    end: bool = False
    age: float | None = None
    host: str = ""
    moves: int | None = None
    at_least: bool = False

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes; what is unknown is left out, and `at_least` unless it is true."""
        known = {name: value for name, value in asdict(self).items() if value not in {None, ""}}
        return known if self.at_least else {name: value for name, value in known.items() if name != "at_least"}


def lag_of(lease: Lease, now: float, limit: float) -> LeaseLag:
    """The lag of an unfinished lease, by its row's note.

    now    seconds since 1970
    limit  an owner whose lease stands still for more seconds counts as dead
    """
    progress = progress_of(lease)
    # An owner that is late by its own clock may be dead: what it last told is no news any more.
    held = (
        lease.owner is not None and lease.idle <= limit and not (progress is not None and progress.overdue(lease.idle))
    )
    if progress is None:
        return LeaseLag()
    ours, long = progress.owner == lease.owner, patience(progress.lease or limit)
    if held and not ours and now - progress.at > long and not progress.resting(now, long):
        return LeaseLag(moves=progress.moves + 1)  # another library reads it by now, and tells nothing
    seconds = progress.lag(now, held=held and ours)
    return LeaseLag(
        seconds=None if seconds is None else round(seconds, 3),
        end=progress.end and held and ours and now - (progress.done or now) <= long,
        age=None if progress.arrived is None else round(max(0.0, progress.at - progress.arrived), 3),
        host=progress.host if ours else "",
        moves=progress.moves + (lease.owner is not None and not ours),
        at_least=progress.unheard(now, held=held and ours),
    )


def lags_of(leases: Iterable[Lease], now: float, limit: float) -> dict[str, LeaseLag]:
    """The lag of every unfinished lease, by key."""
    return {lease.key: lag_of(lease, now, limit) for lease in leases if not lease.ended}


@frozen
class FleetLag:
    """How far behind the whole application is.

    most     seconds of the lease that is furthest behind; None where nobody told of any
    total    seconds of all leases together
    at_least whether both are lower bounds, as that of a lease is
    """

    most: float | None
    total: float
    at_least: bool = False


def fleet_lag(lags: Mapping[str, LeaseLag]) -> FleetLag:
    """The lags of all leases as one."""
    known = [lag.seconds for lag in lags.values() if lag.seconds is not None]
    return FleetLag(max(known, default=None), round(sum(known), 3), any(lag.at_least for lag in lags.values()))


def asked(source: Source, leases: Iterable[Lease], lags: Mapping[str, LeaseLag]) -> dict[str, LeaseLag]:
    """The lags, where a row has no note, such as Java's, by the stream itself.

    Where the stream numbers its events without a gap (Event Hubs), they are counted; else one batch is read at the
    checkpoint, which shows how far that is behind. Raises SourceError.
    """
    found = dict(lags)
    for lease in leases:
        if lease.key not in found or found[lease.key].seconds is not None:
            continue
        latest = source.latest(lease)
        if latest.numbered and lease.checkpoint.numbered:
            events = max(0, int(latest.sequence) - int(lease.checkpoint.sequence))
            found[lease.key] = LeaseLag(0.0 if not events else None, events, not events)
        if latest.sequence != "AT_TIMESTAMP" or lease.checkpoint.sequence == "LATEST":
            continue  # counted already, or nothing that a batch would tell
        reader = source.open(lease, lease.checkpoint)
        try:
            batch = reader.read()
        except SourceError:
            continue  # what no row tells and the stream does not either stays unknown
        finally:
            reader.close()
        waiting = batch.records[0].arrived if batch.records else None
        behind = batch.behind_seconds if waiting is None else max(0.0, latest.sub / 1000 - waiting)
        if behind is not None:
            found[lease.key] = LeaseLag(round(behind, 3), end=not behind)
    return found


MEANINGS = {
    "OK": "read and handled up to the tip, or not falling behind",
    "UNKNOWN": "nobody tells: the table or the rows say too little, or were watched too shortly",
    "BEHIND": "read, and all the time further behind for two minutes",
    "STALLED": "owned, and its position stands: readings, or the handler, fail",
    "HUNG": "its handler is at work without an end",
    "UNREAD": "owned, and nobody has read it, without a reason",
    "ORPHAN": "nobody alive has owned it for longer than it should take",
}
"""Each word with its meaning, the worst last."""

NUMBERS = {word: number and number + 2 for number, word in enumerate(MEANINGS)}
"""As the exit status of `leases --check` and the value of a metric: OK is 0, the others 3 to 8, the worst the highest.

1 and 2 are a command's own: a store that failed, bad usage.
"""


@frozen
class Status:
    """A word of `MEANINGS`, and a sentence that says why."""

    word: str
    says: str

    @property
    def number(self) -> int:
        """The word as a number."""
        return NUMBERS[self.word]

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return self.word == "OK"

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        return {"status": self.word, "says": self.says}


@frozen
class LeaseWatch:
    """The window of an onlooker on one lease, for rows that say nothing of their reading.

    samples  (seconds of a clock, position, lag) of looks, the last `STEPS` steps of them
    former   when the last note was written that was seen without its writer owning the lease: should that worker take
             it again, the note tells nothing of this time
    """

    samples: tuple[tuple[float, tuple[int, int, int], float | None], ...] = ()
    former: float | None = None

    def after(self, at: float, lease: Lease, lag: LeaseLag) -> "LeaseWatch":
        """The window after one look more."""
        behind = lag.seconds if lag.events is None else float(lag.events)
        kept = tuple(each for each in self.samples if at - each[0] <= STEPS * STEP_SECONDS)
        # Looks may come many times a second: those that show nothing new take one place, or the window would grow with
        # them.
        close = len(kept) > 1 and kept[-1][1] == lease.checkpoint.order and at - kept[-2][0] < 1.0  # looks may be many
        progress = progress_of(lease)
        # A note that outlived its writer's ownership is of an earlier time, should that worker own the lease again.
        former = self.former if progress is None or progress.owner == lease.owner else progress.at
        return LeaseWatch((*(kept[:-1] if close else kept), (at, lease.checkpoint.order, behind)), former)

    @property
    def stands(self) -> float:
        """For how long the position has stood."""
        since = [at for at, position, _ in self.samples if position == self.samples[-1][1]]
        # Counted from the first look that showed it: how long it stood before nobody saw.
        return since[-1] - since[0] if since else 0.0

    @property
    def moved(self) -> bool:
        """Whether the position was seen to move."""
        return len({position for _, position, _ in self.samples}) > 1

    @property
    def grows(self) -> bool:
        """Whether lag has only grown."""
        return growing([(at, behind) for at, _, behind in self.samples if behind is not None])


@frozen
class GroupWatch:
    """The window of an onlooker on all leases of a table."""

    leases: Mapping[str, LeaseWatch] = Factory(dict)
    began: float = math.inf
    at: float = math.inf

    def after(self, at: float, leases: Iterable[Lease], lags: Mapping[str, LeaseLag]) -> "GroupWatch":
        """The window after one look more, at this second of one clock."""
        seen = {
            lease.key: self.leases.get(lease.key, LeaseWatch()).after(at, lease, lags[lease.key])
            for lease in leases
            if lease.key in lags
        }
        return GroupWatch(seen, min(self.began, at), at)

    @property
    def seconds(self) -> float:
        """For how long the table has been watched."""
        return 0.0 if self.at == math.inf else self.at - self.began


def statuses_of(
    leases: Iterable[Lease],
    lags: Mapping[str, LeaseLag],
    now: float,
    lease_seconds: float,
    watch: GroupWatch | None = None,
) -> dict[str, Status]:
    """The status of every lease, by key.

    now            seconds since 1970
    lease_seconds  of owners whose rows do not say theirs
    """
    rows = {lease.key: lease for lease in leases}
    watch = watch or GroupWatch()
    return {
        key: status_of(
            lease,
            lags.get(key, LeaseLag()),
            now,
            lease_seconds,
            watched=watch.seconds,
            watch=watch.leases.get(key, LeaseWatch()),
            waits=not readable(lease, rows),
            contradiction=noted_on(lease),
        )
        for key, lease in rows.items()
    }


def status_of(
    lease: Lease,
    lag: LeaseLag,
    now: float,
    lease_seconds: float,
    *,
    watched: float = 0.0,
    watch: LeaseWatch = LeaseWatch(),
    waits: bool = False,
    contradiction: str = "",
) -> Status:
    """The status of one lease.

    lag            as the row tells it, or the stream
    now            seconds since 1970
    lease_seconds  of an owner whose row does not say its own
    watched        for how many seconds the table was watched; `lease.idle` was counted meanwhile
    watch          what was seen of this lease then
    waits          whether a parent is not done: its children are not read before (L12)
    contradiction  why it cannot be right
    """
    if contradiction or lease.ended:
        return Status("UNREAD", contradiction) if contradiction else Status("OK", "read to its end")
    progress = progress_of(lease)
    long = patience(lease_seconds if progress is None or progress.lease is None else progress.lease)
    # Nobody reads it, and nobody should: else every split would raise an alarm.
    if waits:
        return Status("OK", "its parents are not done: it is read after them")
    # For how long, at least, nobody has renewed it: as far as it was seen, or as its last note tells.
    alone = lease.idle if lease.idle < math.inf else 0.0
    if progress is not None and progress.owner == (lease.owner or progress.owner) and watched <= lease.idle + 1.0:
        alone = max(alone, now - progress.at)  # not where its version has moved while we looked
    recent = progress is not None and now - progress.at <= long
    # A fault wins over the lack of an owner: the worker that could not handle it leaves it to others for a while.
    if progress is not None and progress.resting(now, long) and (lease.owner is None or not recent):
        who = f"; {progress.owner} put it aside until {_utc(progress.aside or 0.0)}" if lease.owner is None else ""
        return Status("STALLED", f"{_stood(progress, now)}{who}")
    # Asked before the note is: whatever it tells of its reading, nobody reads on.
    if alone > long or (lease.owner is None and not recent):
        return _lone(lease, progress, alone, long, watched)
    own = progress is not None and progress.owner == lease.owner and progress.at != watch.former
    if progress is None or not (recent or own):
        return _untold(lease, lag, watched, watch, long)
    # Renewed while we looked, with an old note: its clock is behind ours, and its times are its own.
    told = _told(progress, max(now, progress.at) if recent else progress.at, long)
    if told.word == "UNREAD" and own and alone > told_within(progress.lease or lease_seconds):
        # Its note is overdue as well: the owner is gone, rather than idle.
        return _lone(lease, progress, alone, 0.0, watched)
    if told.ok and own and progress.overdue(lease.idle):
        return Status("OK", f"{told.says} {now - progress.at:.0f} s ago; {lease.owner} should have renewed it since")
    if not told.ok or own:
        return told
    return Status(
        "OK", "nobody owns it: the next look of a worker finds it" if lease.owner is None else "it came lately"
    )


def _lone(lease: Lease, progress: Progress | None, alone: float, long: float, watched: float) -> Status:
    """The status of a lease that has no owner, or one that was not heard of, for so many seconds."""
    whose = "nobody owns it" if lease.owner is None else f"{lease.owner} owns it and has not been heard of"
    if alone > long:
        fault = f"; the last fault: {progress.fault}" if progress is not None and progress.fault else ""
        return Status("ORPHAN", f"{whose} for {alone:.0f} s, and nobody else takes it{fault}")
    if watched <= 0:
        return Status("UNKNOWN", f"{whose}; one look does not tell for how long: watch it (--watch)")
    return Status("UNKNOWN", f"{whose} for {alone:.0f} s as far as was seen; within {long:.0f} s somebody should")


def _told(progress: Progress, now: float, long: float) -> Status:
    """The status by the owner's note."""
    work, stands = progress.work, 0.0 if progress.done is None else now - progress.done
    if stands <= long:
        if progress.grows:
            return Status("BEHIND", f"{_behind(progress)}, and all the time further for two minutes")
        # Its owner says why it does not read now: it waits for parents, or for room.
        return Status("OK", progress.excused or _behind(progress))
    # Before the fault: a handler that never returns is the cause, whatever failed before.
    if work is not None and now - work > long:
        return Status("HUNG", f"its handler has been at work for {now - work:.0f} s, without an end or a checkpoint")
    if progress.fault:
        return Status("STALLED", _stood(progress, now))
    return Status(
        "UNREAD", f"{progress.owner} owns it, and has not read it for {stands:.0f} s, for no reason that it tells"
    )


def _stood(progress: Progress, now: float) -> str:
    stands = 0.0 if progress.done is None else now - progress.done
    return f"it has stood for {stands:.0f} s: {progress.fault or 'its owner could not go on'}"


def _utc(at: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.gmtime(at))} UTC"  # rows may hold times that no calendar has


def _behind(progress: Progress) -> str:
    if progress.behind is None:
        return "not read yet" if progress.read is None else "read, how far behind is not known"
    return "read to the tip" if progress.end else f"{progress.behind:.1f} s behind"


def _untold(lease: Lease, lag: LeaseLag, watched: float, watch: LeaseWatch, long: float) -> Status:
    """The status of another library's lease, whose row says nothing of its reading, by what was seen of it."""
    waiting = lag.seconds if lag.events is None else float(lag.events)
    how = f"{lag.events} events behind" if lag.events is not None else f"{waiting or 0.0:.1f} s behind"
    # Before the rest: a shard at its tip stands still because nothing comes.
    if waiting == 0:
        return Status("OK", "read to the tip")
    if watch.grows and watch.moved:
        # It works and does not keep up, which is another matter than standing still.
        return Status("BEHIND", f"{how}, and all the time further for two minutes")
    if waiting is not None and watch.stands > long:
        return Status("STALLED", f"{how}, and its checkpoint has stood for {watch.stands:.0f} s")
    if watch.moved and watch.stands <= long:
        return Status("OK", f"its checkpoint moves; {how}" if waiting is not None else "its checkpoint moves")
    if watched <= 0:
        # One look shows where the checkpoint is, and not whether it moves.
        return Status("UNKNOWN", f"{lease.owner} tells nothing of its reading: watch it (--watch)")
    asks = "" if waiting is not None else "; --source asks the stream whether anything waits"
    return Status("UNKNOWN", f"its checkpoint has not moved in {watch.stands:.0f} s{asks}")


def group_status(statuses: Mapping[str, Status], trouble: str = "") -> Status:
    """The status of all leases together: that of the worst; `trouble` is why the table cannot be read."""
    if trouble:
        return Status("UNKNOWN", f"the table cannot be read: {trouble}")
    if not statuses:
        return Status("UNKNOWN", "the table has no leases")
    # One shard that is read by nobody is a fault of the group, however many others are well.
    worst = max(statuses.values(), key=lambda each: each.number)
    keys = sorted(key for key, each in statuses.items() if each.word == worst.word)
    if worst.ok:
        return Status("OK", f"{len(keys)} leases are read, and do not fall behind")
    whole = f"{len(keys)} of {len(statuses)} leases"
    return evolve(worst, says=f"{whole}, {keys[0]} first: {statuses[keys[0]].says}")
